"""A run: a task's network, the loop, checkpoints, and the results in its folder."""

from __future__ import annotations

import csv
import math
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ltm.api import merging_network
from ltm.core.cost import num_parameters
from ltm.data.datasets import Splits
from ltm.files import output_folder, results_in, write_bytes, write_json, write_text
from ltm.interruption import in_steps, stepwise
from ltm.models import ModelSource, Network, Say, changed, name_of, plain, silent, source_of
from ltm.training.checkpoint import SETTINGS, Checkpoint, Checkpoints
from ltm.training.classification import Classification
from ltm.training.distillation import Distillation
from ltm.training.fabric import Fabric, first_alone, make_fabric, placed
from ltm.training.network import saved_architecture
from ltm.training.recipes import FINETUNE, SCRATCH, starting_settings
from ltm.training.settings import TrainSettings, read_settings, to_yaml, with_options
from ltm.training.task import EpochRow, Task
from ltm.training.trainable import without_lora
from ltm.training.trainer import Trainer

Resume = Literal["auto", "never"]

_MAY_CHANGE = ("run.", "data.workers", "data.source", "optim.epochs", "model.weights")
"""Settings that may differ when a run is resumed, except for its seed."""
_SEED = "run.seed"
_RESULTS = ("metrics.json", "model/config.json", "results.json", "curves.png", "log.csv")
"""What an earlier run left, in the order in which it is deleted when another one starts over."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class TrainResult:
    """The result of a run: the network in evaluation mode, its metrics, and every epoch."""

    model: nn.Module
    metrics: dict[str, Any]
    rows: Sequence[EpochRow]
    settings: Any
    folder: Path | None
    """Where the run was kept, if it was."""
    line: str
    write_model: Callable[[Path], None]

    @property
    def history(self) -> list[dict[str, Any]]:
        """All epochs as plain values."""
        return [asdict(row) for row in self.rows]

    def save(self, folder: str | Path) -> Path:
        """Write config.yaml, log.csv, curves.png, metrics.json and model/ into a folder."""
        folder = Path(folder)
        with results_in(folder) as aside:
            self.write_model(aside)
            write_text(aside / "config.yaml", to_yaml(self.settings))
            _write_rows(self.rows, aside / "log.csv")
            _draw_curves(self.rows, aside / "curves.png")
            write_json(aside / "metrics.json", self.metrics)
        return folder

    def __repr__(self) -> str:
        kept = "" if self.folder is None else f"; kept in {self.folder}"
        epochs = f"epoch {self.metrics['epoch']} of {self.metrics['epochs']}"
        return f"TrainResult: {self.line} after {epochs}{kept}"


def train(
    model: Network | None = None,
    data: str | Path | Splits | None = None,
    settings: TrainSettings | str | None = None,
    *,
    output: str | Path | None = None,
    resume: Resume = "never",
    overwrite: bool = False,
    say: Say = silent,
    **changes: Any,
) -> TrainResult:
    """Train a token-merging classifier from scratch.

    `run_task` says what `output` will hold.

    Args:
        model: timm's name of a network; or a network, which is trained in place; or a
            `ModelSource`. By default the one that the settings name.
        data: where labelled images are, or your own `Splits`; by default as the settings say.
        settings: all settings, or the name of a recipe; by default the recipe of the model.
        output: folder of the run; without one, nothing is written.
        resume: "auto" continues from the last complete checkpoint in `output`, if there is one.
        overwrite: start over in a folder that holds a run.
        say: called with each line of progress.
        changes: changes of the settings, such as `epochs=5`, or of a whole group, such as
            `augment={"mixup": 0.2}`.
    """
    task = _task(SCRATCH, model, data, settings, changes)
    return run_task(task, output, resume=resume, overwrite=overwrite, say=say)


def finetune(
    model: Network | None = None,
    data: str | Path | Splits | None = None,
    settings: TrainSettings | str | None = None,
    *,
    output: str | Path | None = None,
    resume: Resume = "never",
    overwrite: bool = False,
    say: Say = silent,
    **changes: Any,
) -> TrainResult:
    """Convert a pretrained classifier and train its mask modules; all other parameters stay frozen.

    The arguments are those of `train`, but the recipes are other ones. A name means timm's own
    weights, and `model` may also be a folder that ltm wrote. `unfreeze=("head.*",)` and
    `lora_rank=8` train more. With `teacher="self"`, or a recipe such as "distil_norms", the teacher
    is the network without merging: images need no labels, and if training does not help, the
    untrained network is kept.
    """
    task = _task(FINETUNE, model, data, settings, changes)
    return run_task(task, output, resume=resume, overwrite=overwrite, say=say)


def _task(
    recipes: Mapping[str, TrainSettings],
    model: Network | None,
    data: str | Path | Splits | None,
    settings: TrainSettings | str | None,
    changes: Mapping[str, Any],
) -> Classification:
    """The task that a call of `train` or `finetune` describes."""
    given = model if isinstance(model, nn.Module) else None
    source = None if model is None else source_of(model)
    chosen = {} if source is None else _model_settings(source, recipes is FINETUNE)
    if not isinstance(settings, TrainSettings):
        name = chosen.get("name") if given is None else name_of(given)
        method = changes.get("method")
        settings = starting_settings(recipes, recipe=settings, model=name, method=method)
    groups: dict[str, Any] = {"model": chosen} if chosen else {}
    if source is not None and source.image_size is not None:
        groups["data"] = {"image_size": source.image_size}
    if isinstance(data, str | Path):
        groups.setdefault("data", {})["source"] = str(data)
    settings = with_options(changed(settings, groups), changes)
    splits = data if isinstance(data, Splits) else None
    kind = Distillation if settings.objective.teacher == "self" else Classification
    return kind(settings, model=given, splits=splits)


def _model_settings(source: ModelSource, pretrained: bool) -> dict[str, Any]:
    """The settings of the model that name a network's source."""
    values: dict[str, Any] = {"name": source.model, "pretrained": False, "weights": None}
    if source.run is not None:
        values["weights"] = str(source.run)
        values["name"] = source.model or saved_architecture(source.run)
    elif source.weights is not None:
        values["weights"] = str(source.weights)
    else:
        values["pretrained"] = pretrained and source.pretrained
    if source.num_classes is not None:
        values["num_classes"] = source.num_classes
    if source.model_args:
        values["model_args"] = source.model_args
    return {name: value for name, value in values.items() if name != "name" or value is not None}


def run_task(
    task: Task,
    output: str | Path | None,
    *,
    resume: Resume = "never",
    overwrite: bool = False,
    say: Say = silent,
) -> TrainResult:
    """Train a task's network and keep it in `output`.

    The folder gets `config.yaml`, `log.csv`, `curves.png`, `metrics.json`, `checkpoints/` and, at
    the end, `model/`. `resume="auto"` continues from the last complete checkpoint, if there is one.
    """
    settings = task.settings
    with ExitStack() as stack:
        task.check()
        fabric = make_fabric(settings.run)
        fabric.launch()
        if output is not None:
            stack.enter_context(_held(Path(output), fabric, resume, overwrite))
        say = say if fabric.is_global_zero else silent
        task.open_data()
        torch.manual_seed(settings.run.seed)
        model = placed(task.build(say), fabric, settings.run)
        for line in task.describe(model):
            say(line)
        trainer = Trainer(fabric, task, model, shows_progress=say is not silent)
        folder = Path(output) if output is not None else _scratch_folder(fabric, stack)
        checkpoints = Checkpoints(
            folder / "checkpoints", keep_every=settings.run.keep_every, row_type=task.row_type
        )
        with first_alone(fabric) as first:
            if first:
                _open_output(folder, settings, checkpoints, resume)
        start = _resume_(trainer, checkpoints, say)
        rows = [task.row_type(**row) for row in start.history] if start else []
        log = _RunLog(rows, say, folder if output and fabric.is_global_zero else None)
        with (
            _explained(checkpoints, say, kept=output is not None),
            checkpoints.space_for("the run"),
        ):
            _fit(trainer, checkpoints, log, start.epoch if start else 0)
            return _finish(trainer, checkpoints, log, None if output is None else folder)


def _fit(trainer: Trainer, checkpoints: Checkpoints, log: _RunLog, first_epoch: int) -> None:
    epochs = trainer.settings.optim.epochs
    with in_steps():
        for epoch in stepwise(range(first_epoch, epochs)):
            row = trainer.run_epoch(epoch)
            log.add(row, epochs)
            counts = row.merging or merging_network(trainer.model) is None
            trainer.save(checkpoints, epoch + 1, row.score if counts else None, log.history)


def _finish(
    trainer: Trainer, checkpoints: Checkpoints, log: _RunLog, output: Path | None
) -> TrainResult:
    """Load the epoch that is kept, let the task complete its network, and write the results."""
    task, fabric = trainer.task, trainer.fabric
    best = None if task.keeps_last(trainer.model) else checkpoints.best()
    best = best or checkpoints.latest()
    assert best is not None, "every epoch left a checkpoint"
    model = fabric.to_device(task.rebuild()) if trainer.is_sharded else trainer.evaluated
    model.load_state_dict(best.weights("ema" if best.has("ema") else "weights"))
    model = without_lora(model).eval()
    done = task.finish_(model, log.rows[best.epoch - 1], log.rows)
    metrics = {
        **done.metrics,
        "epoch": best.epoch,
        "epochs": log.rows[-1].epoch,
        "parameters": num_parameters(model),
        "seconds_per_epoch": sum(row.train_seconds for row in log.rows) / len(log.rows),
    }
    result = TrainResult(
        model=model,
        metrics=metrics,
        rows=tuple(log.rows),
        settings=task.settings,
        folder=output,
        line=done.line,
        write_model=done.write,
    )
    with first_alone(fabric) as first:
        if first and output is not None:
            result.save(output)
    where = "" if output is None else f"; {output / 'model'}"
    log.say(f"{done.line} after epoch {best.epoch}{where}")
    return result


def _scratch_folder(fabric: Fabric, stack: ExitStack) -> Path:
    """A temporary folder for the checkpoints of a run without output, the same in all processes."""
    name = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
    return Path(fabric.broadcast(name))


@contextmanager
def _held(output: Path, fabric: Fabric, resume: Resume, overwrite: bool) -> Iterator[None]:
    """Lock the folder of a run in the first process; if that is refused, all processes stop."""
    with ExitStack() as stack:
        refused: Exception | None = None
        if fabric.is_global_zero:
            try:
                stack.enter_context(output_folder(output))
                _refuse_run(output, resume, overwrite)
            except (OSError, ValueError) as error:
                refused = error
        refused = fabric.broadcast(refused)
        if refused is not None:
            raise refused
        yield


def _refuse_run(output: Path, resume: Resume, overwrite: bool) -> None:
    """Refuse a folder that holds a run already, unless that run is continued or overwritten."""
    there = len(Checkpoints(output / "checkpoints")) or (output / "metrics.json").exists()
    if there and resume == "never" and not overwrite:
        raise ValueError(
            f"{output} holds a run already; continue it with --resume auto, start over with "
            "--overwrite, or choose another --output"
        )


def _open_output(output: Path, settings: Any, checkpoints: Checkpoints, resume: Resume) -> None:
    """Make the folder of a run, or check that a run there can go on with these settings."""
    output.mkdir(parents=True, exist_ok=True)
    config = output / "config.yaml"
    if resume == "never":
        for name in _RESULTS:  # the first one tells a reader that the results are complete
            (output / name).unlink(missing_ok=True)
        checkpoints.clear()
    elif len(checkpoints):
        before = _earlier_settings(config, checkpoints, type(settings)())
        differ = [] if before is None else _differences(before, settings)
        if differ:
            raise ValueError(f"{output} cannot be resumed with other settings: {'; '.join(differ)}")
    write_text(config, to_yaml(settings))


def _earlier_settings(config: Path, checkpoints: Checkpoints, base: Any) -> Any:
    """The settings of an earlier run: its `config.yaml`, or the copy in its last checkpoint."""
    last = checkpoints.latest()
    copy = None if last is None else last.folder / SETTINGS
    for path in (config, copy):
        if path is not None and path.is_file():
            try:
                return read_settings(path, base)
            except ValueError as error:
                warnings.warn(f"{error}; continuing without it", stacklevel=2)
    return None


def _differences(before: Any, after: Any) -> list[str]:
    """Settings that differ, although a resumed run needs the same."""
    old, new = dict(_flat(plain(before))), dict(_flat(plain(after)))
    return [
        f"{name} is {new[name]} but was {old[name]}"
        for name in new
        if old[name] != new[name] and (name == _SEED or not name.startswith(_MAY_CHANGE))
    ]


def _flat(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _resume_(trainer: Trainer, checkpoints: Checkpoints, say: Say) -> Checkpoint | None:
    """Continue from the last complete checkpoint, which the first process chooses."""
    fabric = trainer.fabric
    found = fabric.broadcast(checkpoints.latest() if fabric.is_global_zero else None)
    if found is not None:
        changes = trainer.restore_(found)
        say(f"resumed after epoch {found.epoch} from {found.folder}")
        if changes:
            say(changes)
    return found


@contextmanager
def _explained(checkpoints: Checkpoints, say: Say, *, kept: bool) -> Iterator[None]:
    """Say what is kept of a run that was stopped."""
    try:
        yield
    except KeyboardInterrupt:
        if kept:
            last = checkpoints.latest()
            kept_so_far = f"epoch {last.epoch} is kept" if last else "no epoch was finished"
            say(f"stopped: {kept_so_far}; continue with --resume auto")
        raise


# --- The log: a table, curves, and a line on the console ------------------------------------------


class _RunLog:
    """The rows of a run; with a folder also `log.csv`, and TensorBoard's files if installed."""

    def __init__(self, rows: Sequence[EpochRow], say: Say, folder: Path | None) -> None:
        self.rows, self.say = list(rows), say
        self._folder = folder
        self._events = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"

    @property
    def history(self) -> list[dict[str, Any]]:
        """All rows as plain values."""
        return [asdict(row) for row in self.rows]

    def add(self, row: EpochRow, epochs: int) -> None:
        """Log an epoch."""
        self.rows.append(row)
        if self._folder is not None:
            _write_rows(self.rows, self._folder / "log.csv")
            self._write_board(row, self._folder)
        recent = self.rows[-5:]
        seconds = sum(r.train_seconds + r.statistics_seconds + r.val_seconds for r in recent)
        self.say(row.line(epochs, (epochs - row.epoch) * seconds / len(recent)))

    def _write_board(self, row: EpochRow, folder: Path) -> None:
        """Add an epoch to TensorBoard's file.

        TensorBoard's own writer does so in a thread, which hides its errors.
        """
        try:
            from tensorboard.compat.proto import event_pb2  # noqa: PLC0415 - optional
            from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415
            from torch.utils.tensorboard.summary import scalar  # noqa: PLC0415
        except ImportError:
            return
        make: Any = event_pb2
        path = folder / "tensorboard" / self._events
        path.parent.mkdir(parents=True, exist_ok=True)
        events = BytesIO()
        writer = RecordWriter(events)
        if not path.exists():
            first = make.Event(wall_time=time.time(), file_version="brain.Event:2")
            writer.write(first.SerializeToString())
        for name, value in asdict(row).items():
            if isinstance(value, float) and math.isfinite(value):
                summary = scalar(name.replace("_", "/", 1), value)
                event = make.Event(wall_time=time.time(), step=row.epoch, summary=summary)
                writer.write(event.SerializeToString())
        with path.open("ab") as file:
            file.write(events.getvalue())


def _write_rows(rows: Sequence[EpochRow], path: Path) -> None:
    """Write the whole table, as a resumed run drops the rows that it repeats."""
    text = StringIO()
    names = [column.name for column in fields(rows[0])]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_text(path, text.getvalue())


def _draw_curves(rows: Sequence[EpochRow], path: Path) -> None:
    """Losses and scores by epoch."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow; runs without output need none

    panels = rows[0].panels
    figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
    first = next((row.epoch for row in rows if row.merging), rows[0].epoch)
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for label, column in panel.columns.items():
            points = [(row.epoch, getattr(row, column)) for row in rows]
            points = [(epoch, panel.scale * value) for epoch, value in points if value is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="." * (len(points) < 50), label=label)
        axes.set(xlabel="epoch", ylabel=panel.axis)
        axes.spines[["top", "right"]].set_visible(False)
        if first > rows[0].epoch:
            axes.axvline(first, linewidth=0.8, linestyle=":", color="grey")
        if len(axes.lines) and len(panel.columns) > 1:
            axes.legend(frameon=False)
    image = BytesIO()
    figure.savefig(image, dpi=120)
    write_bytes(path, image.getvalue())

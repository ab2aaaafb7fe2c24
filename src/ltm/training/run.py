"""A run: a task's network, the loop, checkpoints, and what remains of it in a folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import nn

from ltm.api import merging_network
from ltm.data.datasets import Splits
from ltm.files import write_json, write_text
from ltm.models import plain
from ltm.training.checkpoint import Checkpoint, Checkpoints
from ltm.training.classification import Classification
from ltm.training.fabric import Fabric, first_alone, make_fabric, placed
from ltm.training.log import EpochRow, RunLog, draw_curves, plain_console, write_rows
from ltm.training.lora import without_lora
from ltm.training.settings import TrainSettings, read_settings, to_yaml
from ltm.training.task import Task
from ltm.training.trainer import Trainer

Resume = Literal["auto", "never"]

_MAY_CHANGE = ("run.", "data.workers", "data.source", "optim.epochs", "model.weights")
"""Settings that may differ when a run is resumed, except for its seed."""
_SEED = "run.seed"


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainResult:
    """What a run leaves: the network in evaluation mode, its numbers, and every epoch."""

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
        self.write_model(folder)
        write_text(folder / "config.yaml", to_yaml(self.settings))
        write_rows(self.rows, folder / "log.csv")
        draw_curves(self.rows, folder / "curves.png")
        write_json(folder / "metrics.json", self.metrics)
        return folder

    def __repr__(self) -> str:
        kept = "" if self.folder is None else f"; kept in {self.folder}"
        epochs = f"epoch {self.metrics['epoch']} of {self.metrics['epochs']}"
        return f"TrainResult: {self.line} after {epochs}{kept}"


def train(
    settings: TrainSettings,
    output: str | Path | None,
    *,
    resume: Resume = "never",
    overwrite: bool = False,
    model: nn.Module | None = None,
    splits: Splits | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Train or fine-tune a classifier; `run_task` says what is left in `output`.

    A `model` and `splits` of one's own replace those of the settings; the model is trained in
    place.
    """
    task = Classification(settings, model=model, splits=splits)
    return run_task(task, output, resume=resume, overwrite=overwrite, console=console)


def run_task(
    task: Task[Any],
    output: str | Path | None,
    *,
    resume: Resume = "never",
    overwrite: bool = False,
    console: Console | None = None,
) -> TrainResult:
    """Train a task's network and keep it in `output`.

    The folder gets `config.yaml`, `log.csv`, `curves.png`, `metrics.json`, `checkpoints/` and, at
    the end, `model/`. `resume="auto"` continues from the last complete checkpoint where there is
    one. Without a folder nothing is kept but the result.
    """
    settings, console = task.settings, console or plain_console()
    with ExitStack() as stack:
        if output is not None:
            _check_output(Path(output), resume, overwrite)
        task.check()
        fabric = make_fabric(settings.run)
        fabric.launch()
        if not fabric.is_global_zero:
            console = Console(quiet=True)
        task.open_data()
        torch.manual_seed(settings.run.seed)
        model = placed(task.build(console.print), fabric, settings.run)
        for line in task.describe(model):
            console.print(line)
        trainer = Trainer(fabric, task, model, console)
        folder = Path(output) if output is not None else _scratch_folder(fabric, stack)
        checkpoints = Checkpoints(folder / "checkpoints", keep_every=settings.run.keep_every)
        with first_alone(fabric) as first:
            if first:
                _open_output(folder, settings, checkpoints, resume)
        start = _resume_(trainer, checkpoints)
        rows = [task.row_type(**row) for row in start.history] if start else []
        log = RunLog(rows, console, folder if output and fabric.is_global_zero else None)
        with _explained(console, checkpoints, kept=output is not None):
            _fit(trainer, checkpoints, log, start.epoch if start else 0)
            return _finish(trainer, checkpoints, log, None if output is None else folder)


def _fit(trainer: Trainer, checkpoints: Checkpoints, log: RunLog, first_epoch: int) -> None:
    epochs = trainer.settings.optim.epochs
    for epoch in range(first_epoch, epochs):
        row = trainer.run_epoch(epoch)
        log.add(row, epochs)
        counts = row.merging or merging_network(trainer.model) is None
        trainer.save(checkpoints, epoch + 1, row.score if counts else None, log.history)


def _finish(
    trainer: Trainer, checkpoints: Checkpoints, log: RunLog, output: Path | None
) -> TrainResult:
    """Complete the network of the epoch that is kept, and write everything down."""
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
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
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
            log.close()
    where = "" if output is None else f"; {output / 'model'}"
    log.console.print(f"{done.line} after epoch {best.epoch}{where}")
    return result


def _scratch_folder(fabric: Fabric, stack: ExitStack) -> Path:
    """A folder for the checkpoints of a run that is not kept, the same for all processes."""
    name = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
    return Path(fabric.broadcast(name))


def _check_output(output: Path, resume: Resume, overwrite: bool) -> None:
    """Refuse a folder that holds a run already, unless that goes on or is written over."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"output is {output}, a file: a folder is needed")
    if len(Checkpoints(output / "checkpoints")) and resume == "never" and not overwrite:
        raise ValueError(
            f"{output} holds a run already; continue it with --resume auto, start over with "
            "--overwrite, or choose another --output"
        )


def _open_output(output: Path, settings: Any, checkpoints: Checkpoints, resume: Resume) -> None:
    """Make the folder of a run, or check that a run there can go on with these settings."""
    output.mkdir(parents=True, exist_ok=True)
    config = output / "config.yaml"
    if resume == "never":
        checkpoints.clear()
    elif len(checkpoints) and config.is_file():
        changed = _differences(read_settings(config, type(settings)()), settings)
        if changed:
            raise ValueError(
                f"{output} cannot be resumed with other settings: {'; '.join(changed)}"
            )
    write_text(config, to_yaml(settings))


def _differences(before: Any, after: Any) -> list[str]:
    """Settings that differ and have to be the same in a resumed run."""
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


def _resume_(trainer: Trainer, checkpoints: Checkpoints) -> Checkpoint | None:
    """Continue from the last complete checkpoint, which the first process chooses."""
    fabric = trainer.fabric
    found = fabric.broadcast(checkpoints.latest() if fabric.is_global_zero else None)
    if found is not None:
        trainer.restore_(found)
        trainer.console.print(f"resumed after epoch {found.epoch} from {found.folder}")
    return found


@contextmanager
def _explained(console: Console, checkpoints: Checkpoints, *, kept: bool) -> Iterator[None]:
    """Say what is left of a run that was stopped."""
    try:
        yield
    except KeyboardInterrupt:
        if not kept:
            raise
        last = checkpoints.latest()
        left = f"the checkpoint of epoch {last.epoch} is kept" if last else "nothing was kept yet"
        console.print(f"stopped: {left}; continue with --resume auto")
        raise SystemExit(130) from None

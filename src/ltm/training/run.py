"""Train a network from settings alone: data, model, loop, checkpoints, and what remains of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import nn

from ltm.api import conversion_of, fit_, is_merging, measure_share, report, save
from ltm.data.datasets import Splits, open_splits
from ltm.data.images import ImageDataset
from ltm.data.loading import Loader, evaluation_loader, training_loader
from ltm.models import plain
from ltm.training.checkpoint import Checkpoint, Checkpoints
from ltm.training.fabric import Fabric, first_alone, make_fabric, placed
from ltm.training.log import RunLog, plain_console, write_json
from ltm.training.lora import without_lora
from ltm.training.models import (
    Built,
    build,
    build_model,
    convert_,
    count_parameters,
    method_config,
    save_plain,
    spec_of,
)
from ltm.training.settings import TrainSettings, read_settings, to_yaml
from ltm.training.state import restore_, save_state
from ltm.training.statistics import FirstBatches
from ltm.training.trainable import choose_trainable_
from ltm.training.trainer import Loaders, Trainer
from ltm.training.validation import evaluate

FITTING_IMAGES = 256
"""Unlabelled training images, spread over all, for methods that are fitted at the end."""

Resume = Literal["auto", "never"]

_MAY_CHANGE = ("run.", "data.workers", "data.source", "optim.epochs", "model.weights")
"""Settings that a resumed run may have otherwise than before, but for its seed."""
_SEED = "run.seed"


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingResult:
    """What a run leaves: its folder, its numbers, and the network in evaluation mode."""

    folder: Path
    metrics: dict[str, Any]
    history: list[dict[str, Any]]
    model: nn.Module


def train(
    settings: TrainSettings,
    output: str | Path,
    *,
    resume: Resume = "never",
    overwrite: bool = False,
    model: nn.Module | None = None,
    splits: Splits | None = None,
    console: Console | None = None,
) -> TrainingResult:
    """Train or fine-tune a network and keep it in `output`.

    The folder gets `config.yaml`, `log.csv`, `curves.png`, `metrics.json`, `checkpoints/` and, at
    the end, `model/`, which `ltm.load` reads. `resume="auto"` continues from the last complete
    checkpoint where there is one. A `model` and `splits` of one's own replace those of the
    settings; the model is trained in place.
    """
    output, console = Path(output), console or plain_console()
    checkpoints = Checkpoints(output / "checkpoints", keep_every=settings.run.keep_every)
    check_output(output, checkpoints, resume, overwrite)
    fabric = make_fabric(settings.run)
    fabric.launch()
    if not fabric.is_global_zero:
        console = Console(quiet=True)
    splits = splits or open_splits(settings.data)
    torch.manual_seed(settings.run.seed)
    if model is not None and settings.run.strategy == "fsdp":
        raise ValueError("strategy is fsdp, which needs a model made by the run; use ddp")
    if model is None:
        built = build(settings, splits.train.num_classes, say=console.print)
    else:
        built = Built(model)
        convert_(model, settings, method_config(settings.merge))
    model = built.model
    choose_trainable_(model, settings.tune, built.new_head)
    if settings.run.grad_checkpointing:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    model = placed(model, fabric, settings.run)
    _describe(console, settings, model)
    if built.new_head:
        console.print(f"the head is new, for {splits.train.num_classes} classes, and trains")
    trainer = Trainer(fabric, settings, model, _loaders(fabric, settings, model, splits), console)
    with first_alone(fabric) as first:
        if first:
            _open_output(output, settings, checkpoints, resume)
    start = _resume_(trainer, checkpoints, fabric, console)
    log = RunLog(
        output, start.history if start else (), console=console, writes=fabric.is_global_zero
    )
    with explained(console, checkpoints):
        _fit(trainer, checkpoints, log, start.epoch if start else 0)
        return _finish(trainer, splits, checkpoints, log, output)


def _fit(trainer: Trainer, checkpoints: Checkpoints, log: RunLog, first_epoch: int) -> None:
    epochs = trainer.settings.optim.epochs
    for epoch in range(first_epoch, epochs):
        row = trainer.run_epoch(epoch)
        log.add(row, epochs)
        counts = trainer.merges_in(epoch) or not is_merging(trainer.model)
        score = row.val_top1 if counts and math.isfinite(row.val_loss) else None
        save_state(trainer, checkpoints, epoch + 1, score, log.history)


def check_output(output: Path, checkpoints: Checkpoints, resume: Resume, overwrite: bool) -> None:
    """Refuse a folder that holds a run already, unless that goes on or is written over."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"output is {output}, a file: a folder is needed")
    if len(checkpoints) and resume == "never" and not overwrite:
        raise ValueError(
            f"{output} holds a run already; continue it with --resume auto, start over with "
            "--overwrite, or choose another --output"
        )


def _open_output(
    output: Path, settings: TrainSettings, checkpoints: Checkpoints, resume: Resume
) -> None:
    """Make the folder of a run, or check that a run there can go on with these settings."""
    output.mkdir(parents=True, exist_ok=True)
    config = output / "config.yaml"
    if resume == "never":
        checkpoints.clear()
    elif len(checkpoints) and config.is_file():
        changed = differences(read_settings(config), settings)
        if changed:
            raise ValueError(
                f"{output} cannot be resumed with other settings: {'; '.join(changed)}"
            )
    config.write_text(to_yaml(settings), encoding="utf-8")


def differences(before: TrainSettings, after: TrainSettings) -> list[str]:
    """Settings that differ, but for those that a resumed run may change."""
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


def _loaders(fabric: Fabric, settings: TrainSettings, model: nn.Module, splits: Splits) -> Loaders:
    spec = spec_of(settings, model)
    place: dict[str, Any] = {
        "device": fabric.device,
        "rank": fabric.global_rank,
        "world_size": fabric.world_size,
    }
    wanted = settings.merge.statistics_images

    def clean() -> FirstBatches:
        subset = splits.train.take(wanted)
        loader: Loader = evaluation_loader(subset, spec, settings.data, **place)
        share = -(-wanted // (settings.data.batch_size * fabric.world_size))
        # Sharded networks run in step: no process may have a batch more than another.
        even = len(subset) // (settings.data.batch_size * fabric.world_size)
        return FirstBatches(loader, min(share, even) if settings.run.strategy == "fsdp" else share)

    train = training_loader(
        splits.train, spec, settings.data, settings.augment, seed=settings.run.seed, **place
    )
    val = evaluation_loader(splits.val, spec, settings.data, **place)
    return Loaders(train=train, val=val, clean=clean, num_classes=splits.train.num_classes)


def _describe(console: Console, settings: TrainSettings, model: nn.Module) -> None:
    trained, total = count_parameters(model)
    console.print(
        f"{settings.model.name}: {trained:,} of {total:,} parameters train"
        if trained < total
        else f"{settings.model.name}: {total:,} parameters"
    )
    if is_merging(model):
        console.print(str(report(model)))
        if settings.merge.warm_epochs >= settings.optim.epochs:
            console.print(
                f"warm_epochs is {settings.merge.warm_epochs}, so none of {settings.optim.epochs} "
                "epochs merges and scores are those of the network without merging"
            )


def _resume_(
    trainer: Trainer, checkpoints: Checkpoints, fabric: Fabric, console: Console
) -> Checkpoint | None:
    """Continue from the last complete checkpoint, which the first process chooses."""
    found = fabric.broadcast(checkpoints.latest() if fabric.is_global_zero else None)
    if found is not None:
        restore_(trainer, found)
        console.print(f"resumed after epoch {found.epoch} from {found.folder}")
    return found


@contextmanager
def explained(console: Console, checkpoints: Checkpoints) -> Iterator[None]:
    """Say what is left of a run that was stopped."""
    try:
        yield
    except KeyboardInterrupt:
        last = checkpoints.latest()
        kept = f"the checkpoint of epoch {last.epoch} is kept" if last else "nothing was kept yet"
        console.print(f"stopped: {kept}; continue with --resume auto")
        raise SystemExit(130) from None


def _finish(
    trainer: Trainer, splits: Splits, checkpoints: Checkpoints, log: RunLog, output: Path
) -> TrainingResult:
    """Keep the best network, or the last where its method is still to be fitted; write it down."""
    fabric, last = trainer.fabric, log.rows[-1]
    fits = is_merging(trainer.model) and conversion_of(trainer.model).config.needs_images()
    best = checkpoints.latest() if fits else checkpoints.best() or checkpoints.latest()
    assert best is not None, "every epoch left a checkpoint"
    model = _whole(trainer)
    model.load_state_dict(best.weights("ema" if best.has("ema") else "weights"))
    model = without_lora(model).eval()
    kept = log.rows[best.epoch - 1]
    metrics: dict[str, Any] = {
        "model": trainer.settings.model.name,
        "method": trainer.settings.merge.method,
        "top1": kept.val_top1,
        "loss": kept.val_loss,
        "epoch": kept.epoch,
        "epochs": last.epoch,
        "last_top1": last.val_top1,
        "ib_loss": kept.ib_loss,
        "ib_bound": kept.ib_bound,
        "mac_share": kept.mac_share,
        "parameters": count_parameters(model)[1],
        "num_classes": trainer.loaders.num_classes,
        "seconds_per_epoch": sum(r.train_seconds for r in log.rows) / len(log.rows),
    }
    if fits:
        metrics |= _meet_budget(trainer, splits, model)
    with first_alone(fabric) as first:
        if first:
            keep = save if is_merging(model) else save_plain
            keep(model, output / "model", class_names=splits.train.class_names)
            write_json(output / "metrics.json", metrics)
            log.close()
    log.console.print(
        f"top-1 {100 * metrics['top1']:.2f} after epoch {metrics['epoch']}; {output / 'model'}"
    )
    return TrainingResult(folder=output, metrics=metrics, history=log.history, model=model)


def _whole(trainer: Trainer) -> nn.Module:
    """The network that counts; a sharded one is made again."""
    settings = trainer.settings
    if settings.run.strategy != "fsdp":
        return trainer.evaluated
    untouched = replace(settings.model, pretrained=False, weights=None)
    model = build_model(replace(settings, model=untouched), trainer.loaders.num_classes)
    return trainer.fabric.to_device(model)


def _meet_budget(trainer: Trainer, splits: Splits, model: nn.Module) -> dict[str, Any]:
    """Fit the method on training images without labels, and evaluate again."""
    few, held_out = (_spread_images(part, trainer, model) for part in splits)
    fit_(model, few, batch_size=trainer.settings.data.batch_size)
    found = evaluate(model, trainer.loaders.val, trainer.loaders.num_classes, trainer.fabric)
    return {
        "top1": found.top1,
        "loss": found.loss,
        "ib_loss": found.ib_loss,
        "ib_bound": found.ib_bound,
        "mac_share": measure_share(model, held_out),
    }


def _spread_images(dataset: ImageDataset, trainer: Trainer, model: nn.Module) -> torch.Tensor:
    """A few images of all classes, the same in every process, which then decide alike."""
    settings, few = trainer.settings, dataset.take(FITTING_IMAGES)
    spec, device = spec_of(settings, model), trainer.fabric.device
    loader = evaluation_loader(few, spec, settings.data, device=device)
    return torch.cat([batch.images for batch in loader])

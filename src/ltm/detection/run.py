"""Train a detector from settings alone: data, model, loop, checkpoints, and what remains of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console

from ltm.api import report
from ltm.detection.cost import detector_cost
from ltm.detection.pyramid import merging_network
from ltm.detection.rows import DetectionLog
from ltm.detection.saving import Detector, DetectorConfig, save_detector
from ltm.detection.score import require_evaluator, write_results
from ltm.detection.settings import (
    DetectionSettings,
    detection_yaml,
    read_detection_settings,
)
from ltm.detection.training import DetectionSplits, DetectionTrainer, detector_config, open_splits
from ltm.training.checkpoint import Checkpoints
from ltm.training.fabric import first_alone, make_fabric, placed
from ltm.training.log import write_json
from ltm.training.run import Resume, check_output, differences, explained
from ltm.training.state import restore_, save_state


@dataclass(frozen=True, eq=False, kw_only=True)
class DetectionResult:
    """What a run leaves: its folder, its numbers, and the detector in evaluation mode."""

    folder: Path
    metrics: dict[str, Any]
    history: list[dict[str, Any]]
    model: Detector


def train_detector(
    settings: DetectionSettings,
    output: str | Path,
    *,
    resume: Resume = "never",
    overwrite: bool = False,
    splits: DetectionSplits | None = None,
    console: Console | None = None,
) -> DetectionResult:
    """Train a detector and keep it in `output`.

    The folder gets `config.yaml`, `log.csv`, `curves.png`, `metrics.json`, `results.json` (COCO's
    result format), `checkpoints/` and, at the end, `model/`, which `load_detector` reads.
    `resume="auto"` continues from the last complete checkpoint where there is one.
    """
    output, console = Path(output), console or Console(highlight=False, soft_wrap=True)
    checkpoints = Checkpoints(output / "checkpoints", keep_every=settings.run.keep_every)
    check_output(output, checkpoints, resume, overwrite)
    require_evaluator()
    fabric = make_fabric(settings.run)
    fabric.launch()
    if not fabric.is_global_zero:
        console = Console(quiet=True)
    splits = splits or open_splits(settings)
    torch.manual_seed(settings.run.seed)
    config = detector_config(settings, splits.train.num_classes)
    model = config.build()
    _describe(console, model, splits)
    model = cast("Detector", placed(model, fabric, settings.run))
    trainer = DetectionTrainer(fabric, settings, model, splits, console)
    with first_alone(fabric) as first:
        if first:
            _open_output(output, settings, checkpoints, resume)
    found = fabric.broadcast(checkpoints.latest() if fabric.is_global_zero else None)
    if found is not None:
        restore_(cast("Any", trainer), found)
        console.print(f"resumed after epoch {found.epoch} from {found.folder}")
    history = [] if found is None else found.history
    log = DetectionLog(output, history, console, writes=fabric.is_global_zero)
    with explained(console, checkpoints):
        epochs = settings.optim.epochs
        for epoch in range(0 if found is None else found.epoch, epochs):
            row = trainer.run_epoch(epoch)
            log.add(row, epochs)
            score = row.score if row.merging or merging_network(model) is None else None
            save_state(cast("Any", trainer), checkpoints, epoch + 1, score, log.history)
        return _finish(trainer, config, checkpoints, log)


def _finish(
    trainer: DetectionTrainer, config: DetectorConfig, checkpoints: Checkpoints, log: DetectionLog
) -> DetectionResult:
    """Keep the best detector, evaluate it once more, and write everything down."""
    model, output = cast("Detector", trainer.evaluated), log.folder
    best = checkpoints.best()
    if best is not None and best.epoch != log.rows[-1].epoch:
        model.load_state_dict(best.weights("ema" if best.has("ema") else "weights"))
    results, scores = trainer.evaluate()
    cost = detector_cost(model)
    metrics: dict[str, Any] = {
        "task": trainer.settings.detector.task,
        "backbone": trainer.settings.detector.backbone,
        "method": trainer.settings.merge.method,
        **scores.to_dict(),
        "epoch": log.rows[-1].epoch if best is None else best.epoch,
        "epochs": log.rows[-1].epoch,
        "parameters": cost.num_parameters,
        "gmacs": cost.gmacs,
        "cost": str(cost),
        "backbone_mac_share": _share(model),
        "seconds_per_epoch": sum(row.train_seconds for row in log.rows) / len(log.rows),
    }
    with first_alone(trainer.fabric) as first:
        if first:
            val = trainer.splits.val
            names, numbers = val.class_names, val.category_ids
            save_detector(model, config, output / "model", class_names=names, category_ids=numbers)
            write_results(output / "results.json", results)
            write_json(output / "metrics.json", metrics)
            log.draw_curves()
    log.console.print(f"box AP {100 * scores.box.ap:.1f}; {output / 'model'}")
    return DetectionResult(
        folder=output, metrics=metrics, history=log.history, model=cast("Detector", model.eval())
    )


def _share(model: Detector) -> float | None:
    network = merging_network(model)
    return None if network is None else report(network).share


def _describe(console: Console, model: Detector, splits: DetectionSplits) -> None:
    console.print(f"{type(model).__name__}: {detector_cost(model)}")
    network = merging_network(model)
    if network is not None:
        console.print(str(report(network)))
    console.print(f"{len(splits.train)} images to train on, {len(splits.val)} to evaluate on")


def _open_output(
    output: Path, settings: DetectionSettings, checkpoints: Checkpoints, resume: Resume
) -> None:
    """Make the folder of a run, or check that a run there can go on with these settings."""
    output.mkdir(parents=True, exist_ok=True)
    config = output / "config.yaml"
    if resume == "never":
        checkpoints.clear()
    elif len(checkpoints) and config.is_file():
        changed = differences(
            cast("Any", read_detection_settings(config, settings)), cast("Any", settings)
        )
        if changed:
            raise ValueError(
                f"{output} cannot be resumed with other settings: {'; '.join(changed)}"
            )
    config.write_text(detection_yaml(settings), encoding="utf-8")

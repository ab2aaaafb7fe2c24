"""Detection and instance segmentation: the `Task` of `ltm detect train` and `ltm segment train`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn

from ltm.api import merging_network, report
from ltm.data.loading import Loader, build_loader
from ltm.data.shapes import ShapesDetection
from ltm.detection.coco import (
    CocoDetection,
    DetectionBatch,
    collate_detection,
    detection_transforms,
    open_detection,
)
from ltm.detection.pyramid import DetectorConfig
from ltm.detection.saving import DETECTORS, save_detector
from ltm.detection.score import (
    DetectionScores,
    Result,
    detect,
    detector_cost,
    evaluate_detections,
    require_evaluator,
    write_results,
)
from ltm.detection.settings import DetectionSettings, find_detection_recipe
from ltm.interruption import stepwise
from ltm.models import Say, silent
from ltm.training.fabric import Fabric
from ltm.training.network import method_config
from ltm.training.run import Resume, TrainResult, run_task
from ltm.training.settings import with_options
from ltm.training.task import BatchLoss, EpochRow, Means, Outcome, Panel, Step, Task

_Dataset = CocoDetection | ShapesDetection


@dataclass(frozen=True, eq=False, kw_only=True)
class DetectionSplits:
    """Images to train on and images to evaluate on, with the same categories."""

    train: _Dataset
    val: _Dataset


class _Evaluation(NamedTuple):
    """What a detector found on the images to evaluate, and its scores."""

    results: list[Result]
    scores: DetectionScores


@dataclass(frozen=True, kw_only=True)
class DetectionRow(EpochRow):
    """One epoch of a detector; scores are None if the epoch was not evaluated."""

    losses: str
    """The parts of the loss, by name."""
    box_ap: float | None = None
    box_ap50: float | None = None
    box_ap75: float | None = None
    mask_ap: float | None = None
    mask_ap50: float | None = None
    mask_ap75: float | None = None

    panels: ClassVar[Sequence[Panel]] = (
        Panel("training loss", {"training": "train_loss"}),
        Panel(
            "average precision (%)",
            {
                name.replace("_", " "): name
                for name in ("box_ap", "box_ap50", "mask_ap", "mask_ap50")
            },
            100.0,
        ),
    )

    @property
    def score(self) -> float | None:
        """The AP of masks, or that of boxes if there are no masks."""
        return self.box_ap if self.mask_ap is None else self.mask_ap

    def numbers(self) -> list[str]:
        parts = [self.losses]
        for kind, ap, ap50 in (
            ("box", self.box_ap, self.box_ap50),
            ("mask", self.mask_ap, self.mask_ap50),
        ):
            if ap is not None and ap50 is not None:
                parts.append(f"{kind} AP {100 * ap:.1f} AP50 {100 * ap50:.1f}")
        return parts


def train_detector(
    settings: DetectionSettings | str,
    data: str | Path | DetectionSplits | None = None,
    *,
    output: str | Path | None = None,
    resume: Resume = "never",
    overwrite: bool = False,
    say: Say = silent,
    **changes: Any,
) -> TrainResult:
    """Train a detector on a token-merging backbone.

    `run_task` says what `output` will hold. It also gets `results.json`, in COCO's result format.
    `load_detector` reads its `model/`.

    Args:
        settings: all settings, or the name of a recipe, such as ssdlite or mask_rcnn.
        data: where annotated images are, or your own `DetectionSplits`; by default as the settings
            say.
        output: folder of the run; without one, nothing is written.
        resume: "auto" continues from the last complete checkpoint in `output`, if there is one.
        overwrite: start over in a folder that holds a run.
        say: called with each line of progress.
        changes: changes of the settings, such as `epochs=5`.
    """
    if isinstance(settings, str):
        settings = find_detection_recipe(settings)
    if isinstance(data, str | Path):
        changes["source"] = str(data)
    splits = data if isinstance(data, DetectionSplits) else None
    task = Detection(with_options(settings, changes), splits=splits)
    return run_task(task, output, resume=resume, overwrite=overwrite, say=say)


class Detection(Task):
    """Images with boxes and maybe masks, a detector's own losses, COCO's average precision."""

    settings: DetectionSettings
    row_type = DetectionRow

    def __init__(
        self, settings: DetectionSettings, *, splits: DetectionSplits | None = None
    ) -> None:
        super().__init__(settings)
        self._given_splits = splits
        self._truth: dict[str, Any] | None = None

    @property
    def masks(self) -> bool:
        """Whether the detector finds masks, too."""
        return self.settings.detector.task == "mask_rcnn"

    def check(self) -> None:
        require_evaluator()

    def open_data(self) -> None:
        self.splits = self._given_splits or open_splits(self.settings)
        self.config = detector_config(self.settings, self.splits.train.num_classes)

    def build(self, say: Say) -> nn.Module:
        return self.config.build(say)

    def describe(self, model: nn.Module) -> Iterator[str]:
        yield f"{type(model).__name__}: {detector_cost(model)}"
        network = merging_network(model)
        if network is not None:
            yield str(report(network))
        train, val = self.splits.train, self.splits.val
        yield f"{len(train)} images to train on, {len(val)} to evaluate on"
        shared = None if self._given_splits is not None else _shared_annotations(train, val)
        if shared is not None:
            yield (
                f"warning: {shared} is used for training and for evaluation, so the scores are too "
                "high; give --val-annotations, or data with splits"
            )

    def start(self, fabric: Fabric, model: nn.Module) -> Loader:
        self.fabric = fabric
        return self._loader(self.splits.train, training=True)

    def loss(self, forward: nn.Module, batch: DetectionBatch, step: Step) -> BatchLoss:
        images, targets = batch
        losses = forward(images, targets)
        total = torch.stack(list(losses.values())).sum()
        return BatchLoss(
            total=total, logged=losses, inputs=(images, targets), num_images=len(images)
        )

    def is_evaluated(self, epoch: int) -> bool:
        every, epochs = self.settings.eval_every, self.settings.optim.epochs
        return (epoch + 1) % every == 0 or epoch + 1 == epochs

    def evaluate(self, model: nn.Module) -> _Evaluation:
        val = self.splits.val
        if self._truth is None:
            self._truth = val.coco_dict()
        batches = self._loader(val, training=False)
        results = detect(model, batches, val.category_ids, progress=stepwise)
        return _Evaluation(results, evaluate_detections(self._truth, results, masks=self.masks))

    def row(
        self, common: dict[str, Any], means: Means, model: nn.Module, found: _Evaluation | None
    ) -> DetectionRow:
        losses = {name: cast("float", means.mean(name)) for name in means.names()}
        return DetectionRow(
            **common,
            train_loss=sum(losses.values()),
            losses=" ".join(f"{name} {value:.3f}" for name, value in losses.items()),
            **({} if found is None else _columns(found.scores)),
        )

    def finish_(self, model: nn.Module, kept: EpochRow, rows: Sequence[EpochRow]) -> Outcome:
        results, scores = self.evaluate(model)
        cost, network = detector_cost(model), merging_network(model)
        metrics: dict[str, Any] = {
            "task": self.settings.detector.task,
            "backbone": self.settings.detector.backbone,
            "method": self.settings.merge.method,
            **asdict(scores),
            "gmacs": cost.gmacs,
            "cost": str(cost),
            "backbone_mac_share": None if network is None else report(network).share,
        }

        def write(folder: Path) -> None:
            val = self.splits.val
            names, numbers = val.class_names, val.category_ids
            save_detector(
                model, self.config, folder / "model", class_names=names, category_ids=numbers
            )
            write_results(folder / "results.json", results)

        return Outcome(metrics=metrics, line=f"box AP {100 * scores.box.ap:.1f}", write=write)

    def _loader(self, dataset: _Dataset, *, training: bool) -> Loader:
        data = self.settings.data
        return build_loader(
            dataset,
            batch_size=data.batch_size if training else data.eval_batch_size,
            workers=data.workers,
            training=training,
            seed=self.settings.run.seed,
            device=self.fabric.device,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
            collate=collate_detection,
        )


def detector_config(settings: DetectionSettings, num_classes: int) -> DetectorConfig:
    """The detector that settings describe; a network from a folder keeps its own merging."""
    chosen = settings.detector
    kind, saved = DETECTORS[chosen.task], Path(chosen.backbone).is_dir()
    names = [field.name for field in fields(kind) if hasattr(chosen, field.name)]
    return kind(
        **{name: getattr(chosen, name) for name in names},
        num_classes=num_classes,
        merging=None if saved else method_config(settings.merge),
    )


def _shared_annotations(train: _Dataset, val: _Dataset) -> str | None:
    """The annotation file that both are read from, if there is one."""
    if not (isinstance(train, CocoDetection) and isinstance(val, CocoDetection)):
        return None
    return val.where if train.where == val.where else None


def open_splits(settings: DetectionSettings) -> DetectionSplits:
    """Open the images to train on and those to evaluate on."""
    data = settings.data
    train = open_detection(
        data.source,
        split=data.train_split,
        annotations=data.annotations,
        transforms=detection_transforms(
            training=True, crops=data.crops, photometric=data.photometric, hflip=data.hflip
        ),
        masks=settings.detector.task == "mask_rcnn",
        crowd=False,
    )
    val = open_detection(
        data.source,
        split=data.val_split,
        annotations=data.val_annotations or data.annotations,
        transforms=detection_transforms(training=False),
        masks=False,
    )
    if train.category_ids != val.category_ids:
        raise ValueError(
            f"data {data.source}: the splits {data.train_split} and {data.val_split} have "
            "different categories"
        )
    return DetectionSplits(train=train, val=val)


def _columns(scores: DetectionScores) -> dict[str, Any]:
    """The columns of a row that hold scores."""
    return {
        f"{kind}_{name}": getattr(score, name)
        for kind, score in (("box", scores.box), ("mask", scores.mask))
        if score is not None
        for name in ("ap", "ap50", "ap75")
    }

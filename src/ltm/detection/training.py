"""SSDLite or Mask R-CNN in training: the loop of `loop`, with a detector's losses and scores.

As there, an epoch depends on nothing but the state before it, so that a run which is stopped and
resumed repeats itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console
from torch import Tensor, nn

from ltm.api import merging_off
from ltm.data.loading import Loader, build_loader
from ltm.data.sampling import make_key
from ltm.data.shapes import ShapesDetection
from ltm.detection.data import CocoDetection, collate_detection, open_detection
from ltm.detection.mask_rcnn import MaskRCNNConfig
from ltm.detection.pyramid import merging_network
from ltm.detection.rows import DetectionRow, score_columns
from ltm.detection.saving import Detector, DetectorConfig
from ltm.detection.score import DetectionScores, Result, detect, evaluate_detections
from ltm.detection.settings import DetectionSettings
from ltm.detection.ssdlite import SSDLiteConfig
from ltm.detection.transforms import detection_transforms
from ltm.training.fabric import Fabric, average_running_statistics_, total_over_processes
from ltm.training.models import method_config
from ltm.training.non_finite import NonFiniteLossError
from ltm.training.optimisation import AveragedWeights, LearningRate, effective_lr, make_optimizer
from ltm.training.progress import bar
from ltm.training.totals import Clock
from ltm.training.trainable import annealed_noise, set_noise_

CHECK_EVERY = 20
"""Steps between looks at the loss, which make the processor wait for a GPU."""

DetectionDataset = CocoDetection | ShapesDetection


@dataclass(frozen=True, eq=False, kw_only=True)
class DetectionSplits:
    """The images to train on and those to evaluate on, of the same categories."""

    train: DetectionDataset
    val: DetectionDataset


class Findings(NamedTuple):
    """What a detector found, and how good that is."""

    results: list[Result]
    scores: DetectionScores


def detector_config(settings: DetectionSettings, num_classes: int) -> DetectorConfig:
    """The detector that settings describe; a network from a folder merges as it does."""
    chosen = settings.detector
    saved = Path(chosen.backbone).is_dir()
    values: dict[str, Any] = {
        "backbone": chosen.backbone,
        "num_classes": num_classes,
        "merging": None if saved else method_config(cast("Any", settings.merge)),
        "image_size": chosen.image_size,
        "pretrained": chosen.pretrained,
        "weights": chosen.weights,
    }
    if chosen.task == "mask_rcnn":
        return MaskRCNNConfig(
            **values, width=chosen.width, regions_per_image=chosen.regions_per_image
        )
    return SSDLiteConfig(**values, restore=chosen.restore)


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


class DetectionTrainer:
    """A detector in training: what changes from epoch to epoch, and how."""

    def __init__(
        self,
        fabric: Fabric,
        settings: DetectionSettings,
        model: Detector,
        splits: DetectionSplits,
        console: Console,
    ) -> None:
        self.fabric, self.settings, self.splits, self.console = fabric, settings, splits, console
        optim = settings.optim
        total_batch = settings.data.batch_size * fabric.world_size * optim.accumulate
        self.forward: Any = fabric.setup_module(model)
        self.model = model
        self.loader = self._loader(splits.train, training=True)
        optimizer = make_optimizer(model, optim, total_batch)
        self.optimizer: Any = fabric.setup_optimizers(optimizer)
        updates = -(-len(self.loader) // optim.accumulate)
        self.lr = LearningRate(optimizer, optim, updates, effective_lr(optim, total_batch))
        self.average = AveragedWeights(model, optim.ema) if optim.ema else None
        self.updates = 0
        self.truth: dict[str, Any] | None = None

    @property
    def evaluated(self) -> nn.Module:
        """The detector that counts: with averaged weights, if they are kept."""
        return self.model if self.average is None else self.average.model

    def merges_in(self, epoch: int) -> bool:
        """Whether tokens are merged in an epoch, counted from 0."""
        return merging_network(self.model) is not None and epoch >= self.settings.merge.warm_epochs

    def run_epoch(self, epoch: int) -> DetectionRow:
        """Train for one epoch (from 0), and evaluate where it is due."""
        settings, clock = self.settings, Clock(self.fabric.device)
        torch.manual_seed(make_key(settings.run.seed, epoch, self.fabric.global_rank))
        noise = self._noise(epoch)
        losses = self._train(epoch)
        average_running_statistics_(self.model, self.fabric)
        if self.average is not None:
            average_running_statistics_(self.average.model, self.fabric)
        train_seconds = clock.lap()
        due = (epoch + 1) % settings.eval_every == 0 or epoch + 1 == settings.optim.epochs
        with self._paused(self.evaluated, epoch):
            scores = self.evaluate().scores if due else None
        num_images = len(self.loader) * settings.data.batch_size * self.fabric.world_size
        return DetectionRow(
            epoch=epoch + 1,
            merging=self.merges_in(epoch),
            lr=self.optimizer.param_groups[0]["lr"],
            noise=noise,
            train_loss=sum(losses.values()),
            losses=" ".join(f"{name} {value:.3f}" for name, value in losses.items()),
            train_seconds=train_seconds,
            val_seconds=clock.lap(),
            images_per_second=num_images / train_seconds,
            **cast("Any", score_columns(scores)),
        )

    def evaluate(self) -> Findings:
        """Show the detector that counts the held-out images, all processes their share."""
        val = self.splits.val
        if self.truth is None:
            self.truth = val.coco_dict()
        results = detect(self.evaluated, self._loader(val, training=False), val.category_ids)
        masks = self.settings.detector.task == "mask_rcnn"
        return Findings(results, evaluate_detections(self.truth, results, masks=masks))

    def _loader(self, dataset: DetectionDataset, *, training: bool) -> Loader:
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

    def _noise(self, epoch: int) -> float:
        network, merge = merging_network(self.model), self.settings.merge
        if network is None or not self.merges_in(epoch):
            return 0.0
        noise = annealed_noise(merge.noise, epoch, merge.warm_epochs, self.settings.optim.epochs)
        set_noise_(network, noise)
        return noise

    def _paused(self, model: nn.Module, epoch: int) -> Any:
        network = merging_network(model)
        return nullcontext() if network is None or self.merges_in(epoch) else merging_off(network)

    def _train(self, epoch: int) -> dict[str, float]:
        """Mean losses of an epoch, by name."""
        self.model.train()
        self.loader.set_epoch(epoch)
        title = f"epoch {epoch + 1}/{self.settings.optim.epochs}"
        sums: dict[str, Tensor] = {}
        with (
            self._paused(self.model, epoch),
            bar(self.console, title, len(self.loader), shown=self.fabric.is_global_zero) as shown,
        ):
            for step, (images, targets) in enumerate(self.loader):
                losses = self._step(step, images, targets)
                for name, loss in losses.items():
                    sums[name] = sums.get(name, torch.zeros_like(loss)) + loss.detach()
                if (step + 1) % CHECK_EVERY == 0 or step + 1 == len(self.loader):
                    self._check(sums, epoch, step)
                shown.step(len(images))
        return {name: float(total) / len(self.loader) for name, total in self._total(sums).items()}

    def _step(
        self, step: int, images: list[Tensor], targets: list[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        accumulate = self.settings.optim.accumulate
        first = step - step % accumulate
        together = min(accumulate, len(self.loader) - first)
        last = step + 1 == first + together
        with self.fabric.no_backward_sync(self.forward, enabled=not last):
            losses: dict[str, Tensor] = self.forward(images, targets)
            self.fabric.backward(torch.stack(list(losses.values())).sum() / together)
        if last:
            self._update()
        return losses

    def _update(self) -> None:
        self.lr.set(self.updates)
        clip = self.settings.optim.clip
        if clip:
            self.fabric.clip_gradients(
                self.forward, self.optimizer, max_norm=clip, error_if_nonfinite=False
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        if self.average is not None:
            self.average.update(self.model, self.updates)

    def _total(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over all processes, as means of one."""
        values = total_over_processes(torch.stack(list(sums.values())), self.fabric)
        return dict(zip(sums, values / self.fabric.world_size, strict=True))

    def _check(self, sums: Mapping[str, Tensor], epoch: int, step: int) -> None:
        """Stop all processes where a loss of any is not finite."""
        wrong = [name for name, value in self._total(sums).items() if not bool(value.isfinite())]
        if wrong:
            raise NonFiniteLossError(
                f"the loss is not finite in epoch {epoch + 1}, by step {step + 1}: "
                f"{', '.join(wrong)}; try a smaller lr, clip=1, or precision=32"
            )

"""Distillation: the `Task` of `teacher="self"` and of `ltm compress --tune`.

The teacher is the network before training, without merging. The loss is the divergence from its
outputs; labels are not used. Images set aside decide what is kept: an epoch of the training, or the
untrained network where no epoch is better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ltm.core.cost import evaluating
from ltm.core.validation import require_least
from ltm.data.config import DataConfig
from ltm.data.datasets import Splits, open_dataset
from ltm.data.images import ImageDataset
from ltm.data.loading import Batch, Loader
from ltm.evaluation.accuracy import kl_divergence
from ltm.processes import sum_over_processes
from ltm.training.classification import Classification
from ltm.training.fabric import Fabric, in_step
from ltm.training.network import classes_of_weights, method_of, save_model
from ltm.training.task import BatchLoss, EpochRow, Means, Outcome, Panel, Step
from ltm.training.trainable import without_lora

_MIN_IMAGES = 40
"""Too few images cannot be divided into those to train on and those to decide on."""
_MOST_HELD_OUT = 1000


@dataclass(frozen=True, kw_only=True)
class DistillationRow(EpochRow):
    """One epoch of distillation."""

    val_divergence: float
    """KL divergence from the original's outputs on the images set aside, in nats."""
    val_agreement: float
    """The share of those images on which both networks predict the same label."""
    mac_share: float | None
    tokens: str

    panels: ClassVar[Sequence[Panel]] = (
        Panel("divergence", {"training": "train_loss", "validation": "val_divergence"}),
        Panel("labels as the original (%)", {"agreement": "val_agreement"}, 100.0),
    )

    @property
    def score(self) -> float | None:
        return -self.val_divergence

    def numbers(self) -> list[str]:
        parts = [f"divergence {self.val_divergence:.4f}", f"agrees {100 * self.val_agreement:.2f}%"]
        return parts if self.mac_share is None else [*parts, f"MACs {self.mac_share:.3f}"]


@dataclass(frozen=True, kw_only=True)
class _Closeness:
    """How close the outputs of a network are to those of its teacher."""

    divergence: float
    agreement: float
    num_images: int


class Distillation(Classification):
    """Unlabelled images, and the divergence from the network without merging."""

    row_type: ClassVar[type[EpochRow]] = DistillationRow

    def open_data(self) -> None:
        self.splits = self._given_splits or _open_images(self.settings.data)
        given: Any = self._given_model
        # The head stays as it is: folders of unlabelled images do not name its classes.
        found = classes_of_weights(self.settings.model) if given is None else given.num_classes
        self.num_classes = int(found)

    def describe_head(self) -> Iterator[str]:
        return iter(())  # the data do not name its classes

    def start(self, fabric: Fabric, model: nn.Module) -> Loader:
        batches = super().start(fabric, model)
        self._before = {n: v.detach().cpu().clone() for n, v in _folded(model).items()}
        self.untrained = self.evaluate(model)
        return batches

    @property
    def _teacher(self) -> nn.Module:
        assert self.objective.teacher is not None
        return self.objective.teacher

    def before_epoch_(self, model: nn.Module) -> bool:
        return self._uses_statistics and super().before_epoch_(model)

    def after_epoch_(self, model: nn.Module) -> bool:
        return self._uses_statistics and super().after_epoch_(model)

    @property
    def _uses_statistics(self) -> bool:
        """Class statistics take time; they are for the bound, and for training mask modules."""
        settings = self.settings
        return settings.objective.bound_weight > 0 or settings.tune.trainable == "mergers"

    def _first_clean(self, fabric: Fabric, model: nn.Module, place: dict[str, Any]) -> Any:
        return _Labelled(super()._first_clean(fabric, model, place), self._teacher)

    def loss(self, forward: nn.Module, batch: Batch, step: Step) -> BatchLoss:
        images, labels = batch
        if self.mixup is not None:
            images, _ = self.mixup(images, labels, epoch=step.epoch, step=step.number)
        with self.fabric.autocast():  # for the teacher too
            losses = self.objective(forward, images, labels, merging=step.merging)
        logged = {"loss": losses.total}
        if losses.share is not None:
            logged["mac_share"] = losses.share
        return BatchLoss(
            total=losses.total, logged=logged, inputs=(images,), num_images=len(images)
        )

    def progress_text(self, means: Means) -> str:
        return f"divergence {means.mean('loss'):.3f}"

    def evaluate(self, model: nn.Module) -> _Closeness:
        return _closeness(model, self._teacher, self.held_out, self.fabric)

    def row(
        self, common: dict[str, Any], means: Means, model: nn.Module, found: _Closeness
    ) -> DistillationRow:
        return DistillationRow(
            **self.with_merging(common, means, model),
            val_divergence=found.divergence,
            val_agreement=found.agreement,
        )

    def finish_(self, model: nn.Module, kept: EpochRow, rows: Sequence[EpochRow]) -> Outcome:
        before = self.untrained
        if self.keeps_last(model):
            self.fit_(model)
        after = self.evaluate(model)
        improved = after.divergence < before.divergence
        if not improved:
            model.load_state_dict(self._before)
        found = after if improved else before
        metrics: dict[str, Any] = {
            "model": self.settings.model.name,
            "method": method_of(model),
            "trainable": self.settings.tune.trainable,
            "kept": "tuned" if improved else "untrained",
            "divergence": found.divergence,
            "agreement": found.agreement,
            "divergence_tuned": after.divergence,
            "divergence_untrained": before.divergence,
            "agreement_untrained": before.agreement,
            "num_images": len(self.splits.train),
            "num_held_out": before.num_images,
            "seconds": sum(row.train_seconds + row.val_seconds for row in rows),
        }

        change = f"from {before.divergence:.4f} to {after.divergence:.4f}"
        line = f"divergence on {before.num_images} images set aside {change}"
        if not improved:
            line += "; training did not help, and the untrained network is kept"
        return Outcome(
            metrics=metrics, line=line, write=lambda folder: save_model(model, folder / "model")
        )


def set_aside(images: ImageDataset) -> Splits:
    """Images to train on, and one in five, at most a thousand, to decide on."""
    require_least("images to tune on", len(images), _MIN_IMAGES)
    order = np.random.default_rng(0).permutation(len(images)).tolist()
    number = min(_MOST_HELD_OUT, len(images) // 5)
    return Splits(
        train=images.select(sorted(order[number:])), val=images.select(sorted(order[:number]))
    )


def _open_images(config: DataConfig) -> Splits:
    """The splits of the data; of data without splits, some images are set aside."""
    most = config.max_unreadable
    train, val = (
        open_dataset(config.source, split=split, max_unreadable=most, labelled=False)
        for split in (config.train_split, config.val_split)
    )
    return set_aside(train) if train.split == "all" else Splits(train, val)


class _Labelled:
    """Batches labelled with a network's predictions."""

    def __init__(self, batches: Iterable[Batch], teacher: nn.Module) -> None:
        self._batches, self._teacher = batches, teacher

    @torch.no_grad()
    def __iter__(self) -> Iterator[Batch]:
        for images, _ in self._batches:
            yield Batch(images, self._teacher(images).argmax(dim=1))


def _folded(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a network with its adapters folded in, as it will be kept."""
    return without_lora(model).state_dict()


@torch.no_grad()
def _closeness(
    model: nn.Module, teacher: nn.Module, batches: Iterable[Batch], fabric: Fabric
) -> _Closeness:
    """Compare a network with its teacher on the images of all processes."""
    sums = torch.zeros(3, dtype=torch.float64, device=fabric.device)
    with evaluating(model):
        for (images, _), counts in in_step(batches, fabric):
            with fabric.autocast():
                found, wanted = model(images).float(), teacher(images).float()
            if not counts:
                continue
            divergence = kl_divergence(found, wanted).double().sum()
            agrees = (found.argmax(dim=1) == wanted.argmax(dim=1)).sum()
            sums += torch.stack([divergence, agrees.double(), sums.new_tensor(len(images))])
    divergence, agrees, count = sum_over_processes(sums).tolist()
    mean = divergence / max(count, 1)
    return _Closeness(
        divergence=mean if math.isfinite(mean) else math.inf,
        agreement=agrees / max(count, 1),
        num_images=int(count),
    )

"""The loss: cross-entropy, what the settings add to it, and the class statistics that it needs.

Each site sums up statistics over an epoch; `take_statistics_` sums them over the processes too. The
first merging epoch needs centroids and Q of an epoch before it: `collect_statistics_` makes them in
two passes over clean images.

Letters: b images, a classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltm.api import (
    MacShare,
    Record,
    announcing,
    conversion_of,
    is_merging,
    mac_share,
    mergers,
    merging_off,
    observe_,
    statistical_mergers,
    unmerged_copy,
    watching,
)
from ltm.core.cost import evaluating
from ltm.data.loading import Batch
from ltm.methods.base import ExtraLoss, StatisticalMerger
from ltm.training.settings import ObjectiveSettings


@dataclass(frozen=True, eq=False, kw_only=True)
class Losses:
    """One batch's losses; `total` is what gradients come from."""

    total: Tensor
    cross_entropy: Tensor
    logits: Tensor
    share: Tensor | None = None
    """The share of MACs in this batch, of methods whose counts differ from image to image."""
    records: Sequence[Record] = ()
    """What the sites did, if they were watched."""


class _Lesson(NamedTuple):
    """A teacher's outputs for a batch."""

    logits: Tensor
    features: list[Tensor]


class Objective:
    """The loss of a network; `forward` may be the network wrapped for several processes."""

    def __init__(
        self, model: nn.Module, settings: ObjectiveSettings, *, smoothing: float = 0.0
    ) -> None:
        self.model, self.settings, self.smoothing = model, settings, smoothing
        self.merges = is_merging(model)
        self.teacher = None
        if settings.teacher == "self":
            self.teacher = unmerged_copy(model).eval().requires_grad_(False)

    @cached_property
    def _mac_share(self) -> MacShare:
        return mac_share(self.model)

    def __call__(
        self,
        forward: nn.Module,
        images: Tensor,
        targets: Tensor,
        *,
        merging: bool = True,
        watch: bool = False,
    ) -> Losses:
        """Losses of a batch; `targets` are labels (b) or distributions over classes (b a)."""
        merging = merging and self.merges
        watch = merging and (watch or self.settings.bound_weight > 0)
        lesson = self._lesson(images)
        if lesson is not None:
            targets = lesson.logits.softmax(dim=1)  # in place of labels
        labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
        with ExitStack() as stack:
            records: list[Record] = []
            if self.merges:
                stack.enter_context(announcing(self.model, labels))
            if watch:
                records = stack.enter_context(watching(self.model))
            features = stack.enter_context(self._features(self.model))
            logits = forward(images).float()
        entropy = self._cross_entropy(logits, targets)
        total = entropy if lesson is None else self._learned(logits, features, lesson)
        if merging and self.settings.distill_weight > 0:
            weight = self.settings.distill_weight
            total = (1 - weight) * total + weight * self._distillation(logits, images)
        if merging and self.settings.bound_weight > 0:
            total = total + self.settings.bound_weight * mean_bound(records, targets)
        share, extra = None, self._extra() if merging else None
        if extra is not None:
            share, total = extra.share, total + extra.value
        return Losses(
            total=total, cross_entropy=entropy, logits=logits, share=share, records=records
        )

    def _lesson(self, images: Tensor) -> _Lesson | None:
        """The teacher's outputs for a batch, if there is a teacher."""
        if self.teacher is None:
            return None
        with torch.no_grad(), self._features(self.teacher) as features:
            return _Lesson(self.teacher(images).float(), features)

    def _learned(self, logits: Tensor, features: list[Tensor], lesson: _Lesson) -> Tensor:
        """The divergence from the teacher, and the weighted distance of the class tokens."""
        divergence = self._divergence(logits, lesson.logits)
        if not features:
            return divergence
        pairs = zip(features, lesson.features, strict=True)
        apart = torch.stack([F.mse_loss(*pair) for pair in pairs]).mean()
        return divergence + self.settings.feature_weight * apart

    def _features(self, model: nn.Module) -> AbstractContextManager[list[Tensor]]:
        """The class tokens of a forward, if they are compared."""
        compared = self.teacher is not None and self.settings.feature_weight > 0
        return class_tokens(model) if compared else nullcontext([])

    def _extra(self) -> ExtraLoss | None:
        """What the method adds to the loss."""
        found = [merger for _, merger in mergers(self.model)]
        config = conversion_of(self.model).config
        return config.extra_loss(found, self._share)

    def _share(self, tokens: Tensor) -> Tensor:
        return self._mac_share(tokens)  # the fit runs once, and only if the method needs it

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        # Mixed targets are distributions, which `BatchMixup` has smoothed already.
        smoothing = self.smoothing if targets.ndim == 1 else 0.0
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)

    def _distillation(self, logits: Tensor, images: Tensor) -> Tensor:
        """KL divergence from the same network, with the same weights, without merging."""
        with torch.no_grad(), evaluating(self.model), merging_off(self.model):
            teacher = self.model(images).float()
        return self._divergence(logits, teacher)

    def _divergence(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """KL divergence from a teacher's outputs."""
        temperature = self.settings.distill_temperature
        return temperature**2 * F.kl_div(
            F.log_softmax(logits / temperature, dim=1),
            F.log_softmax(teacher / temperature, dim=1),
            log_target=True,
            reduction="batchmean",
        )


@contextmanager
def class_tokens(model: nn.Module) -> Iterator[list[Tensor]]:
    """The class tokens after the blocks of the forward inside, normalised."""
    found: list[Tensor] = []

    def see(_block: nn.Module, _inputs: object, output: Tensor) -> None:
        found.append(F.layer_norm(output[:, 0].float(), output.shape[2:]))

    has_one = getattr(model, "cls_token", None) is not None
    blocks: Iterable[nn.Module] = getattr(model, "blocks", ()) if has_one else ()
    handles = [block.register_forward_hook(see) for block in blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def mean_bound(records: Sequence[Record], targets: Tensor) -> Tensor:
    """The bound IBB without its term of the inputs, `-mean_i sum_a phi(X~_i, a) log Q(a | y_i)`.

    Averaged over the sites that have class statistics; zero where none has.
    """
    found = [_site_bound(record, targets) for record in records]
    bounds = [bound for bound in found if bound is not None]
    return torch.stack(bounds).mean() if bounds else targets.new_zeros((), dtype=torch.float32)


def _site_bound(record: Record, targets: Tensor) -> Tensor | None:
    if not isinstance(record.merger, StatisticalMerger) or record.decision is None:
        return None
    hints = dataclasses.replace(record.hints, size=record.size)
    return record.merger.bound(record.merged, hints, targets)


def take_statistics_(model: nn.Module) -> None:
    """Turn the sums of all processes into centroids and Q. All processes have to call it."""
    for merger in statistical_mergers(model):
        merger.take_statistics_()


def forget_sums_(model: nn.Module) -> None:
    """Drop the sums of an unfinished epoch."""
    for merger in statistical_mergers(model):
        merger.forget_sums_()


@torch.no_grad()
def refresh_statistics_(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Make Q from the last centroids, and new centroids, in one pass over clean images."""
    forget_sums_(model)
    for images, labels in batches:
        with evaluating(model), watching(model) as records:
            model(images)
        observe_(records, labels)
    take_statistics_(model)

"""What is minimised: cross-entropy, and what the settings add to it.

Letters: b images, a classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltm.api import Record, announcing, conversion_of, is_merging, merging_off, watching
from ltm.core.clustering import class_membership
from ltm.core.cost import evaluating
from ltm.methods.base import token_size
from ltm.methods.ltm.step import LTMMerger
from ltm.methods.ltmp import LTMP
from ltm.training.budget import MacShare, expected_share, mac_share
from ltm.training.settings import ObjectiveSettings


@dataclass(frozen=True, eq=False, kw_only=True)
class Losses:
    """One batch's losses; `total` is what gradients come from."""

    total: Tensor
    cross_entropy: Tensor
    logits: Tensor
    share: Tensor | None = None
    """LTMP's share of MACs in this batch."""
    records: Sequence[Record] = ()
    """What the sites did, where somebody asked."""


class Objective:
    """The loss of a network; `forward` may be the network wrapped for several processes."""

    def __init__(
        self, model: nn.Module, settings: ObjectiveSettings, *, smoothing: float = 0.0
    ) -> None:
        self.model, self.settings, self.smoothing = model, settings, smoothing
        self.merges = is_merging(model)
        self.share: MacShare | None = None
        self.target = 0.0
        if self.merges and isinstance(conversion_of(model).config, LTMP):
            self.target = conversion_of(model).config.ratio or 0.0
            self.share = mac_share(model) if self.target else None

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
        labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
        with ExitStack() as stack:
            records: list[Record] = []
            if self.merges:
                stack.enter_context(announcing(self.model, labels))
            if watch:
                records = stack.enter_context(watching(self.model))
            logits = forward(images).float()
        entropy = self._cross_entropy(logits, targets)
        total = entropy
        if merging and self.settings.distill_weight > 0:
            weight = self.settings.distill_weight
            total = (1 - weight) * total + weight * self._distillation(logits, images)
        if merging and self.settings.bound_weight > 0:
            total = total + self.settings.bound_weight * mean_bound(records, targets)
        share = None
        if merging and self.share is not None:
            share = expected_share(self.model, self.share)
            total = total + self.settings.budget_weight * (share - self.target).square()
        return Losses(
            total=total, cross_entropy=entropy, logits=logits, share=share, records=records
        )

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        # Distributions over classes have been smoothed where they were mixed.
        smoothing = self.smoothing if targets.ndim == 1 else 0.0
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)

    def _distillation(self, logits: Tensor, images: Tensor) -> Tensor:
        """KL divergence from the same network, as it stands, without merging."""
        with torch.no_grad(), evaluating(self.model), merging_off(self.model):
            teacher = self.model(images).float()
        temperature = self.settings.distill_temperature
        return temperature**2 * F.kl_div(
            F.log_softmax(logits / temperature, dim=1),
            F.log_softmax(teacher / temperature, dim=1),
            log_target=True,
            reduction="batchmean",
        )


def mean_bound(records: Sequence[Record], targets: Tensor) -> Tensor:
    """The bound IBB up to the inputs' share, `-mean_i sum_a phi(X~_i, a) log Q(a | y_i)`.

    Averaged over the sites that have class statistics; zero where none has.
    """
    bounds = [_site_bound(record, targets) for record in records if _has_statistics(record)]
    return torch.stack(bounds).mean() if bounds else targets.new_zeros((), dtype=torch.float32)


def _has_statistics(record: Record) -> bool:
    merger = record.merger
    return isinstance(merger, LTMMerger) and record.decision is not None and merger.active


def _site_bound(record: Record, targets: Tensor) -> Tensor:
    merger = record.merger
    assert isinstance(merger, LTMMerger)
    assert merger.informative is not None
    step, merged = merger.informative, record.merged
    size = record.size if record.size is not None else token_size(merged, record.hints)
    feature = merger.feature(merged, size.float().expand(len(merged), -1))
    phi = class_membership(feature, step.centroids, merger.config.beta, step.present)
    costs = step.costs.to(phi.dtype)
    per_image = costs[targets] if targets.ndim == 1 else targets.to(phi.dtype) @ costs
    return (phi * per_image).sum(dim=1).mean()

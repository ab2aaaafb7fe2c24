"""How a network does on held-out images: accuracy, and its information bottleneck."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltm.api import Record, is_merging, watching
from ltm.core.bottleneck import BETA, InformationBottleneck, information_bottleneck
from ltm.core.clustering import image_features
from ltm.core.cost import evaluating
from ltm.data.loading import Batch
from ltm.methods.base import token_size
from ltm.training.fabric import Fabric, in_step, total_over_processes

BOTTLENECK_IMAGES = 2000
"""Images, of the first process, on which the bottleneck is measured while training."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A network on held-out images; the bottleneck is that of its last merging site."""

    loss: float
    top1: float
    num_images: int
    ib_loss: float | None = None
    ib_bound: float | None = None


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], num_classes: int, fabric: Fabric
) -> Evaluation:
    """Evaluate all processes' images; the network is not wrapped, so that shares may be uneven."""
    sums = torch.zeros(3, dtype=torch.float64, device=fabric.device)
    watches = is_merging(model) and fabric.is_global_zero
    features = _Features(num_classes)
    with evaluating(model):
        for (images, labels), counts in in_step(batches, fabric):
            with ExitStack() as stack:
                stack.enter_context(fabric.autocast())
                watch = watches and features.wanted
                records = stack.enter_context(watching(model)) if watch else []
                logits = model(images).float()
            if not counts:
                continue
            features.add(records, images, labels)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            correct = (logits.argmax(dim=1) == labels).sum()
            sums += torch.stack([loss.double(), correct.double(), sums.new_tensor(len(labels))])
    loss, correct, count = total_over_processes(sums, fabric).tolist()
    bottleneck = features.bottleneck()
    return Evaluation(
        loss=loss / max(count, 1),
        top1=correct / max(count, 1),
        num_images=int(count),
        ib_loss=None if bottleneck is None else float(bottleneck.loss),
        ib_bound=None if bottleneck is None else float(bottleneck.bound),
    )


class _Features:
    """Merged features and inputs of the first images."""

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def wanted(self) -> bool:
        return sum(len(labels) for *_, labels in self._parts) < BOTTLENECK_IMAGES

    def add(self, records: Iterable[Record], images: Tensor, labels: Tensor) -> None:
        merging = [record for record in records if record.decision is not None]
        if merging:
            inputs = image_features(images).half()
            self._parts.append((pooled(merging[-1], len(images)), inputs, labels))

    def bottleneck(self) -> InformationBottleneck | None:
        if not self._parts:
            return None
        merged, inputs, labels = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        if not bool(merged.isfinite().all()):
            return None
        return information_bottleneck(merged, inputs, labels, self._num_classes, BETA)


def pooled(record: Record, num_images: int) -> Tensor:
    """The mean token after a site, by the patches that tokens stand for."""
    merged, merger = record.merged.float(), record.merger
    k = 0 if merger is None else merger.site.num_prefix
    size = token_size(merged, record.hints) if record.size is None else record.size.float()
    size = size.expand(num_images, -1)[:, k:]
    share = size / size.sum(dim=1, keepdim=True).clamp_min(1e-6)
    return (share[:, None] @ merged[:, k:])[:, 0]

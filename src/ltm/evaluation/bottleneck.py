"""The information bottleneck of a network, block by block, on labelled images.

The feature of a block is the mean of its tokens after the merge, each weighed by its size.
Memberships need the centroids of all images, so there are two passes over the features; if they fit
into memory, the network runs only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ltm.api import Record, conversion_of, is_merging, merge_tokens_, unmerge_tokens_, watching
from ltm.core.bottleneck import (
    BETA,
    ClassStatistics,
    check_labels,
    class_centroids,
    class_membership,
    class_sums,
    image_features,
)
from ltm.core.cost import evaluating
from ltm.core.merge import pool_by_size
from ltm.methods import BASELINE, methods
from ltm.processes import require_images, sum_over_processes

_Key = tuple[str, int]
"""A model and a block of it."""
_Features = dict[_Key, Tensor]
"""A feature per image of a batch, for the inputs and for every block."""

_INPUT: _Key = ("\0input", -1)


@dataclass(frozen=True, kw_only=True)
class SiteBottleneck:
    """Information bottleneck of one block's merged tokens, in nats; `loss <= bound - c0`."""

    model: str
    block: int
    loss: float
    bound: float
    c0: float
    input_information: float
    label_information: float
    num_images: int


@contextmanager
def watchable(model: nn.Module, image_size: tuple[int, int] | None = None) -> Iterator[nn.Module]:
    """The model with blocks that can be watched: an untouched one is converted, merging nothing."""
    if is_merging(model):
        yield model
        return
    merge_tokens_(model, methods()[BASELINE](ratio=1.0), image_size)
    try:
        yield model
    finally:
        unmerge_tokens_(model)


def pooled_feature(record: Record, num_prefix: int) -> Tensor:
    """Return the mean of a block's merged tokens by size, prefix tokens apart: `b t c -> b c`."""
    tokens = record.merged[:, num_prefix:].float()
    if record.size is None:
        return tokens.mean(1)
    return pool_by_size(tokens, record.size[:, num_prefix:].float(), "avg")


@torch.no_grad()
def measure_bottleneck(
    models: Mapping[str, nn.Module],
    batches: Iterable[Any],
    num_classes: int,
    *,
    beta: float = BETA,
    image_size: tuple[int, int] | None = None,
    keep_mib: int = 1024,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = lambda batches: batches,
) -> list[SiteBottleneck]:
    """Measure every block of every model on the same batches of `(images, labels)`.

    Features of up to `keep_mib` stay in memory between the two passes; beyond that the models run
    twice. Several processes give the result of one, however unevenly they share the images.
    """
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(watchable(model, image_size))
            stack.enter_context(evaluating(model))
        passes = _Passes(models, batches, keep_mib * 2**20, progress)
        clusters = _clusters(passes, num_classes)
        # Tables are large (classes by classes, for each block): where features are kept, one
        # model's at a time.
        groups = [[name] for name in models] if passes.complete else [list(models)]
        return [row for group in groups for row in _rows(passes, group, clusters, beta)]


def overall(rows: Iterable[SiteBottleneck]) -> dict[str, SiteBottleneck]:
    """Return each model's last block: where the layers' descent on the bound ends."""
    return {row.model: row for row in sorted(rows, key=lambda row: row.block)}


class _Passes:
    """The batches' features, twice; kept from the first pass where they fit."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        batches: Iterable[Any],
        limit: int,
        progress: Callable[[Iterable[Any]], Iterable[Any]],
    ) -> None:
        self._models, self._batches, self._limit, self._progress = models, batches, limit, progress
        self.device = next(next(iter(models.values())).parameters()).device
        self._kept: list[tuple[Tensor, _Features]] = []
        self.complete = False

    def __iter__(self) -> Iterator[tuple[Tensor, _Features]]:
        if self.complete:
            yield from self._kept
            return
        room = self._limit
        for images, labels in self._progress(self._batches):
            batch = labels.to(self.device), self._look(images.to(self.device))
            room -= sum(feature.nbytes for feature in batch[1].values())
            if room >= 0:
                self._kept.append(batch)
            else:
                self._kept.clear()
            yield batch
        self.complete = room >= 0

    def _look(self, images: Tensor) -> _Features:
        features = {_INPUT: image_features(images)}
        for name, model in self._models.items():
            prefix = max((site.num_prefix for site in conversion_of(model).sites), default=0)
            with watching(model) as records:
                model(images.to(next(model.parameters()).dtype))
            for record in records:
                features[name, record.block] = pooled_feature(record, prefix)
        return features


class _Cluster(NamedTuple):
    """The classes of one block: their centroids, and which have images at all."""

    centroids: Tensor
    present: Tensor


def _clusters(passes: _Passes, num_classes: int) -> dict[_Key, _Cluster]:
    """First pass: class centroids, over all processes."""
    sums: dict[_Key, Tensor] = {}
    counts = torch.zeros(num_classes, dtype=torch.float64, device=passes.device)
    for labels, features in passes:
        check_labels(labels, len(labels), num_classes)
        counts += labels.bincount(minlength=num_classes)
        for key, feature in features.items():
            batch = class_sums(feature, labels, num_classes).double()
            sums[key] = batch if key not in sums else sums[key] + batch
    require_images(int(counts.sum()), passes.device)
    counts = sum_over_processes(counts)
    return {
        key: _Cluster(class_centroids(sum_over_processes(value), counts), counts > 0)
        for key, value in sums.items()
    }


def _rows(
    passes: _Passes, names: list[str], clusters: Mapping[_Key, _Cluster], beta: float
) -> list[SiteBottleneck]:
    """Second pass: memberships and joint tables of some models."""
    found: dict[_Key, ClassStatistics] = {}

    def membership(key: _Key, feature: Tensor) -> Tensor:
        return class_membership(feature, clusters[key].centroids, beta, clusters[key].present)

    for labels, features in passes:
        inputs = membership(_INPUT, features[_INPUT])
        for key, feature in features.items():
            if key[0] not in names:
                continue
            if key not in found:
                num_classes, width = clusters[key].centroids.shape
                found[key] = ClassStatistics.zeros(num_classes, width, device=feature.device)
            found[key].update(feature, labels, membership(key, feature), inputs)
    return [_row(*key, statistics.all_reduce()) for key, statistics in found.items()]


def _row(model: str, block: int, statistics: ClassStatistics) -> SiteBottleneck:
    values = {name: float(value) for name, value in vars(statistics.bottleneck()).items()}
    num_images = round(float(statistics.counts.sum()))
    return SiteBottleneck(model=model, block=block, num_images=num_images, **values)

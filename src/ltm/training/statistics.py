"""Class statistics of the sites: Q and centroids, once per epoch, from clean labels.

Each site adds up what it sees; taking the sums adds up all processes too. The first merging epoch
needs centroids and Q of the epoch before, which saw none: two passes over clean images make them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ltm.api import collect_statistics_, is_merging, mergers, observe_, watching
from ltm.core.cost import evaluating
from ltm.data.loading import Batch
from ltm.methods.base import Merger


def statistical_mergers(model: nn.Module) -> list[Merger]:
    """The mergers that keep class statistics."""
    if not is_merging(model):
        return []
    return [merger for _, merger in mergers(model) if merger.keeps_statistics]


def needs_statistics(model: nn.Module) -> bool:
    """Whether any site keeps class statistics."""
    return bool(statistical_mergers(model))


def take_statistics_(model: nn.Module) -> None:
    """Turn the sums of all processes into centroids and Q. All processes have to call it."""
    for merger in statistical_mergers(model):
        merger.take_statistics_()


def forget_sums_(model: nn.Module) -> None:
    """Drop sums that an epoch left unfinished."""
    for merger in statistical_mergers(model):
        merger.forget_sums_()


def start_statistics_(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Centroids, then Q, from two passes over clean images: what the first merging epoch needs."""
    collect_statistics_(model, batches, passes=2)


@torch.no_grad()
def refresh_statistics_(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Q from the last centroids, and new centroids, from one pass over clean images."""
    forget_sums_(model)
    for images, labels in batches:
        with evaluating(model), watching(model) as records:
            model(images)
        observe_(records, labels)
    take_statistics_(model)

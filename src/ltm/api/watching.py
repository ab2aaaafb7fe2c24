"""Look inside a converted model: what was merged, and what it does without merging."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ltm.adapters import adapter_of
from ltm.adapters.state import Record
from ltm.api.conversion import conversion_of
from ltm.core.cost import evaluating
from ltm.core.merge import compose_weights


@torch.no_grad()
def merge_maps(model: nn.Module, images: Tensor) -> dict[int, Tensor]:
    """By merging block, the weights of its tokens over the patches: `b n0 p`, columns sum to one.

    The patches are those at the start of the block's stage.
    """
    with evaluating(model), watching(model) as records:
        model(images)
    return {
        record.block: compose_weights(record.merges).expand(len(images), -1, -1)
        for record in records
        if record.decision is not None
    }


@contextmanager
def watching(model: nn.Module) -> Iterator[list[Record]]:
    """Collect what happens at every block of a converted model in the forwards inside.

    They are eager ones, compiled or not: graphs keep no records.
    """
    state = conversion_of(model).state
    with torch.compiler.set_stance("force_eager"), state.watching() as records:
        yield records


@contextmanager
def merging_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before its conversion, in the forwards and backwards inside.

    Mask modules stay where they are and wait: for warm-up epochs, and to compare with the original.
    """
    done = conversion_of(model)
    with done.state.pausing(), adapter_of(done.family).pausing(model):
        yield


@contextmanager
def announcing(model: nn.Module, labels: Tensor | None) -> Iterator[None]:
    """Let the mask modules see the labels of the forwards inside in training."""
    with conversion_of(model).state.announcing(labels):
        yield

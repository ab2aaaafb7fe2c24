"""Look inside a converted model: what was merged, and class statistics of what came out."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ltm.adapters import adapter_of
from ltm.adapters.state import Record
from ltm.api.conversion import conversion_of, mergers
from ltm.core.cost import evaluating
from ltm.core.merge import compose_weights
from ltm.methods.ltm.step import LTMMerger


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
    """Let the mask modules see the labels of the forwards inside (`LTM(labels="true")`)."""
    with conversion_of(model).state.announcing(labels):
        yield


@torch.no_grad()
def collect_statistics_(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    passes: int = 2,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = lambda batches: batches,
) -> int:
    """Class centroids and Q of every site, from labels or else from the model's own predictions.

    `loader` gives images, or (images, labels) with labels of -1 or None for "unknown", and can be
    gone through twice: first for centroids, then for memberships. Returns the number of images.
    Where anything fails, the statistics of before are kept.
    """
    if passes < 2:
        raise ValueError(f"passes: got {passes}; at least 2 are needed, the first for centroids.")
    steps = [m for _, m in mergers(model) if isinstance(m, LTMMerger) and m.informative is not None]
    if not steps:
        raise ValueError(
            "model: no site keeps class statistics; they belong to LTM(weights='informative') on "
            "a model with classes."
        )
    if isinstance(loader, Iterator):
        raise ValueError(
            f"loader: got a {type(loader).__name__}, which can be gone through once; it is needed "
            f"{passes} times: give a list or a DataLoader."
        )
    with _kept_on_failure(steps):
        for merger in steps:
            merger.forget_statistics_()
        num_images = 0
        for _ in range(passes):
            num_images = sum(_observe(model, batch) for batch in progress(loader))
            if num_images == 0:
                raise ValueError("loader: it gave no images.")
            for merger in steps:
                merger.take_statistics_()
        return num_images


@contextmanager
def _kept_on_failure(steps: Sequence[LTMMerger]) -> Iterator[None]:
    """Give mergers back what they know where anything inside fails."""
    before = [copy.deepcopy(merger.state_dict()) for merger in steps]
    try:
        yield
    except BaseException:
        for merger, known in zip(steps, before, strict=True):
            merger.statistics = None
            merger.load_state_dict(known)
        raise


def _observe(model: nn.Module, batch: Any) -> int:
    device = next(model.parameters()).device
    images, labels = _images_and_labels(batch)
    images = images.to(device)
    with evaluating(model), watching(model) as records:
        predictions = model(images).argmax(dim=1)
    if labels is None:
        labels = predictions
    labels = labels.to(device)
    observe_(records, torch.where(labels >= 0, labels, predictions))
    return len(images)


@torch.no_grad()
def observe_(records: Sequence[Record], labels: Tensor) -> None:
    """Let every site that merged add a batch with its labels to its sums."""
    for record in records:
        if record.merger is not None and record.decision is not None:
            hints = dataclasses.replace(record.hints, labels=labels, size=record.size)
            record.merger.observe(record.merged, hints)


def _images_and_labels(batch: Any) -> tuple[Tensor, Tensor | None]:
    """A batch of a loader; what is none is a TypeError."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch, None)
    kinds = [Tensor, Tensor | None]
    if len(parts) != 2 or not all(map(isinstance, parts, kinds)):
        said = ", ".join(type(part).__name__ for part in parts if part is not None)
        raise TypeError(
            f"loader: got a batch of ({said}); give images, or (images, labels), as tensors."
        )
    images, labels = parts
    if labels is not None and (labels.shape != images.shape[:1] or labels.is_floating_point()):
        raise ValueError(
            f"loader: got labels of shape {tuple(labels.shape)} and {labels.dtype} for "
            f"{len(images)} images; give each the number of its class, -1 for unknown."
        )
    return images, labels

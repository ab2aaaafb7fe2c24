"""What methods learn from images without training: class statistics, and thresholds for a ratio."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ltm.adapters import adapter_of
from ltm.adapters.blocks import Record
from ltm.adapters.planning import Planner
from ltm.api.conversion import conversion_of, mergers, unmerge_tokens_, watching
from ltm.core.cost import evaluating, meta_copy
from ltm.core.finite import require_finite_images
from ltm.methods.base import Images, StatisticalMerger, statistical
from ltm.processes import failing_together, gather_objects


@torch.no_grad()
def fit_(
    model: nn.Module,
    batches: Tensor | Iterable[Any],
    *,
    tolerance: float = 0.005,
    batch_size: int = 32,
) -> None:
    """Fit what the method of a converted model learns from images; most methods learn nothing.

    A ratio that holds on average over images is met within `tolerance`. Informative weights get
    class statistics, from labels or else from the model's own predictions. `batches` are normalised
    images in one tensor, or batches as `collect_statistics_` takes them.
    """
    if isinstance(batches, Tensor):
        batches = batches.split(batch_size)
    fitted = cache(mac_share)

    def share() -> float:
        _require_repeatable("batches", batches, "several times")
        return measure_share(model, batches, fitted(model))

    images = Images(
        share=share,
        collect_statistics_=lambda: collect_statistics_(model, batches),
    )
    found = [merger for _, merger in mergers(model)]
    conversion_of(model).config.fit_(found, images, tolerance=tolerance)


@dataclass(frozen=True, eq=False, kw_only=True)
class MacShare:
    """The share of the original MACs, as a function of the tokens left after each site.

    The tokens pass an MLP and the next attention, whose costs are linear and quadratic in them:
    `share(x) = constant + sum_l (linear_l x_l + quadratic_l x_l^2)`.

    Letters: b images, s sites.
    """

    constant: float
    linear: Float[Tensor, "s"]
    quadratic: Float[Tensor, "s"]

    def __call__(self, tokens: Float[Tensor, "*b s"]) -> Float[Tensor, "*b"]:
        linear, quadratic = self.linear.to(tokens), self.quadratic.to(tokens)
        return self.constant + (linear * tokens + quadratic * tokens.square()).sum(-1)


def mac_share(model: nn.Module) -> MacShare:
    """Fit the share of a converted model to counts on `meta`."""
    done, sites = conversion_of(model), [merger.site for _, merger in mergers(model)]
    shadow = meta_copy(model)
    unmerge_tokens_(shadow)
    blocks = tuple(site.block for site in sites)
    config = done.config.with_amount(ratio=1.0, sites=blocks)
    planner = Planner(shadow, adapter_of(done.family), config, done.image_size)
    runs = [(run.num_in, [b for b in run.blocks if b in blocks]) for run in planner.layout.runs]
    samples = list(_samples(runs))
    tokens = torch.tensor([[s[b] for b in blocks] for s in samples], dtype=torch.float64)
    costs = torch.tensor([planner.cost(s) for s in samples], dtype=torch.float64)
    scale = tokens.amax(dim=0)
    unit = tokens / scale
    table = torch.cat([torch.ones(len(samples), 1, dtype=torch.float64), unit, unit.square()], 1)
    solution = torch.linalg.lstsq(table, costs / planner.macs_before, driver="gelsd").solution
    linear, quadratic = solution[1:].chunk(2)
    return MacShare(
        constant=float(solution[0]), linear=linear / scale, quadratic=quadratic / scale.square()
    )


_FEW = 16
"""Up to this many tokens, matching costs next to nothing."""


def _samples(runs: Sequence[tuple[int, list[int]]]) -> Iterator[dict[int, int]]:
    """Sample decreasing counts that never halve.

    Short sequences cannot decrease often enough for a fit, so there every count is sampled, even
    if a site keeps all tokens and does no work.
    """
    gentle = {b: max(1, n - 1 - i) for n, blocks in runs for i, b in enumerate(blocks)}
    yield gentle
    for (num_in, blocks), share in itertools.product(runs, (0.8, 0.6)):
        for first in range(len(blocks)):
            later = blocks[first:]
            start = max(len(later), min(round(share * num_in), gentle[later[0]]))
            yield gentle | {b: max(1, start - i) for i, b in enumerate(later)}
    for num_in, blocks in runs:
        for first, left in itertools.product(range(len(blocks)), range(1, num_in + 1)):
            if num_in <= _FEW:
                before = dict.fromkeys(blocks[:first], num_in)
                yield gentle | before | dict.fromkeys(blocks[first:], left)


@torch.no_grad()
def measure_share(
    model: nn.Module, batches: Tensor | Iterable[Any], share: MacShare | None = None
) -> float:
    """The mean share of MACs over images, from the tokens that each image really keeps."""
    share = mac_share(model) if share is None else share
    if isinstance(batches, Tensor):
        batches = batches.split(32)
    device = next(model.parameters()).device
    total, num_images = 0.0, 0
    for images, _ in _checked(batches):
        with evaluating(model), watching(model) as records:
            model(images.to(device))
        found = [record for record in records if record.merger is not None]
        left = torch.zeros(len(images), len(found), dtype=torch.float64, device=device)
        for site, record in enumerate(found):
            left[:, site] = _tokens_left(record, len(images))
        total += float(share(left).sum())
        num_images += len(images)
    if num_images == 0:
        raise ValueError("batches: they hold no images.")
    return total / num_images


def _tokens_left(record: Record, num_images: int) -> Float[Tensor, "b"]:
    """The tokens of each image after a site; with windows, those of the fullest one."""
    merger = record.merger
    assert merger is not None
    k, merged = merger.site.num_prefix, record.merged
    size = record.size
    if size is None:
        size = merged.new_ones(1, merged.shape[1], dtype=torch.float32)
    alive = (size[:, k:] > 0).double().expand(num_images, -1)
    inner: Any = getattr(record.decision and record.decision.merge, "inner", None)
    windows = 1 if inner is None else alive.shape[1] // inner.num_out
    return alive.unflatten(1, (windows, -1)).sum(-1).amax(dim=1)


def statistical_mergers(model: nn.Module) -> list[StatisticalMerger]:
    """The mergers of a model that keep class statistics."""
    return statistical(merger for _, merger in mergers(model))


@torch.no_grad()
def collect_statistics_(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    passes: int = 2,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = lambda batches: batches,
) -> int:
    """Collect class centroids and Q for every site, from labels or the model's own predictions.

    `loader` gives images, or (images, labels); a label of -1 or None is unknown. It is iterated
    twice: first for centroids, then for memberships. Several processes add up their sums; some may
    have no images. Returns the number of images in all processes. If any process fails, the earlier
    statistics are kept.
    """
    if passes < 2:
        raise ValueError(f"passes: got {passes}; at least 2 are needed, the first for centroids.")
    steps = statistical_mergers(model)
    if not steps:
        raise ValueError(
            "model: no site keeps class statistics; they belong to methods with informative "
            "weights on a model with classes."
        )
    _require_repeatable("loader", loader, f"{passes} times")
    with _kept_on_failure(steps):
        for merger in steps:
            merger.forget_statistics_()
        num_images = 0
        for _ in range(passes):
            with failing_together():
                own = sum(_observe(model, *batch) for batch in _checked(progress(loader)))
            num_images = sum(gather_objects(own))
            if num_images == 0:
                raise ValueError("loader: it gave no images.")
            for merger in steps:
                merger.take_statistics_()
        return num_images


def _require_repeatable(name: str, batches: Iterable[Any], times: str) -> None:
    if isinstance(batches, Iterator):
        raise ValueError(
            f"{name}: got a {type(batches).__name__}, which can be gone through once; it is needed "
            f"{times}: give a list or a DataLoader."
        )


@contextmanager
def _kept_on_failure(steps: Sequence[StatisticalMerger]) -> Iterator[None]:
    """If anything inside fails, restore the statistics of the mergers."""
    before = [copy.deepcopy(merger.state_dict()) for merger in steps]
    try:
        yield
    except BaseException:
        for merger, known in zip(steps, before, strict=True):
            merger.forget_sums_()
            merger.load_state_dict(known)
        raise


def _observe(model: nn.Module, images: Tensor, labels: Tensor | None) -> int:
    device = next(model.parameters()).device
    with evaluating(model), watching(model) as records:
        scores = model(images.to(device))
    scores = getattr(scores, "logits", scores)  # networks of transformers return an object
    require_finite_images(scores, "loader: the model's scores")
    predictions = scores.argmax(dim=1)
    known = predictions if labels is None else labels.to(device)
    observe_(records, torch.where(known >= 0, known, predictions))
    return len(images)


@torch.no_grad()
def observe_(records: Sequence[Record], labels: Tensor) -> None:
    """Let every site that merged add a batch with labels to its sums."""
    for record in records:
        if isinstance(record.merger, StatisticalMerger) and record.decision is not None:
            hints = dataclasses.replace(record.hints, labels=labels, size=record.size)
            record.merger.observe(record.merged, hints)


def _checked(loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The images and labels of batches; an error names images that are not finite."""
    for number, batch in enumerate(loader):
        images, labels = _images_and_labels(batch)
        require_finite_images(images, f"loader: batch {number}")
        yield images, labels


def _images_and_labels(batch: Any) -> tuple[Tensor, Tensor | None]:
    """The images and labels of a batch; a TypeError if it is something else."""
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

"""LTMP's budget: its share of MACs by the tokens it keeps, and thresholds that meet a target.

How many tokens LTMP removes differs from image to image, so its ratio is met as a mean: the loss
pulls the share towards the target in training, and `set_thresholds_` meets it on given images.

Letters: b images, s sites.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ltm.adapters import adapter_of
from ltm.adapters.planning import Planner
from ltm.api import Record, conversion_of, mergers, unmerge_tokens_, watching
from ltm.core.cost import evaluating, meta_copy
from ltm.methods.ltmp import LTMPMerger


@dataclass(frozen=True, eq=False, kw_only=True)
class MacShare:
    """Share of the original MACs, given the tokens left after each site.

    A site's tokens pass its own MLP and the next attention, whose costs are linear and quadratic
    in them: `share(x) = constant + sum_l (linear_l x_l + quadratic_l x_l^2)`.
    """

    constant: float
    linear: Float[Tensor, "s"]
    quadratic: Float[Tensor, "s"]

    def __call__(self, tokens: Float[Tensor, "*b s"]) -> Float[Tensor, "*b"]:
        linear, quadratic = self.linear.to(tokens), self.quadratic.to(tokens)
        return self.constant + (linear * tokens + quadratic * tokens.square()).sum(-1)


def mac_share(model: nn.Module) -> MacShare:
    """Fit the share of a model converted with LTMP to counts on `meta`."""
    done, sites = conversion_of(model), [merger.site for merger in thresholds(model)]
    shadow = meta_copy(model)
    unmerge_tokens_(shadow)
    blocks = tuple(site.block for site in sites)
    config = dataclasses.replace(done.config.without_amount(), sites=blocks)
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
"""So few tokens that finding who leaves costs next to nothing."""


def _samples(runs: Sequence[tuple[int, list[int]]]) -> Iterator[dict[int, int]]:
    """Counts that fall at every site, so that all do their work, and never by half.

    Few tokens cannot fall often enough to tell what they cost: of them any number counts, also
    where a site keeps all and does no work.
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


def thresholds(model: nn.Module) -> list[LTMPMerger]:
    """The mergers of a model converted with LTMP, in the order of their blocks."""
    found = [merger for _, merger in mergers(model) if isinstance(merger, LTMPMerger)]
    if not found:
        name = conversion_of(model).config.name
        raise ValueError(f"model: it merges with {name}, and only LTMP has thresholds to set")
    return found


def expected_share(model: nn.Module, share: MacShare) -> Tensor:
    """The share of MACs of the last training forward, with its gradient for the thresholds."""
    left: list[Tensor] = []
    for merger in thresholds(model):
        if merger.kept is None:
            raise ValueError("model: no forward in training mode went before")
        left.append(merger.kept.float() * merger.site.grid[0] * merger.site.grid[1])
    return share(torch.stack(left))


@torch.no_grad()
def measure_share(
    model: nn.Module, images: Tensor, share: MacShare | None = None, *, batch_size: int = 32
) -> float:
    """Mean share of MACs over images, from the tokens that are really left of each."""
    share = mac_share(model) if share is None else share
    device = next(model.parameters()).device
    total = 0.0
    for batch in images.split(batch_size):
        with evaluating(model), watching(model) as records:
            model(batch.to(device))
        left = [_tokens_left(record, len(batch)) for record in records if record.merger is not None]
        total += float(share(torch.stack(left, dim=1)).sum())
    return total / len(images)


def _tokens_left(record: Record, num_images: int) -> Float[Tensor, "b"]:
    """Tokens after a site by image; of attention windows the fullest counts, as it is computed."""
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


@torch.no_grad()
def set_thresholds_(
    model: nn.Module,
    images: Tensor,
    target: float | None = None,
    *,
    share: MacShare | None = None,
    tolerance: float = 0.005,
    steps: int = 20,
    batch_size: int = 32,
) -> float:
    """Move all thresholds of LTMP together until the mean share of MACs meets the target.

    `images` are a few unlabelled, normalised inputs; `target` is the config's ratio unless given.
    Returns the share that was measured, which is within `tolerance` of the target.
    """
    moved = thresholds(model)
    target = conversion_of(model).config.ratio if target is None else target
    if target is None:
        raise ValueError("target: the model was converted without a ratio; give one")
    share = mac_share(model) if share is None else share
    start = [(float(m.merge_threshold), float(m.prune_threshold)) for m in moved]

    def share_at(strength: float) -> float:
        for merger, before in zip(moved, start, strict=True):
            merge, prune = _moved_thresholds(*before, strength, merger.site.num_in)
            merger.merge_threshold.fill_(merge)
            merger.prune_threshold.fill_(prune)
        return measure_share(model, images, share, batch_size=batch_size)

    low, high = -1.0, 1.0
    most, least = share_at(low), share_at(high)
    if not least <= target <= most:
        share_at(0.0)
        raise ValueError(f"target: got {target}; LTMP reaches {least:.3f} to {most:.3f} here")
    reached, strength = share_at(0.0), 0.0
    for _ in range(steps):
        if abs(reached - target) <= tolerance / 4:
            break
        low, high = (strength, high) if reached > target else (low, strength)
        strength = (low + high) / 2
        reached = share_at(strength)
    if abs(reached - target) > tolerance:
        raise ValueError(
            f"target: got {target}; the nearest share on {len(images)} images is {reached:.3f}: "
            "give more images, or a larger tolerance"
        )
    return reached


def _moved_thresholds(
    merge: float, prune: float, strength: float, num_tokens: int
) -> tuple[float, float]:
    """Thresholds at a strength: at -1 nothing leaves, at 0 they are as they were, at 1 most leaves.

    Pruning does most of the way, up to four times the mean attention (one over the number of
    tokens): on a pretrained ViT at 0.7 that cost 1.0 points, merging alone 2.8.
    """
    if strength < 0:
        return merge + (1.001 - merge) * -strength, prune * (1 + strength)
    return merge - 0.3 * strength, prune + 4.0 * strength / num_tokens

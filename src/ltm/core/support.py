"""The learned support M of a merging mask: which tokens may enter which merged token (target).

Each target has an anchor, a token that is always in, and its candidates are the tokens around the
anchor. The paper's form has neither: every token may enter every target. The choice of candidates
is binary, by logistic (binary Gumbel) noise on learned logits, with a straight-through gradient.

Letters: n tokens, p targets, k candidates per target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ltm.core.schedule import Grid

_NUM_CANDIDATES = 9


def anchors(num_tokens: int, num_targets: int) -> Int[Tensor, "p"]:
    """Evenly spaced tokens, a different one per target."""
    step = torch.arange(num_targets, dtype=torch.float64)
    return ((step + 0.5) * num_tokens / num_targets).floor().long()


@dataclass(frozen=True, eq=False)
class Candidates:
    """The tokens that may enter each target."""

    index: Int[Tensor, "p k"]
    valid: Bool[Tensor, "p k"]
    """False where a target near an edge has fewer candidates."""
    anchor: Bool[Tensor, "p k"]
    home: Bool[Tensor, "p k"]
    """The candidates that are in at first: together they cover every token once."""


def axis_candidates(num_tokens: int, num_targets: int) -> Candidates:
    """Candidates along one side of a grid: the anchor and its neighbours on both sides.

    The axis is divided evenly between targets. A token starts in the target that its middle falls
    into, so merged tokens are spaced as evenly as whole tokens allow.
    """
    middles = torch.arange(num_tokens, dtype=torch.float64) + 0.5
    chosen = anchors(num_tokens, num_targets)
    radius = math.ceil(num_tokens / num_targets / 2) if num_targets < num_tokens else 0
    offsets = torch.arange(-radius, radius + 1)
    index = chosen[:, None] + offsets
    return _candidates(
        index.clamp(0, num_tokens - 1),
        (index >= 0) & (index < num_tokens),
        chosen,
        (middles * num_targets / num_tokens).floor().long(),
    )


def grid_candidates(grid: Grid, num_tokens: int, num_targets: int) -> Candidates:
    """Candidates in a sequence of patches: the tokens nearest to the anchor in the image.

    A sequence shorter than the grid was merged before; its tokens are taken to be evenly spaced
    patches. A longer one comes from a larger image, which is taken to have the same aspect ratio.
    """
    if num_tokens > grid[0] * grid[1]:
        scale = math.sqrt(num_tokens / (grid[0] * grid[1]))
        grid = (math.ceil(grid[0] * scale), math.ceil(grid[1] * scale))
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    points = torch.stack([rows.flatten(), columns.flatten()], dim=1).double()
    points = points[anchors(len(points), num_tokens)] if num_tokens < len(points) else points
    chosen = anchors(num_tokens, num_targets)
    distance = torch.cdist(points[chosen], points)
    index = distance.topk(min(_NUM_CANDIDATES, num_tokens), dim=1, largest=False).indices
    return _candidates(
        index, torch.ones_like(index, dtype=torch.bool), chosen, distance.argmin(dim=0)
    )


def all_candidates(near: Candidates, num_tokens: int) -> Candidates:
    """Every token as a candidate of every target, without anchors: the paper's N x P choices.

    They start from the same partition as the near candidates.
    """
    num_targets = len(near.index)
    home = near.index.new_zeros(num_targets, num_tokens)
    home = home.scatter_add(1, near.index, near.home.long()) > 0
    return Candidates(
        index=torch.arange(num_tokens).expand(num_targets, -1).clone(),
        valid=torch.ones_like(home),
        anchor=torch.zeros_like(home),
        home=home,
    )


def _candidates(index: Tensor, valid: Tensor, chosen: Tensor, homes: Tensor) -> Candidates:
    anchor = valid & (index == chosen[:, None])
    home = valid & (homes[index] == torch.arange(len(chosen))[:, None])
    return Candidates(index, valid, anchor, home | anchor)


def initial_logits(candidates: Candidates) -> Float[Tensor, "p k"]:
    """Logits of the initial partition."""
    return torch.where(candidates.home, 3.0, -3.0)


def choose(logits: Float[Tensor, "p k"], *, noise: float = 0.0) -> Float[Tensor, "p k"]:
    """Choose candidates by thresholding their logits, with a straight-through gradient.

    `noise` is the scale of logistic noise on the logits.
    """
    if noise > 0:
        uniform = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
        logits = logits + noise * (uniform.log() - (-uniform).log1p())
    return straight_through(logits > 0, torch.sigmoid(logits))


def straight_through(hard: Bool[Tensor, "*n"], soft: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """One or zero, as `hard` says, with the gradient of `soft`."""
    # Subtract first: (1 + soft) - soft rounds, and a zero must stay exact for later logarithms.
    return hard.to(soft.dtype) + (soft - soft.detach())


def support_matrix(
    choice: Float[Tensor, "p k"], candidates: Candidates, num_tokens: int
) -> Float[Tensor, "n p"]:
    """The support as a matrix, with anchors always in and tokens that are no candidates out."""
    values = torch.where(candidates.anchor, 1.0, choice) * candidates.valid
    matrix = values.new_zeros(values.shape[0], num_tokens)
    return matrix.scatter_add(1, candidates.index, values).mT


def resample_logits(logits: Float[Tensor, "p k"], num_targets: int) -> Float[Tensor, "p2 k"]:
    """Interpolate logits to another number of targets, for each candidate apart."""
    if logits.shape[0] == num_targets:
        return logits
    curves = logits.mT[None]
    return torch.nn.functional.interpolate(curves, num_targets, mode="linear")[0].mT

"""How many tokens stay at each site, and how a budget of MACs becomes such counts.

A schedule maps one number, the strength t in [0, 1], to counts for every site; a larger t never
leaves more tokens. A budget is met by the weakest strength that fits it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Generic, TypeVar

Grid = tuple[int, int]


def require_ratio(name: str, value: Any) -> None:
    """Raise a ValueError unless a value is in (0, 1]."""
    if not isinstance(value, Real):
        raise ValueError(f"{name}: got {value!r}; it must be a number larger than 0 and at most 1.")
    if not 0 < float(value) <= 1:
        raise ValueError(f"{name}: got {value}; it must be larger than 0 and at most 1.")


def ceil_count(num_tokens: int, ratio: float) -> int:
    """The paper's `P = ceil(r N)`, exact where r N is a whole number in decimal notation."""
    return max(1, math.ceil(round(num_tokens * ratio, 9)))


def ceil_grid(grid: Grid, ratio: float) -> Grid:
    """The paper's `H' = ceil(H sqrt(r))`, `W' = ceil(W sqrt(r))`."""
    side = math.sqrt(ratio)
    return ceil_count(grid[0], side), ceil_count(grid[1], side)


def constant_number(strength: float, num_in: int, num_sites: int) -> list[int]:
    """ToMe's schedule: the same number of tokens leaves at every site.

    Sites may differ by one token, so that budgets can be met closely.
    """
    per_site = strength * num_in
    return [max(1, num_in - int(per_site * site)) for site in range(1, num_sites + 1)]


def constant_rate(strength: float, num_in: int, num_sites: int) -> list[int]:
    """Every site removes the same share of its tokens: none at strength 0, all at 1."""
    return weighted_rate(strength, num_in, [0.5] * num_sites)


def falling_number(strength: float, num_in: int, num_sites: int) -> list[int]:
    """ToMe's decreasing schedule: the number of tokens that leave falls linearly to zero."""
    parts = [num_sites - site - 0.5 for site in range(num_sites)]
    leaving = [part / sum(parts) * strength * num_in for part in parts]
    return [max(1, num_in - int(sum(leaving[: site + 1]))) for site in range(num_sites)]


def weighted_rate(strength: float, num_in: int, leaving: Sequence[float]) -> list[int]:
    """A depth profile: each site removes its own share of its tokens.

    `leaving` holds the shares at strength 0.5; they are zero at strength 0 and one at 1.
    """
    exponent = strength / (1 - strength) if strength < 1 else math.inf
    counts: list[int] = []
    left = num_in
    for share in leaving:
        left = max(1, round(left * (1 - share) ** exponent))
        counts.append(left)
    return counts


def grid_counts(
    strengths: Sequence[float], grid: Grid, stages: Sequence[int], multiple: int = 1
) -> list[Grid]:
    """The grid after each block of a grid network, given a strength per block (0: no merging).

    `stages` are the numbers of blocks at each resolution; between them the sides are halved,
    rounded up. Sides larger than `multiple` stay multiples of it, since attention windows would pad
    them to that anyway.
    """
    counts: list[Grid] = []
    blocks = iter(strengths)
    for index, num_blocks in enumerate(stages):
        grid = halve(grid) if index else grid
        entry, share = grid, 1.0
        for _ in range(num_blocks):
            share *= 1 - next(blocks)
            height, width = _sides(entry, share, multiple)
            grid = min(grid[0], height), min(grid[1], width)
            counts.append(grid)
    return counts


def halve(grid: Grid) -> Grid:
    """The grid after a strided convolution or patch merging: its halves, rounded up."""
    return (grid[0] + 1) // 2, (grid[1] + 1) // 2


def _sides(grid: Grid, share: float, multiple: int) -> Grid:
    """Integer sides of at least the wanted area: the width first, then the height to match."""
    width = _round_up(grid[1] * math.sqrt(share), multiple, grid[1])
    height = _round_up(grid[0] * grid[1] * share / width, multiple, grid[0])
    return height, width


def _round_up(side: float, multiple: int, largest: int) -> int:
    step = multiple if largest > multiple else 1
    return max(step, min(largest, math.ceil(round(side, 6) / step) * step))


Counts = TypeVar("Counts")
_MAX_STEPS = 14


@dataclass(frozen=True)
class Fit(Generic[Counts]):
    """The weakest strength that meets a budget, with its counts and their cost."""

    strength: float
    counts: Counts
    cost: float


def fit_budget(
    counts_at: Callable[[float], Counts],
    cost_of: Callable[[Counts], float],
    budget: float,
    tolerance: float = 0.003,
    steps: int = _MAX_STEPS,
) -> Fit[Counts] | None:
    """Search for the weakest strength whose cost is at most the budget; None if there is none.

    The search ends once the cost is within `tolerance`, a share of the budget, below the budget.
    """
    counts = counts_at(0.0)
    low, above = 0.0, cost_of(counts)
    if above <= budget:
        return Fit(0.0, counts, above)
    counts = counts_at(1.0)
    best = Fit(1.0, counts, cost_of(counts))
    if best.cost > budget:
        return None
    for step in range(steps):
        if best.cost >= (1 - tolerance) * budget or best.strength - low < 1e-4:
            break
        # Interpolation of a curve approaches from one side only, so every third step halves.
        part = (above - budget * (1 - tolerance / 2)) / (above - best.cost)
        part = 0.5 if step % 3 == 0 else min(max(part, 0.05), 0.95)
        strength = low + part * (best.strength - low)
        counts = counts_at(strength)
        cost = cost_of(counts)
        if cost <= budget:
            best = Fit(strength, counts, cost)
        else:
            low, above = strength, cost
    return best

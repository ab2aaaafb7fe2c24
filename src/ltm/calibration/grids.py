"""Schedules of grid networks (Swin, MobileViT, EfficientViT): the sides after each block.

A grid that shrinks stays so until the end of the network, halved between stages. What single
blocks cost and save, each alone, nearly adds up: that orders the schedules that are worth trying.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ltm.adapters.base import Layout
from ltm.calibration.costs import Cost
from ltm.calibration.schedules import Schedule, Setting
from ltm.calibration.search import Search
from ltm.core.schedule import Grid, halve

HOPELESS = 2.0
"""A divergence beyond which a block is not asked to give up still more."""

_PROBES = (0.8, 0.55, 0.3)
"""Shares of its tokens that a block is asked to keep."""

_LEAST = 1e-9


@dataclass(frozen=True)
class Point:
    """A block that keeps a share of its tokens, and nothing else merges."""

    kept: float
    divergence: float
    saved: float
    """Share of the original's multiply-adds."""


@dataclass(frozen=True)
class Frame:
    """The grids of a network that merges nothing, and the rules for those of one that does."""

    entry: Grid
    stages: tuple[int, ...]
    multiple: int

    @staticmethod
    def of(layout: Layout) -> Frame:
        """The frame of a grid network."""
        assert layout.entry is not None
        stages = tuple(block.stage for block in layout.blocks)
        return Frame(layout.entry, stages, layout.multiple)

    def grids(self, caps: Mapping[int, Grid]) -> list[tuple[Grid, Grid]]:
        """The grids before and after each block, none larger than its cap."""
        found: list[tuple[Grid, Grid]] = []
        grid = self.entry
        for block, stage in enumerate(self.stages):
            grid = halve(grid) if block and stage != self.stages[block - 1] else grid
            cap = caps.get(block, grid)
            after = (min(grid[0], cap[0]), min(grid[1], cap[1]))
            found.append((grid, after))
            grid = after
        return found

    def schedule(self, caps: Mapping[int, Grid]) -> Schedule:
        """The sites at which something shrinks."""
        grids = enumerate(self.grids(caps))
        return tuple(Setting(block, after) for block, (before, after) in grids if after != before)

    def smaller(self, side: int) -> int:
        """The next smaller side that suits the attention windows."""
        step = self.multiple
        return (side - 1) // step * step if side > step else max(1, side - 1)

    def larger(self, side: int) -> int:
        """The next larger one."""
        step = self.multiple
        return side // step * step + step if side >= step else side + 1

    def shrunk(self, grid: Grid, share: float) -> Grid:
        """A grid of about a share of the tokens, its longer side made shorter first."""
        height, width = grid
        while height * width > share * grid[0] * grid[1] and height * width > 1:
            if width >= height:
                width = self.smaller(width)
            else:
                height = self.smaller(height)
        return height, width


def probe_grids(search: Search, frame: Frame) -> dict[int, list[Point]]:
    """Ask every block what it minds, and what it saves."""
    points: dict[int, list[Point]] = {}
    for block, (grid, _) in enumerate(frame.grids({})):
        points[block] = [Point(1.0, 0.0, 0.0)]
        for share in _PROBES:
            after = frame.shrunk(grid, share)
            kept = after[0] * after[1] / (grid[0] * grid[1])
            if kept >= points[block][-1].kept:
                continue
            schedule = (Setting(block, after),)
            divergence = search.probe(schedule)
            points[block].append(Point(kept, divergence, 1 - search.cost(schedule)))
            if divergence > HOPELESS:
                break
    return points


class GridSpace:
    """Schedules of whole-number sides within a budget."""

    def __init__(
        self, cost: Cost, budget: float, *, frame: Frame, points: Mapping[int, list[Point]]
    ) -> None:
        self.cost, self.budget = cost, budget
        self.frame, self.points = frame, points
        self._whole = [grid for grid, _ in frame.grids({})]

    def starts(self) -> list[Schedule]:
        """Shrink where it does least harm for what it saves, until the budget is met."""
        caps: dict[int, Grid] = {}
        while self._expected_cost(self.frame.schedule(caps)) > self.budget:
            found = self._best_shrinking(caps)
            if found is None:
                break
            caps = found
        while self.cost(self.frame.schedule(caps)) > self.budget:
            found = self._best_shrinking(caps)
            if found is None:
                return []
            caps = found
        return [self._filled(self.frame.schedule(caps))]

    def neighbours(self, schedule: Schedule) -> Iterator[Schedule]:
        """Some side grows, or moves to another block, while another makes up for it."""
        caps = _caps(schedule)
        found: dict[Schedule, None] = {}
        for grown in (schedule, *self._grown(caps), *self._moved(caps)):
            found[grown] = None
            found.update(dict.fromkeys(self._shrunk(_caps(grown))))
        found.pop(schedule, None)
        near = [s for s in found if self._expected_cost(s) <= self.budget + 0.03]
        for candidate in sorted(near, key=self.expected):
            if self.cost(candidate) <= self.budget:
                yield candidate

    def expected(self, schedule: Schedule) -> float:
        """The divergence that single blocks add up to."""
        return self._total(schedule, lambda point: point.divergence)

    def _expected_cost(self, schedule: Schedule) -> float:
        return 1 - self._total(schedule, lambda point: point.saved)

    def _total(self, schedule: Schedule, value: Callable[[Point], float]) -> float:
        total = 0.0
        for block, (before, after) in enumerate(self.frame.grids(_caps(schedule))):
            if after != before:
                area = self._whole[block][0] * self._whole[block][1]
                points = [(point.kept, value(point)) for point in self.points[block]]
                first, second = (grid[0] * grid[1] / area for grid in (before, after))
                total += _between(points, second) - _between(points, first)
        return total

    def _best_shrinking(self, caps: Mapping[int, Grid]) -> dict[int, Grid] | None:
        """One side shorter: the one that does least harm for what it saves."""
        now = self.frame.schedule(caps)
        harm, cost = self.expected(now), self._expected_cost(now)
        best, best_rate = None, math.inf
        for candidate in self._shrunk(caps):
            saved = cost - self._expected_cost(candidate)
            rate = (self.expected(candidate) - harm + _LEAST) / max(saved, _LEAST)
            if rate < best_rate:
                best, best_rate = candidate, rate
        return None if best is None else _caps(best)

    def _filled(self, schedule: Schedule) -> Schedule:
        """Let sides grow as long as the budget allows, where it helps most first."""
        while True:
            grown = sorted(self._grown(_caps(schedule)), key=self.expected)
            fits = next((s for s in grown if self.cost(s) <= self.budget), None)
            if fits is None:
                return schedule
            schedule = fits

    def _shrunk(self, caps: Mapping[int, Grid]) -> Iterator[Schedule]:
        """One side of one block shorter."""
        for block, (_, (height, width)) in enumerate(self.frame.grids(caps)):
            shorter = (self.frame.smaller(height), width), (height, self.frame.smaller(width))
            for grid in shorter:
                if grid != (height, width):
                    yield self.frame.schedule({**caps, block: grid})

    def _grown(self, caps: Mapping[int, Grid]) -> Iterator[Schedule]:
        """One side of one site longer."""
        grids = self.frame.grids(caps)
        for block in caps:
            before, (height, width) = grids[block]
            longer = (self.frame.larger(height), width), (height, self.frame.larger(width))
            for grid in longer:
                cap = (min(grid[0], before[0]), min(grid[1], before[1]))
                if cap != (height, width):
                    yield self.frame.schedule({**caps, block: cap})

    def _moved(self, caps: Mapping[int, Grid]) -> Iterator[Schedule]:
        """One site a block earlier or later, within its stage."""
        stages = self.frame.stages
        for block, grid in caps.items():
            rest = {other: cap for other, cap in caps.items() if other != block}
            for other in (block - 1, block + 1):
                if 0 <= other < len(stages) and stages[other] == stages[block]:
                    yield self.frame.schedule({**rest, other: rest.get(other, grid)})


def _caps(schedule: Schedule) -> dict[int, Grid]:
    caps: dict[int, Grid] = {}
    for setting in schedule:
        assert isinstance(setting.count, tuple)
        caps[setting.block] = setting.count
    return caps


def _between(points: list[tuple[float, float]], kept: float) -> float:
    """A value at a share of tokens kept: linear between the points, and on beyond the last."""
    if len(points) == 1:
        return 0.0
    place = next((i for i, (k, _) in enumerate(points) if k <= kept), len(points) - 1)
    (k0, v0), (k1, v1) = points[max(place, 1) - 1], points[max(place, 1)]
    return v0 + (v1 - v0) * (k0 - kept) / (k0 - k1)

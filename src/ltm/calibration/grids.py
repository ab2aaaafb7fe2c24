"""Schedules of grid networks (Swin, MobileViT, EfficientViT): the sides after each block.

A grid that shrinks stays smaller until the end of the network; stages halve it. The divergences of
single blocks nearly add up, and so do the multiply-adds that they save: their sums tell which
schedules are worth trying.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ltm.calibration.search import Schedule, Search, Setting, Space
from ltm.core.schedule import Grid, halve

_HOPELESS = 2.0
"""Beyond this divergence, keeping fewer tokens at a block is not tried."""

_PROBES = (0.8, 0.55, 0.3)
"""Shares of the tokens to keep at a block when its sensitivity is measured."""

_LEAST = 1e-9

_Caps = Mapping[int, Grid]
"""The largest grid that may leave a block, for the blocks with a limit."""


@dataclass(frozen=True)
class _Point:
    """One block keeps a share of its tokens, and no other block merges."""

    kept: float
    divergence: float
    saved: float
    """Share of the original's multiply-adds."""


class GridSpace(Space):
    """Schedules whose sides are whole numbers."""

    def __init__(self, search: Search) -> None:
        super().__init__(search)
        layout = search.trials.planner.layout
        assert layout.entry is not None
        self._entry, self._multiple = layout.entry, layout.multiple
        self._stages = [block.stage for block in layout.blocks]
        self._areas = [_area(grid) for grid, _ in self._grids({})]

    @property
    def floor(self) -> float:
        return self.cost(self._schedule({0: (1, 1)}))

    def starts(self) -> list[Schedule]:
        """Shrink sides until the budget is met, by the least divergence per saving."""
        schedule: Schedule = ()
        for cost in (self._expected_cost, self.cost):
            while cost(schedule) > self.budget:
                shrunk = self._best_shrinking(schedule)
                if shrunk is None:
                    break
                schedule = shrunk
        return [self._filled(schedule)] if self.cost(schedule) <= self.budget else []

    def neighbours(self, schedule: Schedule) -> Iterator[Schedule]:
        """One side grows, or a site moves to another block, and another side compensates."""
        caps = _caps(schedule)
        found: dict[Schedule, None] = {}
        for grown in (schedule, *self._grown(caps), *self._moved(caps)):
            found[grown] = None
            found.update(dict.fromkeys(self._shrunk(_caps(grown))))
        found.pop(schedule, None)
        near = [s for s in found if self._expected_cost(s) <= self.budget + 0.03]
        for candidate in sorted(near, key=self._expected):
            if self.cost(candidate) <= self.budget:
                yield candidate

    @cached_property
    def _points(self) -> list[list[_Point]]:
        """The sensitivity of every block, and the multiply-adds that it saves."""
        return [list(self._probe(block, grid)) for block, (grid, _) in enumerate(self._grids({}))]

    def _probe(self, block: int, grid: Grid) -> Iterator[_Point]:
        last = 1.0
        yield _Point(last, 0.0, 0.0)
        for share in _PROBES:
            after = self._of_share(grid, share)
            kept = _area(after) / _area(grid)
            if kept >= last:
                continue
            schedule, last = (Setting(block, after),), kept
            divergence = self.search.probe(schedule)
            yield _Point(kept, divergence, 1 - self.cost(schedule))
            if divergence > _HOPELESS:
                return

    def _expected(self, schedule: Schedule) -> float:
        """The sum of the divergences of single blocks."""
        return self._total(schedule, lambda point: point.divergence)

    def _expected_cost(self, schedule: Schedule) -> float:
        return 1 - self._total(schedule, lambda point: point.saved)

    def _total(self, schedule: Schedule, value: Callable[[_Point], float]) -> float:
        total = 0.0
        for block, (before, after) in enumerate(self._grids(_caps(schedule))):
            if after != before:
                points = [(point.kept, value(point)) for point in self._points[block]]
                first, second = (_area(grid) / self._areas[block] for grid in (before, after))
                total += _between(points, second) - _between(points, first)
        return total

    def _best_shrinking(self, schedule: Schedule) -> Schedule | None:
        """One side shorter: the one with the least divergence per saving."""
        harm, cost = self._expected(schedule), self._expected_cost(schedule)
        best, best_rate = None, math.inf
        for candidate in self._shrunk(_caps(schedule)):
            saved = cost - self._expected_cost(candidate)
            rate = (self._expected(candidate) - harm + _LEAST) / max(saved, _LEAST)
            if rate < best_rate:
                best, best_rate = candidate, rate
        return best

    def _filled(self, schedule: Schedule) -> Schedule:
        """Let sides grow as far as the budget allows, those that help most first."""
        while True:
            grown = sorted(self._grown(_caps(schedule)), key=self._expected)
            fits = next((s for s in grown if self.cost(s) <= self.budget), None)
            if fits is None:
                return schedule
            schedule = fits

    def _shrunk(self, caps: _Caps) -> Iterator[Schedule]:
        """The schedules with one side of one block shorter."""
        for block, (_, (height, width)) in enumerate(self._grids(caps)):
            for grid in (self._smaller(height), width), (height, self._smaller(width)):
                if grid != (height, width):
                    yield self._schedule({**caps, block: grid})

    def _grown(self, caps: _Caps) -> Iterator[Schedule]:
        """The schedules with one side of one site longer."""
        grids = self._grids(caps)
        for block in caps:
            before, (height, width) = grids[block]
            for grid in (self._larger(height), width), (height, self._larger(width)):
                cap = _smaller_of(grid, before)
                if cap != (height, width):
                    yield self._schedule({**caps, block: cap})

    def _moved(self, caps: _Caps) -> Iterator[Schedule]:
        """The schedules with one site a block earlier or later, within its stage."""
        stages = self._stages
        for block, grid in caps.items():
            rest = {other: cap for other, cap in caps.items() if other != block}
            for other in (block - 1, block + 1):
                if 0 <= other < len(stages) and stages[other] == stages[block]:
                    yield self._schedule({**rest, other: rest.get(other, grid)})

    def _grids(self, caps: _Caps) -> list[tuple[Grid, Grid]]:
        """The grids before and after each block."""
        found: list[tuple[Grid, Grid]] = []
        grid = self._entry
        for block, stage in enumerate(self._stages):
            grid = halve(grid) if block and stage != self._stages[block - 1] else grid
            after = _smaller_of(grid, caps.get(block, grid))
            found.append((grid, after))
            grid = after
        return found

    def _schedule(self, caps: _Caps) -> Schedule:
        """The sites at which something shrinks."""
        grids = enumerate(self._grids(caps))
        return tuple(Setting(block, after) for block, (before, after) in grids if after != before)

    def _smaller(self, side: int) -> int:
        """The next smaller side that suits the attention windows."""
        step = self._multiple
        return (side - 1) // step * step if side > step else max(1, side - 1)

    def _larger(self, side: int) -> int:
        """The next larger one."""
        step = self._multiple
        return side // step * step + step if side >= step else side + 1

    def _of_share(self, grid: Grid, share: float) -> Grid:
        """A grid with about that share of the tokens; the longer side is shortened first."""
        height, width = grid
        while height * width > share * _area(grid) and height * width > 1:
            if width >= height:
                width = self._smaller(width)
            else:
                height = self._smaller(height)
        return height, width


def _area(grid: Grid) -> int:
    return grid[0] * grid[1]


def _smaller_of(grid: Grid, cap: Grid) -> Grid:
    return min(grid[0], cap[0]), min(grid[1], cap[1])


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

"""How much a network minds merging at each block: the map that the search starts from.

The divergences of single blocks nearly add up, so they tell which schedules are worth trying.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ltm.calibration.costs import SequenceCost
from ltm.calibration.schedules import Schedule, Setting

LEAVING = (0.1, 0.25, 0.5, 0.75, 0.9)
"""The shares of tokens whose leaving is tried at every block."""

_TINY = 1e-9


@dataclass(frozen=True)
class Sensitivity:
    """The divergence that merging at one block alone makes, by the tokens it leaves."""

    num_in: int
    curves: Mapping[int, Sequence[tuple[int, float]]]
    """By block: (tokens that leave, divergence), ascending."""

    def at(self, block: int, count: int) -> float:
        """The divergence of leaving `count` tokens at a block: a power law between the points."""
        leaving = self.num_in - count
        if leaving <= 0:
            return 0.0
        points = [(n, max(d, _TINY)) for n, d in self.curves[block]]
        if leaving <= points[0][0] or len(points) == 1:
            return points[0][1] * (leaving / points[0][0]) ** 2
        place = next((i for i, (n, _) in enumerate(points) if n >= leaving), len(points) - 1)
        (n0, d0), (n1, d1) = points[place - 1], points[place]
        slope = math.log(d1 / d0) / math.log(n1 / n0)
        return d1 * (leaving / n1) ** slope

    def of(self, schedule: Schedule) -> float:
        """What sites add up to, each beyond what the tokens before it have cost already."""
        total, before = 0.0, self.num_in
        for setting in schedule:
            assert isinstance(setting.count, int)
            total += self.step(setting.block, before, setting.count)
            before = setting.count
        return total

    def step(self, block: int, before: int, count: int) -> float:
        """Going on from `before` tokens to `count` at a block."""
        return max(0.0, self.at(block, count) - self.at(block, before))


class Programme:
    """Chooses sites and counts by the sensitivities: a shortest path through the blocks.

    A price on multiply-adds makes the choice separable, block by block; the price is raised until
    the budget is met.
    """

    def __init__(
        self, sensitivity: Sensitivity, cost: SequenceCost, levels: Sequence[int], num_sites: int
    ) -> None:
        self.depth, self.num_sites, self.usual = cost.depth, num_sites, cost.usual
        self.levels = [cost.num_in, *sorted(set(levels) - {cost.num_in}, reverse=True)]
        pairs = [[(n, p) for p in self.levels] for n in self.levels]
        self.fixed = cost(()) - cost.depth * cost.block(cost.num_in, cost.num_in)
        self.staying = _table([[cost.block(n, n) for n in self.levels]])[0]
        self.merging = _table([[cost.block(n, p, 0) for n, p in row] for row in pairs])
        harms = [
            [
                [sensitivity.step(block, n, p) if p < n else math.inf for n, p in row]
                for row in pairs
            ]
            for block in range(self.depth)
        ]
        self.harms = torch.stack([_table(harm) for harm in harms])

    def best(self, budget: float, num_sites: int) -> Schedule | None:
        """The schedule of exactly so many sites that should do least harm within the budget.

        None where the budget cannot be met.
        """
        low, high, found = 1e-9, 1e-6, None
        while found is None:
            found = self._within(budget, num_sites, high)
            if high > 1e9:
                return None
            low, high = (low, high) if found is not None else (high, 4 * high)
        while high > 1.02 * low:
            price = math.sqrt(low * high)
            path = self._within(budget, num_sites, price)
            found, low, high = (found, price, high) if path is None else (path, low, price)
        return found

    def _within(self, budget: float, num_sites: int, price: float) -> Schedule | None:
        """The shortest path at a price, if it keeps to the budget."""
        states, steps = self._shortest(price)
        level = int(states[num_sites].argmin())
        if not math.isfinite(float(states[num_sites, level])):
            return None
        sites: list[Setting] = []
        used, cost = num_sites, self.fixed
        for block in reversed(range(self.depth)):
            before = int(steps[block][used, level])
            if before >= 0:
                sites.append(Setting(block, self.levels[level], self.usual))
                cost += float(self.merging[before, level])
                used, level = used - 1, before
            else:
                cost += float(self.staying[level])
        return tuple(reversed(sites)) if cost <= budget + 1e-9 else None

    def _shortest(self, price: float) -> tuple[Tensor, list[Tensor]]:
        """Values by (sites used, level) after the last block, and the level before each merge."""
        states = torch.full((self.num_sites + 1, len(self.levels)), math.inf, dtype=torch.float64)
        states[0, 0] = 0.0
        steps: list[Tensor] = []
        for harm in self.harms:
            stay = states + price * self.staying
            paths = states[:-1, :, None] + harm + price * self.merging
            merged, before = paths.min(dim=1)
            step = torch.full(states.shape, -1)
            better = merged < stay[1:]
            step[1:] = torch.where(better, before, step[1:])
            states = stay
            states[1:] = torch.where(better, merged, stay[1:])
            steps.append(step)
        return states, steps


def _table(values: list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)

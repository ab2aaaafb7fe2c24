"""Schedules of sequence networks (ViT): sites, token counts, and the method's own choices.

How much a network minds merging at each block is the map that the search starts from: the
divergences of single blocks nearly add up, so they tell which schedules are worth trying.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ltm.calibration.costs import SequenceCost
from ltm.calibration.schedules import Schedule, Setting
from ltm.calibration.search import Search

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


HOPELESS = 0.5
"""A divergence beyond which a block is not asked to give up still more tokens."""

_PROBE = 0.25
"""The share of tokens whose leaving tells the choices of a block apart."""

_WORTH_TRYING = 1.25
"""Choices that did worse than the usual one by more than this factor are left out."""

HARMLESS = 1e-7
"""A divergence that makes no difference, nor do choices then.

Where the head reads the class token alone, the last block's patches are of no use once they were
attended to: letting them go there is harmless.
"""

_CLOSE = 0.01
"""How closely a start is fitted to the budget; the search does the rest."""


def probe_blocks(search: Search, cost: SequenceCost) -> Sensitivity:
    """Ask every block how much it minds that tokens leave."""
    num_in = cost.num_in
    curves: dict[int, list[tuple[int, float]]] = {}
    for block in range(cost.depth):
        curves[block] = []
        for share in LEAVING:
            leaving = max(1, min(num_in - 1, round(share * num_in)))
            divergence = search.probe((Setting(block, num_in - leaving, cost.usual),))
            curves[block].append((leaving, divergence))
            if divergence > HOPELESS:
                break
    return Sensitivity(num_in, curves)


def largest_within(
    plan: Callable[[float], Schedule | None], cost: SequenceCost, budget: float
) -> Schedule | None:
    """Of schedules that are planned for some share, the largest whose own cost is in the budget.

    Small shares may have no plan: larger ones have fewer sites.
    """
    found: Schedule | None = None
    low, high = budget, 1.0
    while high - low > _CLOSE:
        middle = (low + high) / 2
        schedule = plan(middle)
        if schedule is None or cost(schedule) <= budget:
            found, low = schedule or found, middle
        else:
            high = middle
    return found


class Variants:
    """How good a method's choices are at each block, as factors of the usual one's divergence.

    Only blocks that are asked for are probed.
    """

    def __init__(self, search: Search, num_in: int, choices: Sequence[Hashable]) -> None:
        self._search, self._num_in = search, num_in
        self.usual, *self._others = choices
        self._known: dict[int, dict[Hashable, float]] = {}

    def at(self, block: int) -> dict[Hashable, float]:
        """The factors at a block; only the usual one where nothing makes a difference."""
        if block not in self._known:
            count = self._num_in - max(1, round(_PROBE * self._num_in))
            usual = self._search.probe((Setting(block, count, self.usual),))
            self._known[block] = {self.usual: 1.0}
            for choice in self._others if usual > HARMLESS else ():
                divergence = self._search.probe((Setting(block, count, choice),))
                self._known[block][choice] = divergence / usual
        return self._known[block]


class SequenceSpace:
    """Schedules of at most so many sites whose counts are among some levels."""

    def __init__(
        self,
        cost: SequenceCost,
        budget: float,
        *,
        levels: Sequence[int],
        num_sites: int,
        sensitivity: Sensitivity,
        variants: Variants,
    ) -> None:
        self.cost, self.budget, self.num_sites = cost, budget, num_sites
        self.levels = sorted(level for level in levels if level < cost.num_in)
        self.sensitivity, self.variants = sensitivity, variants

    def starts(self) -> list[Schedule]:
        """What the sensitivities suggest, for each number of sites."""
        programme = Programme(self.sensitivity, self.cost, self.levels, self.num_sites)
        found = [
            programme.best(self.budget, num_sites) for num_sites in range(self.num_sites, 0, -1)
        ]
        return [self._fitted(schedule) or schedule for schedule in found if schedule]

    def neighbours(self, schedule: Schedule) -> Iterator[Schedule]:
        """Move tokens from site to site, move, add or drop a site, or merge another way."""
        found = dict.fromkeys(
            (*self._shifts(schedule), *self._moves(schedule), *self._swaps(schedule))
        )
        found.pop(schedule, None)
        yield from sorted(found, key=self.expected)

    def expected(self, schedule: Schedule) -> float:
        """The divergence that the sensitivities add up to."""
        total, before = 0.0, self.cost.num_in
        for setting in schedule:
            assert isinstance(setting.count, int)
            step = self.sensitivity.step(setting.block, before, setting.count)
            if setting.choice != self.variants.usual:
                step *= self.variants.at(setting.block).get(setting.choice, 1.0)
            total += step
            before = setting.count
        return total

    def _shifts(self, schedule: Schedule) -> Iterator[Schedule]:
        """One site leaves more or fewer tokens, another makes up for it."""
        for index, setting in enumerate(schedule):
            place = bisect_left(self.levels, _count(setting))
            for step in (-4, -2, -1, 1, 2, 4):
                if not 0 <= place + step < len(self.levels):
                    continue
                changed = _replaced(schedule, index, count=self.levels[place + step])
                for other in range(len(schedule)):
                    fitted = self._fit(changed, other) if other != index else None
                    if fitted is not None:
                        yield fitted

    def _moves(self, schedule: Schedule) -> Iterator[Schedule]:
        """A site moves by a block or two, appears or disappears; the best-placed one adapts."""
        taken = {setting.block for setting in schedule}
        candidates: list[Schedule] = []
        for index, setting in enumerate(schedule):
            candidates += [
                _replaced(schedule, index, block=block)
                for block in range(setting.block - 2, setting.block + 3)
                if 0 <= block < self.cost.depth and block not in taken
            ]
            candidates.append((*schedule[:index], *schedule[index + 1 :]))
        if len(schedule) < self.num_sites:
            candidates += [
                added
                for block in range(self.cost.depth)
                if block not in taken and (added := self._added(schedule, block)) is not None
            ]
        for candidate in candidates:
            fitted = self._fitted(tuple(sorted(candidate, key=lambda s: s.block)))
            if fitted is not None:
                yield fitted

    def _added(self, schedule: Schedule, block: int) -> Schedule | None:
        """One site more, half way between its neighbours."""
        before = [_count(s) for s in schedule if s.block < block]
        after = [_count(s) for s in schedule if s.block > block]
        most, least = min(before, default=self.cost.num_in), max(after, default=0)
        between = [level for level in self.levels if least < level < most]
        if not between:
            return None
        return (*schedule, Setting(block, between[len(between) // 2], self.variants.usual))

    def _swaps(self, schedule: Schedule) -> Iterator[Schedule]:
        """A site merges another way, if that is any good there."""
        for index, setting in enumerate(schedule):
            for choice, factor in self.variants.at(setting.block).items():
                if factor <= _WORTH_TRYING:
                    changed = _replaced(schedule, index, choice=choice)
                    fitted = self._fit(changed, index)
                    if fitted is not None:
                        yield fitted

    def _fitted(self, schedule: Schedule) -> Schedule | None:
        """Let the site that is best for it make up for what is left of the budget, or missing."""
        fits = [self._fit(schedule, index) for index in range(len(schedule))]
        return min((fit for fit in fits if fit is not None), key=self.expected, default=None)

    def _fit(self, schedule: Schedule, index: int) -> Schedule | None:
        """Let one site keep as many tokens as the budget allows."""
        counts = [self.cost.num_in, *(_count(setting) for setting in schedule), 0]
        low, high = counts[index + 2], counts[index]
        allowed = [level for level in self.levels if low < level < high]
        others = [*counts[1 : index + 1], *counts[index + 2 : -1]]
        if any(later >= earlier for earlier, later in itertools.pairwise(others)):
            return None
        fits: Schedule | None = None
        first, last = 0, len(allowed) - 1
        while first <= last:
            middle = (first + last) // 2
            candidate = _replaced(schedule, index, count=allowed[middle])
            if self.cost(candidate) <= self.budget:
                fits, first = candidate, middle + 1
            else:
                last = middle - 1
        return fits


def _count(setting: Setting) -> int:
    assert isinstance(setting.count, int)
    return setting.count


def _replaced(schedule: Schedule, index: int, **changes: object) -> Schedule:
    changed = dataclasses.replace(schedule[index], **changes)  # pyright: ignore[reportArgumentType]
    return (*schedule[:index], changed, *schedule[index + 1 :])


def token_levels(num_in: int, num_prefix: int, multiple: int | None) -> list[int]:
    """The token counts, prefix excluded, that suit the hardware."""
    if multiple is None:
        multiple = 8 if num_in >= 64 else 1
    return [n for n in range(1, num_in) if (n + num_prefix) % multiple == 0]

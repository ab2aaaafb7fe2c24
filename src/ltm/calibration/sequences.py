"""Schedules of sequence networks (ViT): sites, token counts, and the method's own choices.

The search starts from the sensitivities: how far outputs diverge if a single block merges. The
divergences of single blocks nearly add up, so they tell which schedules are worth trying.

Costs are a polynomial: attention costs `a n + b n^2` multiply-adds in the tokens that enter a
block, the MLP `c n` in those that leave the merge, and a merge itself `d + e n + f n^2`. The latter
depends on the method: alternate matching, where at most half of the tokens leave, compares a
quarter of the pairs. The coefficients are fitted to a few counts on `meta`, and checked on others.

Letters: n tokens with their prefix.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ltm.adapters.planning import Planner
from ltm.calibration.search import CountedCost, Schedule, Search, Setting, Space
from ltm.methods.base import MethodConfig

_TOLERANCE = 1e-9
"""How far a fitted cost may be from the counted one, as a share of the original's."""

_LEAVING = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Shares of the tokens to remove at a block when its sensitivity is measured."""

_HOPELESS = 0.5
"""Beyond this divergence, removing more tokens at a block is not tried."""

_PROBE = 0.25
"""The share of tokens to remove at a block when the choices there are compared."""

_WORTH_TRYING = 1.25
"""Choices that are worse than the usual one by more than this factor are not tried."""

_HARMLESS = 1e-7
"""A divergence that counts as none; choices are then not compared.

If the head reads the class token alone, the last block's patches are not needed once they were
attended to: removing them there is harmless.
"""

_CLOSE = 0.01
"""How closely a start is fitted to the budget; the search does the rest."""

_TINY = 1e-9


class SequenceCost:
    """The cost of a schedule, by the polynomial of a network on one sequence.

    If that does not fit what is counted, every schedule is counted, which is far slower.
    """

    def __init__(self, planner: Planner, config: MethodConfig) -> None:
        (run,) = planner.layout.runs
        self.num_in, self.depth = run.num_in, len(run.blocks)
        self.num_prefix = planner.layout.num_prefix
        self._counted = CountedCost(planner, config)
        self.choices: tuple[Hashable, ...] = config.choices
        self.usual = self.choices[0]
        self._kinds = self._kinds_of(self.choices)
        self._num_kinds = 1 + max(self._kinds.values())
        self._alternates = False
        if not self._fit():
            self._alternates = True
            self._fit()

    def _fit(self) -> bool:
        """Fit the coefficients; returns whether they give the counted costs."""
        self._known: dict[tuple[int, int, int | None], float] = {}
        samples = list(self._samples())
        table = torch.stack([self._terms(schedule) for schedule in samples])
        scale = table.amax(dim=0).clamp_min(1)
        shares = torch.tensor([self._counted(s) for s in samples], dtype=torch.float64)
        solution = torch.linalg.lstsq(table / scale, shares, driver="gelsd").solution
        self._values: list[float] = (solution / scale).tolist()
        known = (*samples, self._held_out(), *map(self._few_leave, self.choices))
        self.exact = all(abs(self._fitted(s) - self._counted(s)) < _TOLERANCE for s in known)
        return self.exact

    def _kinds_of(self, choices: Sequence[Hashable]) -> dict[Hashable, int]:
        """The kind of every choice; choices of one kind cost the same."""
        kinds: dict[Hashable, int] = {}
        costs: list[float] = []
        for choice in choices:
            cost = self._counted(self._few_leave(choice))
            if cost not in costs:
                costs.append(cost)
            kinds[choice] = costs.index(cost)
        return kinds

    def __call__(self, schedule: Schedule) -> float:
        return self._fitted(schedule) if self.exact else self._counted(schedule)

    def block(self, before: int, after: int, kind: int | None = None) -> float:
        """One block: attention on the tokens before, the MLP on those after, the merge between."""
        key = before, after, kind
        if key not in self._known:
            self._known[key] = sum(self._values[i] * term for i, term in self._block_terms(*key))
        return self._known[key]

    def _block_terms(self, before: int, after: int, kind: int | None) -> list[tuple[int, int]]:
        """The terms of a block, each with the place of its coefficient."""
        n, p = before + self.num_prefix, after + self.num_prefix
        terms = [(1, n), (2, n * n), (3, p)]
        if kind is None:
            return terms
        # Alternate matching compares even patches with odd ones, unless more than half leave.
        half = before // 2
        alternates = self._alternates and before - after <= half
        start = 4 + 3 * (kind + alternates * self._num_kinds)
        compared = half * (before - half) if alternates else n * n
        return [*terms, (start, 1), (start + 1, n), (start + 2, compared)]

    def _fitted(self, schedule: Schedule) -> float:
        return self._values[0] + sum(self.block(*step) for step in self._steps(schedule))

    def _steps(self, schedule: Schedule) -> Iterator[tuple[int, int, int | None]]:
        """Each block: the tokens before and after it, and the kind of its merge."""
        counts = {s.block: _count(s) for s in schedule}
        kinds = {s.block: self._kinds[s.choice] for s in schedule}
        left = self.num_in
        for block in range(self.depth):
            after = counts.get(block, left)
            yield left, after, kinds.get(block)
            left = after

    def _terms(self, schedule: Schedule) -> Tensor:
        """The sums of all blocks' terms, one for each coefficient."""
        terms = torch.zeros(4 + 3 * len(self._ways()), dtype=torch.float64)
        terms[0] = 1
        for step in self._steps(schedule):
            for place, term in self._block_terms(*step):
                terms[place] += term
        return terms

    def _ways(self) -> list[tuple[Hashable, int]]:
        """All merges that cost differently: a choice of each kind, and the eighths of tokens kept.

        The cheapest is last.
        """
        firsts = {kind: choice for choice, kind in reversed(self._kinds.items())}
        choices = [firsts[kind] for kind in range(self._num_kinds)]
        apart = choices if self._alternates else []
        return [*((choice, 3) for choice in choices), *((choice, 7) for choice in apart)]

    def _samples(self) -> Iterator[Schedule]:
        """Schedules that determine the coefficients: every way at three numbers of tokens."""
        last, (lead, _) = self.depth - 1, self._ways()[self._num_kinds - 1]
        yield ()
        yield self._few_leave(lead)
        for way in self._ways():
            yield (self._placed(way, last, self.num_in),)
        leads = (4, 5, 6) if self._alternates else (4, 6)
        for eighths in leads if last > 0 else ():
            first = self._placed((lead, eighths), 0, self.num_in)
            yield (first,)
            for way in self._ways():
                yield first, self._placed(way, last, _count(first))

    def _held_out(self) -> Schedule:
        """A schedule that is no sample, with all ways for which there are blocks and tokens."""
        sites: list[Setting] = []
        ways, left = self._ways()[-self.depth :], self.num_in
        for index, way in enumerate(reversed(ways)):
            site = self._placed(way, index * self.depth // len(ways), left)
            if site.count == left:
                break
            sites.append(site)
            left = _count(site)
        return tuple(sites)

    def _few_leave(self, choice: Hashable) -> Schedule:
        """An eighth of the tokens leaves at the last block, as suits alternate matching."""
        return (self._placed((choice, 7), self.depth - 1, self.num_in),)

    def _placed(self, way: tuple[Hashable, int], block: int, before: int) -> Setting:
        choice, eighths = way
        return Setting(block, max(1, before * eighths // 8), choice)


@dataclass(frozen=True)
class _Sensitivity:
    """The divergence from merging at one block alone, by the number of tokens left."""

    num_in: int
    curves: Mapping[int, Sequence[tuple[int, float]]]
    """By block: (tokens that leave, divergence), ascending."""

    def at(self, block: int, count: int) -> float:
        """The divergence if a block leaves `count` tokens, by a power law between the points."""
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

    def step(self, block: int, before: int, count: int) -> float:
        """The divergence that a block adds if it merges `before` tokens into `count`."""
        return max(0.0, self.at(block, count) - self.at(block, before))


class _Programme:
    """Chooses sites and counts by the sensitivities, as a shortest path through the blocks.

    The length of a path is its divergence plus a price for its multiply-adds. The price is raised
    until the path keeps to the budget.
    """

    def __init__(
        self, sensitivity: _Sensitivity, cost: SequenceCost, levels: Sequence[int], num_sites: int
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
        """The schedule of exactly so many sites with the least divergence within the budget.

        None if the budget cannot be met.
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
        """The shortest path at a price; None if it exceeds the budget."""
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


class SequenceSpace(Space):
    """Schedules of a limited number of sites, with counts from a list of levels."""

    cost: SequenceCost

    def __init__(self, search: Search, num_sites: int, multiple: int | None) -> None:
        super().__init__(search)
        self.num_sites = num_sites
        self.levels = token_levels(self.cost.num_in, self.cost.num_prefix, multiple)
        """The token counts to choose from."""
        if not self.levels:
            raise ValueError(
                f"multiple: got {multiple}; the network has "
                f"{self.cost.num_in + self.cost.num_prefix} tokens."
            )
        self._known_factors: dict[int, dict[Hashable, float]] = {}

    @property
    def floor(self) -> float:
        return self.cost((Setting(0, self.levels[0], self.cost.usual),))

    def starts(self) -> list[Schedule]:
        """The schedules that the sensitivities suggest, one for each number of sites."""
        programme = _Programme(self._sensitivity, self.cost, self.levels, self.num_sites)
        found = [
            programme.best(self.budget, num_sites) for num_sites in range(self.num_sites, 0, -1)
        ]
        return [self._fitted(schedule) or schedule for schedule in found if schedule]

    def suited(self, schedule: Schedule) -> Schedule | None:
        """The schedule with counts rounded down to the levels; None if it has too many sites."""
        sites: list[Setting] = []
        for setting in schedule:
            below = [n for n in self.levels if n <= _count(setting)]
            if below and (not sites or below[-1] != sites[-1].count):
                sites.append(dataclasses.replace(setting, count=below[-1]))
        return tuple(sites) if len(sites) <= self.num_sites else None

    def without_last(self) -> list[Schedule]:
        last = Setting(self.cost.depth - 1, self.levels[0], self.cost.usual)
        if self.search.probe((last,)) > _HARMLESS:
            return []
        found: list[Schedule] = []
        low, high = self.budget, 1.0
        while high - low > _CLOSE:
            middle = (low + high) / 2
            sites = tuple(s for s in self.default(middle) or () if s.block < last.block)
            suited = self.suited(sites)
            # A small share may have no schedule of few enough sites; a larger one may.
            if not suited or suited[-1].count == last.count or len(suited) >= self.num_sites:
                low = middle
            elif self.cost((*suited, last)) <= self.budget:
                found, low = [(*suited, last)], middle
            else:
                high = middle
        return found

    @cached_property
    def _sensitivity(self) -> _Sensitivity:
        """The sensitivity of every block, measured."""
        num_in = self.cost.num_in
        curves: dict[int, list[tuple[int, float]]] = {}
        for block in range(self.cost.depth):
            curves[block] = []
            for share in _LEAVING:
                leaving = max(1, min(num_in - 1, round(share * num_in)))
                divergence = self._probe(block, leaving, self.cost.usual)
                curves[block].append((leaving, divergence))
                if divergence > _HOPELESS:
                    break
        return _Sensitivity(num_in, curves)

    def _factors(self, block: int) -> dict[Hashable, float]:
        """The divergence of each choice at a block, as a factor of the usual choice's.

        If merging there is harmless, the usual choice is the only one.
        """
        if block not in self._known_factors:
            leaving = max(1, round(_PROBE * self.cost.num_in))
            usual = self._probe(block, leaving, self.cost.usual)
            factors = self._known_factors[block] = {self.cost.usual: 1.0}
            for choice in self.cost.choices[1:] if usual > _HARMLESS else ():
                factors[choice] = self._probe(block, leaving, choice) / usual
        return self._known_factors[block]

    def _probe(self, block: int, leaving: int, choice: Hashable) -> float:
        return self.search.probe((Setting(block, self.cost.num_in - leaving, choice),))

    def neighbours(self, schedule: Schedule) -> Iterator[Schedule]:
        """Move tokens from site to site, move, add or drop a site, or merge another way."""
        found = dict.fromkeys(
            (*self._shifts(schedule), *self._moves(schedule), *self._swaps(schedule))
        )
        found.pop(schedule, None)
        yield from sorted(found, key=self._expected)

    def _expected(self, schedule: Schedule) -> float:
        """The sum of the divergences of the single sites."""
        total, before = 0.0, self.cost.num_in
        for setting in schedule:
            step = self._sensitivity.step(setting.block, before, _count(setting))
            if setting.choice != self.cost.usual:
                step *= self._factors(setting.block).get(setting.choice, 1.0)
            total += step
            before = _count(setting)
        return total

    def _shifts(self, schedule: Schedule) -> Iterator[Schedule]:
        """One site leaves more or fewer tokens, and another one compensates."""
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
        """A site moves by a block or two, is added or dropped; the best suited one compensates."""
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
        """The schedule with one more site, with a count half way between its neighbours'."""
        before = [_count(s) for s in schedule if s.block < block]
        after = [_count(s) for s in schedule if s.block > block]
        most, least = min(before, default=self.cost.num_in), max(after, default=0)
        between = [level for level in self.levels if least < level < most]
        if not between:
            return None
        return (*schedule, Setting(block, between[len(between) // 2], self.cost.usual))

    def _swaps(self, schedule: Schedule) -> Iterator[Schedule]:
        """A site merges another way, if that is worth trying there."""
        for index, setting in enumerate(schedule):
            for choice, factor in self._factors(setting.block).items():
                if factor <= _WORTH_TRYING:
                    changed = _replaced(schedule, index, choice=choice)
                    fitted = self._fit(changed, index)
                    if fitted is not None:
                        yield fitted

    def _fitted(self, schedule: Schedule) -> Schedule | None:
        """Change the count of one site so that the budget is just met; the best such schedule."""
        fits = [self._fit(schedule, index) for index in range(len(schedule))]
        return min((fit for fit in fits if fit is not None), key=self._expected, default=None)

    def _fit(self, schedule: Schedule, index: int) -> Schedule | None:
        """Give one site the largest count that the budget allows."""
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
    """The token counts, prefix excluded, to choose from: with prefix, multiples of a number."""
    if multiple is None:
        multiple = 8 if num_in >= 64 else 1
    return [n for n in range(1, num_in) if (n + num_prefix) % multiple == 0]

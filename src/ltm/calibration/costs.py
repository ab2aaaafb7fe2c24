"""What schedules cost, without counting each anew.

On a sequence, attention costs `a n + b n^2` multiply-adds in the tokens that enter a block, the MLP
`c n` in those that leave the merge, and a merge itself `d + e n + f n^2`, depending on what it
does: an alternate matching of which half leave at most compares a quarter of the pairs. The
coefficients are fitted to a few counts on `meta`, and tried on another; grids are counted one by
one.

Letters: n tokens with their prefix.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ltm.adapters.planning import Planner
from ltm.calibration.schedules import Schedule, Setting, config_of, counts_of
from ltm.methods.base import MethodConfig

_TOLERANCE = 1e-9
"""How far, as a share, a fit may be from what is counted."""


class Cost(Protocol):
    """Multiply-adds of a schedule, as a share of the original's."""

    def __call__(self, schedule: Schedule) -> float: ...


class CountedCost:
    """Every schedule is counted on `meta`, once."""

    def __init__(self, planner: Planner, config: MethodConfig) -> None:
        self._planner, self._config = planner, config
        self._known: dict[Schedule, float] = {}

    def __call__(self, schedule: Schedule) -> float:
        if schedule not in self._known:
            planner, before = self._planner, self._planner.config
            planner.config = config_of(schedule, self._config)
            try:
                macs = planner.cost(counts_of(schedule))
            finally:
                planner.config = before
            self._known[schedule] = macs / planner.macs_before
        return self._known[schedule]


class SequenceCost:
    """The fitted polynomial of a network on one sequence, block by block.

    Where it does not give what is counted, schedules are counted: far slower, but right.
    """

    def __init__(self, planner: Planner, config: MethodConfig) -> None:
        (run,) = planner.layout.runs
        self.num_in, self.depth = run.num_in, len(run.blocks)
        self.num_prefix = planner.layout.num_prefix
        self._counted = CountedCost(planner, config)
        self.usual: Hashable = config.choices[0]
        self._kinds = self._kinds_of(config.choices)
        self._alternates = False
        if not self._fit():
            self._alternates = True
            self._fit()

    def _fit(self) -> bool:
        """Find the coefficients; whether they give what is counted."""
        samples = list(self._samples())
        table = torch.stack([self._terms(schedule) for schedule in samples])
        scale = table.amax(dim=0).clamp_min(1)
        shares = torch.tensor([self._counted(s) for s in samples], dtype=torch.float64)
        solution = torch.linalg.lstsq(table / scale, shares, driver="gelsd").solution
        self._values: list[float] = (solution / scale).tolist()
        known = (*samples, self._held_out())
        self.exact = all(abs(self._fitted(s) - self._counted(s)) < _TOLERANCE for s in known)
        return self.exact

    def _kinds_of(self, choices: Sequence[Hashable]) -> dict[Hashable, int]:
        """The kind of every choice: choices whose merges cost the same are of one kind."""
        kinds: dict[Hashable, int] = {}
        costs: list[float] = []
        for choice in choices:
            cost = self._counted((self._placed((choice, 7), self.depth - 1, self.num_in),))
            if cost not in costs:
                costs.append(cost)
            kinds[choice] = costs.index(cost)
        return kinds

    def __call__(self, schedule: Schedule) -> float:
        return self._fitted(schedule) if self.exact else self._counted(schedule)

    def block(self, before: int, after: int, kind: int | None = None) -> float:
        """One block: attention on the tokens before, the MLP on those after, the merge between."""
        values = self._values
        n, p = before + self.num_prefix, after + self.num_prefix
        share = values[1] * n + values[2] * n * n + values[3] * p
        if kind is not None:
            start, compared = self._merge(before, after, kind)
            share += values[start] + values[start + 1] * n + values[start + 2] * compared
        return share

    def _fitted(self, schedule: Schedule) -> float:
        return self._values[0] + sum(self.block(*step) for step in self._steps(schedule))

    def _steps(self, schedule: Schedule) -> Iterator[tuple[int, int, int | None]]:
        """Of every block: the tokens before and after it, and the kind of its merge."""
        counts, kinds = counts_of(schedule), {s.block: self._kinds[s.choice] for s in schedule}
        left = self.num_in
        for block in range(self.depth):
            after = counts.get(block, left)
            assert isinstance(after, int)
            yield left, after, kinds.get(block)
            left = after

    def _merge(self, before: int, after: int, kind: int) -> tuple[int, int]:
        """Where the coefficients of a merge start, and how many pairs of tokens it compares.

        An alternate matching compares even patches with odd ones, until more than half leave.
        """
        if self._alternates and before - after <= before // 2:
            return 4 + 3 * (self._num_kinds + kind), (before // 2) * (before - before // 2)
        return 4 + 3 * kind, (before + self.num_prefix) ** 2

    @property
    def _num_kinds(self) -> int:
        return 1 + max(self._kinds.values())

    def _terms(self, schedule: Schedule) -> Tensor:
        """What each coefficient is multiplied with."""
        terms = torch.zeros(4 + 3 * len(self._ways()), dtype=torch.float64)
        terms[0] = 1
        for before, after, kind in self._steps(schedule):
            n, p = before + self.num_prefix, after + self.num_prefix
            terms[1:4] += torch.tensor([n, n * n, p], dtype=torch.float64)
            if kind is not None:
                start, compared = self._merge(before, after, kind)
                terms[start : start + 3] += torch.tensor([1, n, compared], dtype=torch.float64)
        return terms

    def _ways(self) -> list[tuple[Hashable, int]]:
        """All that costs differently: a choice of each kind, and the eighths of tokens that stay.

        The cheapest is last.
        """
        firsts = {kind: choice for choice, kind in reversed(self._kinds.items())}
        choices = [firsts[kind] for kind in range(self._num_kinds)]
        apart = choices if self._alternates else []
        return [*((choice, 3) for choice in choices), *((choice, 7) for choice in apart)]

    def _samples(self) -> Iterator[Schedule]:
        """Schedules that tell the coefficients apart: every way at three numbers of tokens."""
        last, (lead, _) = self.depth - 1, self._ways()[self._num_kinds - 1]
        yield ()
        yield (self._placed((lead, 7), last, self.num_in),)
        for way in self._ways():
            yield (self._placed(way, last, self.num_in),)
        leads = (4, 5, 6) if self._alternates else (4, 6)
        for eighths in leads if last > 0 else ():
            first = self._placed((lead, eighths), 0, self.num_in)
            assert isinstance(first.count, int)
            yield (first,)
            for way in self._ways():
                yield first, self._placed(way, last, first.count)

    def _held_out(self) -> Schedule:
        """A schedule of all ways, as far as there are blocks and tokens, unlike the samples."""
        sites: list[Setting] = []
        ways, left = self._ways()[-self.depth :], self.num_in
        for index, way in enumerate(reversed(ways)):
            site = self._placed(way, index * self.depth // len(ways), left)
            assert isinstance(site.count, int)
            if site.count == left:
                break
            sites.append(site)
            left = site.count
        return tuple(sites)

    def _placed(self, way: tuple[Hashable, int], block: int, before: int) -> Setting:
        choice, eighths = way
        return Setting(block, max(1, before * eighths // 8), choice)

"""What schedules cost, without counting each anew.

On a sequence, attention costs `a n + b n^2` multiply-adds in the tokens that enter a block, the MLP
`c n` in those that leave the merge, and a merge itself `d + e n + f n^2`, depending on what it
does. The coefficients are fitted to a few counts on `meta`, exactly; grids are counted one by one.

Letters: n tokens with their prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ltm.adapters.planning import Planner
from ltm.calibration.schedules import Schedule, Setting, config_of, counts_of
from ltm.methods.ltm import LTM

KINDS: tuple[Setting, ...] = (
    Setting(0, 0, "norm", 1.0),
    Setting(0, 0, "norm", 0.0),
    Setting(0, 0, "prune_unimportant", 0.0),
)
"""One of each kind of merge that costs differently."""


class Cost(Protocol):
    """Multiply-adds of a schedule, as a share of the original's."""

    def __call__(self, schedule: Schedule) -> float: ...


def kind_of(setting: Setting) -> int:
    """Which of `KINDS` a setting costs like."""
    if setting.operator == "prune_unimportant":
        return 2
    return 0 if setting.protection > 0 else 1


class CountedCost:
    """Every schedule is counted on `meta`, once."""

    def __init__(self, planner: Planner, config: LTM) -> None:
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
    """The fitted polynomial of a network on one sequence, block by block."""

    def __init__(self, planner: Planner, config: LTM) -> None:
        (run,) = planner.layout.runs
        self.num_in, self.depth = run.num_in, len(run.blocks)
        self.num_prefix = planner.layout.num_prefix
        counted = CountedCost(planner, config)
        samples = list(self._samples())
        table = torch.stack([self._terms(schedule) for schedule in samples])
        scale = table.amax(dim=0).clamp_min(1)
        shares = torch.tensor([counted(schedule) for schedule in samples], dtype=torch.float64)
        solution = torch.linalg.lstsq(table / scale, shares, driver="gelsd").solution
        self._values: list[float] = (solution / scale).tolist()

    def __call__(self, schedule: Schedule) -> float:
        counts, kinds = counts_of(schedule), {s.block: kind_of(s) for s in schedule}
        total, left = self._values[0], self.num_in
        for block in range(self.depth):
            after = counts.get(block, left)
            assert isinstance(after, int)
            total += self.block(left, after, kinds.get(block))
            left = after
        return total

    def block(self, before: int, after: int, kind: int | None = None) -> float:
        """One block: attention on the tokens before, the MLP on those after, the merge between."""
        values = self._values
        n, p = before + self.num_prefix, after + self.num_prefix
        share = values[1] * n + values[2] * n * n + values[3] * p
        if kind is not None:
            constant, linear, square = values[4 + 3 * kind : 7 + 3 * kind]
            share += constant + linear * n + square * n * n
        return share

    def _terms(self, schedule: Schedule) -> Tensor:
        """What each coefficient is multiplied with."""
        terms = torch.zeros(4 + 3 * len(KINDS), dtype=torch.float64)
        terms[0] = 1
        counts, kinds = counts_of(schedule), {s.block: kind_of(s) for s in schedule}
        left = self.num_in
        for block in range(self.depth):
            after = counts.get(block, left)
            assert isinstance(after, int)
            n, p = left + self.num_prefix, after + self.num_prefix
            terms[1:4] += torch.tensor([n, n * n, p], dtype=torch.float64)
            if block in kinds:
                start = 4 + 3 * kinds[block]
                terms[start : start + 3] += torch.tensor([1, n, n * n], dtype=torch.float64)
            left = after
        return terms

    def _samples(self) -> Iterator[Schedule]:
        """Schedules that tell the coefficients apart: few and many blocks, at several counts."""
        yield ()
        part = [max(1, self.num_in * eighths // 8) for eighths in range(9)]
        last = self.depth - 1
        for place, kind in enumerate(KINDS):

            def at(block: int, count: int, kind: Setting = kind) -> Setting:
                return Setting(block, count, kind.operator, kind.protection)

            yield (at(last, part[3]),)
            if last > 0:
                yield at(0, part[4]), at(last, part[2])
                yield at(last - 1, part[2]), at(last, part[1])
            if last > 0 and place == 0:
                yield (at(0, part[6]),)
                yield (at(0, part[1]),)
                yield (at(last - 1, part[5]),)

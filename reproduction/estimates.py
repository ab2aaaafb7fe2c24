"""Numbers of a table from saved rows: means and 95% intervals over seeds, and their differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch

from ltm.evaluation.accuracy import paired_interval
from reproduction.jobs import Job
from reproduction.measures import MEASURES, correct_flags, rounds
from reproduction.rows import Store
from reproduction.tables.base import Cell, Claim, Table

# Student's t at 97.5% for 1, 2, ... degrees of freedom; beyond these it is close to the last.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean, and a 95% interval where there is more than one value."""

    mean: float
    low: float | None = None
    high: float | None = None
    values: tuple[float, ...] = ()

    @property
    def reach(self) -> float | None:
        """Half the interval's width."""
        return None if self.high is None else self.high - self.mean


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and Student's 95% interval of a few values."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean=mean, values=tuple(values))
    quantile = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
    reach = quantile * stdev(values) / len(values) ** 0.5
    return Estimate(mean=mean, low=mean - reach, high=mean + reach, values=tuple(values))


def _image_difference(ours: Sequence[bool], others: Sequence[bool]) -> Estimate:
    """The difference of two networks in per cent, image by image, for want of seeds."""
    found = paired_interval(torch.tensor(ours), torch.tensor(others))
    return Estimate(mean=100 * found.difference, low=100 * found.low, high=100 * found.high)


_TIMED = ("milliseconds", "throughput")
"""Measures that are compared round by round."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a cell holds: an estimate, or the reason why it has none."""

    estimate: Estimate | None = None
    problem: str = ""
    missing: int = 0
    """Jobs that are not done."""


class Reader:
    """Reads cells from a store, each row once."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._values: dict[Job, dict | None] = {}

    def values(self, job: Job) -> dict | None:
        """The raw values of a job, if it is done."""
        if job not in self._values:
            self._values[job] = self.store.values(job)
        return self._values[job]

    def has_any(self, table: Table) -> bool:
        """Whether a row of the table was run, or tried."""
        jobs = table.jobs()
        return any(self.values(job) is not None or self.store.failure(job) for job in jobs)

    def read(self, cell: Cell) -> Found:
        """A cell's number over the seeds that are done."""
        results = [self._measure(job, cell) for job in cell.jobs]
        numbers = [number for number in results if isinstance(number, float)]
        problem = next((text for text in results if isinstance(text, str) and text), "")
        missing = len(results) - len(numbers)
        if not numbers:
            return Found(problem=problem or "not run", missing=missing)
        return Found(estimate=estimate(numbers), problem=problem, missing=missing)

    def _measure(self, job: Job, cell: Cell) -> float | str:
        """The number of one seed; or why there is none, empty where it was not run."""
        values = self.values(job)
        if values is None:
            failure = self.store.failure(job)
            return f"failed: {failure.error}" if failure else ""
        try:
            return float(MEASURES[cell.measure](values, cell.of))
        except (ValueError, KeyError, IndexError, ZeroDivisionError) as error:
            return f"failed: {error}"

    def compare(self, table: Table, claim: Claim) -> Found:
        """The difference that a claim is about, by seed, or by image where there is one seed."""
        first, other = table.row(claim.row), table.row(claim.other)
        ours = None if first is None else first.cells.get(claim.column)
        theirs = None if other is None else other.cells.get(claim.other_column or claim.column)
        if ours is None or theirs is None:
            return Found(problem="not run at this scale")
        numbers = [self.read(cell) for cell in (ours, theirs)]
        for found in numbers:
            if found.estimate is None:
                return found
        both = self._only_seed(ours, theirs)
        if both is not None:
            return Found(estimate=_image_difference(*both))
        if ours.jobs == theirs.jobs and ours.measure in _TIMED:
            return Found(estimate=self._by_round(ours, theirs))
        pairs = self._pairs(ours, theirs)
        if not pairs:
            return Found(problem="no seed is done in both rows")
        problem = next((f.problem for f in numbers if f.problem), "")
        return Found(estimate=estimate([a - b for a, b in pairs]), problem=problem)

    def _pairs(self, ours: Cell, theirs: Cell) -> list[tuple[float, float]]:
        """Numbers of the same seed; a row of one job stands beside every seed of the other."""
        length = max(len(ours.jobs), len(theirs.jobs))
        sides = []
        for cell in (ours, theirs):
            numbers = [self._measure(job, cell) for job in cell.jobs]
            sides.append(numbers * length if len(numbers) == 1 else numbers)
        pairs = zip(*sides, strict=False)
        return [(a, b) for a, b in pairs if isinstance(a, float) and isinstance(b, float)]

    def _by_round(self, ours: Cell, theirs: Cell) -> Estimate:
        """The difference of two entrants of a race, round by round."""
        values = self.values(ours.jobs[0])
        assert values is not None, "it was read before"
        sides = [rounds(cell.measure, values, cell.of) for cell in (ours, theirs)]
        return estimate([a - b for a, b in zip(*sides, strict=True)])

    def _only_seed(self, ours: Cell, theirs: Cell) -> list[list[bool]] | None:
        """Which images are right, by both rows, where accuracy of one seed alone is there."""
        if not ours.measure == theirs.measure == "top1":
            return None
        length = max(len(ours.jobs), len(theirs.jobs))
        sides = [
            cell.jobs * length if len(cell.jobs) == 1 else cell.jobs for cell in (ours, theirs)
        ]
        pairs = [[self.values(job) for job in pair] for pair in zip(*sides, strict=False)]
        whole = [done for pair in pairs if len(done := [v for v in pair if v is not None]) == 2]
        if len(whole) != 1:
            return None
        flags = [correct_flags(v) for v in whole[0]]
        return flags if len(flags[0]) == len(flags[1]) else None

"""Tables from saved rows: what is measured, what failed, what is not there yet."""

from __future__ import annotations

from dataclasses import dataclass

from ltm.experiments.jobs import Job
from ltm.experiments.measures import MEASURES, correct_flags
from ltm.experiments.seeds import Estimate, difference, estimate, image_difference
from ltm.experiments.store import Store
from ltm.experiments.table import Cell, Claim, Table


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a cell holds: an estimate, or the reason why it has none."""

    estimate: Estimate | None = None
    problem: str = ""
    missing: int = 0
    """Jobs that are not done."""


class Reader:
    """Reads cells from a store, each row's file once."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._values: dict[Job, dict | None] = {}

    def values(self, job: Job) -> dict | None:
        """The raw values of a job, if it is done."""
        if job not in self._values:
            self._values[job] = self.store.values(job)
        return self._values[job]

    def read(self, cell: Cell) -> Found:
        """A cell's number over the seeds that are done."""
        numbers, problem = [], ""
        for job in cell.jobs:
            values = self.values(job)
            if values is None:
                failure = self.store.failure(job)
                problem = problem or (f"failed: {failure.error}" if failure else "")
                continue
            try:
                numbers.append(MEASURES[cell.measure](values, cell.of))
            except (ValueError, KeyError, IndexError, ZeroDivisionError) as error:
                problem = problem or f"failed: {error}"
        missing = sum(self.values(job) is None for job in cell.jobs)
        if not numbers:
            return Found(problem=problem or "not run", missing=missing)
        return Found(estimate=estimate(numbers), problem=problem, missing=missing)

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
        left, right = (f.estimate.values for f in numbers if f.estimate is not None)
        if ours.measure == theirs.measure == "top1" and len(left) == len(right) == 1:
            flags = [self._flags(cell) for cell in (ours, theirs)]
            if len(flags[0]) == len(flags[1]):
                return Found(estimate=image_difference(*flags))
        problem = next((f.problem for f in numbers if f.problem), "")
        return Found(estimate=difference(left, right), problem=problem)

    def _flags(self, cell: Cell) -> list[bool]:
        return next(correct_flags(v) for job in cell.jobs if (v := self.values(job)) is not None)

"""Jobs that cost nothing: what is done stays, what fails is noted, what stops goes on."""

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from filelock import FileLock

from reproduction.estimates import Reader
from reproduction.jobs import Job, identity
from reproduction.plots import points_of
from reproduction.running.context import Context, perform
from reproduction.running.queue import run_jobs
from reproduction.scales.base import Scale
from reproduction.table_files import to_csv, to_markdown, write_table
from reproduction.tables.base import Cell, Column, Experiment, Row, Table

CALLS: list[int] = []
BROKEN: set[int] = set()
STOPS: set[int] = set()
FULL: set[int] = set()
LOSES: dict[int, Path] = {}


@dataclass(frozen=True, kw_only=True)
class Count(Job):
    kind: ClassVar[str] = "count"

    number: int
    start: "Count | None" = None

    def needs(self) -> tuple[Job, ...]:
        return () if self.start is None else (self.start,)

    @property
    def leaves_network(self) -> bool:
        return True


@perform.register
def count(job: Count, context: Context) -> dict[str, Any]:
    CALLS.append(job.number)
    if job.number in STOPS:
        raise KeyboardInterrupt
    if job.number in FULL:
        raise torch.OutOfMemoryError("no memory")
    if job.number in BROKEN:
        raise RuntimeError(f"number {job.number} is broken")
    (context.work(job) / "model").mkdir()
    if job.number in LOSES:
        LOSES[job.number].rmdir()
    return {"parameters": job.number * 1e6}


@dataclass(frozen=True, kw_only=True)
class Leaf(Job):
    kind: ClassVar[str] = "leaf"


@dataclass(frozen=True, kw_only=True)
class Dependent(Job):
    kind: ClassVar[str] = "dependent"

    start: Leaf

    def needs(self) -> tuple[Job, ...]:
        return (self.start,)


@perform.register
def leaf(_job: Leaf, _context: Context) -> dict[str, Any]:
    return {}


@pytest.fixture(autouse=True)
def forget() -> None:
    for memory in (CALLS, BROKEN, STOPS, FULL, LOSES):
        memory.clear()


def lock_of(job: Job, context: Context) -> FileLock:
    """The lock of a job, held, as by another process."""
    lock = FileLock(context.work(job) / "lock")
    lock.acquire()
    return lock


def table(*jobs: Count) -> Table:
    rows = tuple(
        Row(label=f"row {job.number}", cells={"n": Cell(jobs=(job,), measure="parameters")})
        for job in jobs
    )
    return Table(columns=(Column(name="n"),), rows=rows)


def declare(_scale: Scale) -> Table:
    return table()


EXPERIMENT = Experiment(name="counts", item="Table 0", title="Counts", declare=declare)


def test_a_job_runs_once_however_often_it_is_asked_for(context: Context) -> None:
    base = Count(number=1)
    jobs = [Count(number=2, start=base), Count(number=3, start=base), Count(number=1)]
    assert len(run_jobs(jobs, context).ran) == 3
    assert CALLS == [1, 2, 3]
    again = run_jobs(jobs, context)
    assert (again.ran, len(again.already)) == ([], 3)
    assert CALLS == [1, 2, 3]


def test_a_failed_row_is_in_its_cell_and_the_rest_goes_on(context: Context) -> None:
    base = Count(number=1)
    jobs = [base, Count(number=2, start=base), Count(number=3)]
    BROKEN.add(1)
    summary = run_jobs(jobs, context)
    assert set(summary.failed) == {identity(jobs[0]), identity(jobs[1])}
    text = to_markdown(EXPERIMENT, table(*jobs), Reader(context.store), "smoke")
    assert "| row 1 | failed |" in text
    assert "RuntimeError: number 1 is broken" in text
    assert "| row 3 | 3.00 |" in text
    assert "which failed" in to_csv(table(*jobs), Reader(context.store))
    BROKEN.clear()
    assert len(run_jobs(jobs, context).ran) == 2, "tried again"
    assert "failed" not in to_markdown(EXPERIMENT, table(*jobs), Reader(context.store), "smoke")


def test_ctrl_c_leaves_what_is_done(context: Context) -> None:
    jobs = [Count(number=1), Count(number=2), Count(number=3)]
    STOPS.add(2)
    assert run_jobs(jobs, context).interrupted
    folder = write_table(EXPERIMENT, table(*jobs), Reader(context.store), "smoke")
    text = (folder / "table.md").read_text()
    assert "| row 1 | 1.00 |" in text
    assert "| row 2 | not run |" in text
    STOPS.clear()
    summary = run_jobs(jobs, context)
    assert (len(summary.ran), len(summary.already), summary.interrupted) == (2, 1, False)


def test_a_point_of_another_column_says_so(context: Context) -> None:
    jobs = Count(number=1), Count(number=2)
    run_jobs(jobs, context)
    rows = [
        Row(label=name, cells={column: Cell(jobs=(job,), measure="parameters")})
        for name, column, job in zip(("a", "b"), ("n @0", "n @9"), jobs, strict=True)
    ]
    made = Table(columns=(Column(name="n @0"), Column(name="n @9")), rows=tuple(rows))
    found = points_of(made, "n @9", Reader(context.store))
    assert [(name, value.mean) for name, value in found] == [("a @0", 1.0), ("b", 2.0)]


def test_out_of_time_no_further_row_begins(context: Context) -> None:
    jobs = [Count(number=1), Count(number=2)]
    summary = run_jobs(jobs, replace(context, deadline=0.0))
    assert (summary.ran, summary.left, CALLS) == ([], 2, [])
    assert len(run_jobs(jobs, context).ran) == 2


def test_a_lost_network_is_made_again_but_its_row_stays(context: Context) -> None:
    base = Count(number=1)
    run_jobs([base], context)
    [row] = (context.store.output / "rows.jsonl").read_text().splitlines()
    (context.store.network_folder(base)).rmdir()
    assert run_jobs([base], context).ran == [], "nobody needs it"
    run_jobs([Count(number=2, start=base)], context)
    assert CALLS == [1, 1, 2]
    assert row in (context.store.output / "rows.jsonl").read_text().splitlines()


def test_a_network_that_is_lost_on_the_way_is_made_again(context: Context) -> None:
    base = Count(number=1)
    run_jobs([base], context)
    LOSES[5] = context.work(base) / "model"
    summary = run_jobs([Count(number=5), Count(number=2, start=base)], context)
    assert not summary.failed
    assert CALLS == [1, 5, 1, 2]


def test_a_locked_row_is_left_to_whoever_runs_it(context: Context) -> None:
    """Another process holds a row: the others are run first, then its result is taken."""
    first, second = Count(number=1), Count(number=2)
    lock = lock_of(first, context)
    done = []
    runner = threading.Thread(target=lambda: done.append(run_jobs([first, second], context)))
    runner.start()
    while context.store.values(second) is None:
        assert runner.is_alive()
    context.store.finish(first, {"values": {"parameters": 7e6}})
    context.store.network_folder(first).mkdir(parents=True)
    lock.release()
    runner.join(timeout=30)
    assert CALLS == [2]
    assert (done[0].ran, done[0].already) == ([identity(second)], [identity(first)])


def test_a_network_is_there_only_with_its_row(context: Context) -> None:
    """Another process has written the network and still measures it: whoever needs it waits."""
    base = Count(number=1)
    lock = lock_of(base, context)
    context.store.network_folder(base).mkdir(parents=True)
    done = []
    needs = Count(number=2, start=base)
    runner = threading.Thread(target=lambda: done.append(run_jobs([needs], context)))
    runner.start()
    runner.join(timeout=1.0)
    assert runner.is_alive()
    context.store.finish(base, {"values": {"parameters": 7e6}})
    lock.release()
    runner.join(timeout=30)
    assert (done[0].ran, done[0].failed) == ([identity(needs)], {})
    assert CALLS == [2]


def test_a_row_whose_process_was_killed_is_not_tried_again_by_the_same_call(
    context: Context,
) -> None:
    job, began = Count(number=1), time.time()
    (context.work(job) / "begun").write_text(str(began + 1))
    summary = run_jobs([job, Count(number=2)], context, began=began)
    assert "was killed" in summary.failed[identity(job)]
    assert CALLS == [2]
    assert run_jobs([job], context, began=began + 2).failed == {}  # but by the next one


def test_memory_that_others_hold_is_no_failure(context: Context) -> None:
    shared = replace(context, exclusive=False)
    first, second = Count(number=1), Count(number=2, start=Count(number=1))
    FULL.add(1)
    summary = run_jobs([first, second], shared)
    assert summary.failed.keys() == {identity(first), identity(second)}
    assert context.store.failure(first) is None
    assert context.store.failure(second) is None
    FULL.clear()
    assert run_jobs([first, second], context, began=0).failed == {}


def test_a_job_that_needs_what_leaves_no_network_fails_at_once(context: Context) -> None:
    leaf = Leaf()
    summary = run_jobs([Dependent(start=leaf)], context)
    assert list(summary.failed.values()) == [f"it needs {identity(leaf)}, which failed"]

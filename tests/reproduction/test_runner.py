"""Jobs that cost nothing: what is done stays, what fails is noted, what stops goes on."""

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from reproduction.drawing import points_of
from reproduction.jobs import Job, identity
from reproduction.place import Place, perform
from reproduction.reading import Reader
from reproduction.runner import run_jobs
from reproduction.scales.base import Scale
from reproduction.table import Cell, Column, Experiment, Row, Table
from reproduction.writing import to_csv, to_markdown, write_table

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
def count(job: Count, place: Place) -> dict[str, Any]:
    CALLS.append(job.number)
    if job.number in STOPS:
        raise KeyboardInterrupt
    if job.number in FULL:
        raise torch.OutOfMemoryError("no memory")
    if job.number in BROKEN:
        raise RuntimeError(f"number {job.number} is broken")
    (place.work(job) / "model").mkdir()
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
def leaf(_job: Leaf, _place: Place) -> dict[str, Any]:
    return {}


@pytest.fixture(autouse=True)
def forget() -> None:
    for memory in (CALLS, BROKEN, STOPS, FULL, LOSES):
        memory.clear()


def table(*jobs: Count) -> Table:
    rows = tuple(
        Row(label=f"row {job.number}", cells={"n": Cell(jobs=(job,), measure="parameters")})
        for job in jobs
    )
    return Table(columns=(Column(name="n"),), rows=rows)


def declare(_scale: Scale) -> Table:
    return table()


EXPERIMENT = Experiment(name="counts", item="Table 0", title="Counts", declare=declare)


def test_a_job_runs_once_however_often_it_is_asked_for(place: Place) -> None:
    base = Count(number=1)
    jobs = [Count(number=2, start=base), Count(number=3, start=base), Count(number=1)]
    assert len(run_jobs(jobs, place).ran) == 3
    assert CALLS == [1, 2, 3]
    again = run_jobs(jobs, place)
    assert (again.ran, len(again.already)) == ([], 3)
    assert CALLS == [1, 2, 3]


def test_a_failed_row_is_in_its_cell_and_the_rest_goes_on(place: Place) -> None:
    base = Count(number=1)
    jobs = [base, Count(number=2, start=base), Count(number=3)]
    BROKEN.add(1)
    summary = run_jobs(jobs, place)
    assert set(summary.failed) == {identity(jobs[0]), identity(jobs[1])}
    text = to_markdown(EXPERIMENT, table(*jobs), Reader(place.store), "smoke")
    assert "| row 1 | failed |" in text
    assert "RuntimeError: number 1 is broken" in text
    assert "| row 3 | 3.00 |" in text
    assert "which failed" in to_csv(table(*jobs), Reader(place.store))
    BROKEN.clear()
    assert len(run_jobs(jobs, place).ran) == 2, "tried again"
    assert "failed" not in to_markdown(EXPERIMENT, table(*jobs), Reader(place.store), "smoke")


def test_ctrl_c_leaves_what_is_done(place: Place) -> None:
    jobs = [Count(number=1), Count(number=2), Count(number=3)]
    STOPS.add(2)
    assert run_jobs(jobs, place).interrupted
    folder = write_table(EXPERIMENT, table(*jobs), place.store, "smoke")
    text = (folder / "table.md").read_text()
    assert "| row 1 | 1.00 |" in text
    assert "| row 2 | not run |" in text
    STOPS.clear()
    summary = run_jobs(jobs, place)
    assert (len(summary.ran), len(summary.already), summary.interrupted) == (2, 1, False)


def test_a_point_of_another_column_says_so(place: Place) -> None:
    jobs = Count(number=1), Count(number=2)
    run_jobs(jobs, place)
    rows = [
        Row(label=name, cells={column: Cell(jobs=(job,), measure="parameters")})
        for name, column, job in zip(("a", "b"), ("n @0", "n @9"), jobs, strict=True)
    ]
    made = Table(columns=(Column(name="n @0"), Column(name="n @9")), rows=tuple(rows))
    found = points_of(made, "n @9", Reader(place.store))
    assert [(name, value.mean) for name, value in found] == [("a @0", 1.0), ("b", 2.0)]


def test_out_of_time_no_further_row_begins(place: Place) -> None:
    jobs = [Count(number=1), Count(number=2)]
    summary = run_jobs(jobs, replace(place, deadline=0.0))
    assert (summary.ran, summary.left, CALLS) == ([], 2, [])
    assert len(run_jobs(jobs, place).ran) == 2


def test_a_lost_network_is_made_again_but_its_row_stays(place: Place) -> None:
    base = Count(number=1)
    run_jobs([base], place)
    row = (place.store.row_folder(base) / "row.json").read_text()
    (place.store.network_folder(base)).rmdir()
    assert run_jobs([base], place).ran == [], "nobody needs it"
    run_jobs([Count(number=2, start=base)], place)
    assert CALLS == [1, 1, 2]
    assert (place.store.row_folder(base) / "row.json").read_text() == row


def test_a_network_that_is_lost_on_the_way_is_made_again(place: Place) -> None:
    base = Count(number=1)
    run_jobs([base], place)
    LOSES[5] = place.work(base) / "model"
    summary = run_jobs([Count(number=5), Count(number=2, start=base)], place)
    assert not summary.failed
    assert CALLS == [1, 5, 1, 2]


def test_a_locked_row_is_left_to_whoever_runs_it(place: Place) -> None:
    """Another process holds a row: the others are run first, then its result is taken."""
    first, second = Count(number=1), Count(number=2)
    lock = place.store.lock(first)
    lock.acquire()
    done = []
    runner = threading.Thread(target=lambda: done.append(run_jobs([first, second], place)))
    runner.start()
    while identity(second) not in {p.name for p in place.store.output.glob("rows/*")}:
        assert runner.is_alive()
    place.store.finish(first, {"values": {"parameters": 7e6}})
    place.store.network_folder(first).mkdir(parents=True)
    lock.release()
    runner.join(timeout=30)
    assert CALLS == [2]
    assert (done[0].ran, done[0].already) == ([identity(second)], [identity(first)])


def test_a_network_is_there_only_with_its_row(place: Place) -> None:
    """Another process has written the network and still measures it: whoever needs it waits."""
    base = Count(number=1)
    lock = place.store.lock(base)
    lock.acquire()
    place.store.network_folder(base).mkdir(parents=True)
    done = []
    needs = Count(number=2, start=base)
    runner = threading.Thread(target=lambda: done.append(run_jobs([needs], place)))
    runner.start()
    runner.join(timeout=1.0)
    assert runner.is_alive()
    place.store.finish(base, {"values": {"parameters": 7e6}})
    lock.release()
    runner.join(timeout=30)
    assert (done[0].ran, done[0].failed) == ([identity(needs)], {})
    assert CALLS == [2]


def test_a_row_whose_process_was_killed_is_not_tried_again_by_the_same_call(place: Place) -> None:
    job, began = Count(number=1), time.time()
    (place.work(job) / "begun").write_text(str(began + 1))
    summary = run_jobs([job, Count(number=2)], place, began=began)
    assert "was killed" in summary.failed[identity(job)]
    assert CALLS == [2]
    assert run_jobs([job], place, began=began + 2).failed == {}  # but by the next one


def test_memory_that_others_hold_is_no_failure(place: Place) -> None:
    shared = replace(place, alone=False)
    first, second = Count(number=1), Count(number=2, start=Count(number=1))
    FULL.add(1)
    summary = run_jobs([first, second], shared)
    assert summary.failed.keys() == {identity(first), identity(second)}
    assert place.store.failure(first) is None
    assert place.store.failure(second) is None
    FULL.clear()
    assert run_jobs([first, second], place, began=0).failed == {}


def test_a_job_that_needs_what_leaves_no_network_fails_at_once(place: Place) -> None:
    leaf = Leaf()
    summary = run_jobs([Dependent(start=leaf)], place)
    assert list(summary.failed.values()) == [f"it needs {identity(leaf)}, which failed"]

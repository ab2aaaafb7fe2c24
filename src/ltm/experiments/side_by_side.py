"""Rows in several processes on one device: a network of a few million parameters fills no GPU."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ltm.experiments.jobs import Job, Race, identity, in_order
from ltm.experiments.place import Place
from ltm.experiments.runner import Summary, run_jobs
from ltm.experiments.store import Store


class Errand(NamedTuple):
    """What a helper has to know: a `Place` itself cannot be sent."""

    output: Path
    device: str
    workers: int
    deadline: float
    threads: int
    log: Path


def run_side_by_side(jobs: Iterable[Job], place: Place, processes: int) -> Summary:
    """Run jobs in several processes; races come after them, with the device to themselves.

    A helper that dies leaves its row to the others, and what they all leave is run here.
    """
    ordered, store, began = in_order(list(jobs)), place.store, time.time()
    before = {identity(job) for job in ordered if store.values(job) is not None}
    threads = max(1, (os.cpu_count() or 1) // processes)
    logs = [store.output / "work" / f"process-{number}.log" for number in range(processes)]
    errands = [
        Errand(store.output, str(place.device), place.workers, place.deadline, threads, log)
        for log in logs
    ]
    rows = [job for job in ordered if not isinstance(job, Race)]
    place.console.print(f"{processes} processes at work; logs in {logs[0].parent}")
    spawn = multiprocessing.get_context("spawn")
    helpers = [spawn.Process(target=_help, args=(rows, errand)) for errand in errands]
    for helper in helpers:
        helper.start()
    try:
        for helper in helpers:
            helper.join()
    except KeyboardInterrupt:  # which they were sent as well
        for helper in helpers:
            helper.join()
        summary = Summary(interrupted=True)
    else:
        summary = run_jobs(ordered, place, began=began)
    there = {identity(job) for job in ordered if store.values(job) is not None}
    summary.ran, summary.already = sorted(there - before), sorted(there & before)
    return summary


def _help(rows: list[Job], errand: Errand) -> None:
    import torch  # noqa: PLC0415 - in the helper alone, as what follows
    from rich.console import Console  # noqa: PLC0415

    import ltm.experiments.work  # noqa: F401, PLC0415 - registers how jobs are run

    torch.set_num_threads(errand.threads)
    errand.log.parent.mkdir(parents=True, exist_ok=True)
    with errand.log.open("a", encoding="utf-8") as log:
        place = Place(
            store=Store(errand.output),
            device=torch.device(errand.device),
            workers=errand.workers,
            console=Console(file=log, highlight=False, markup=False, soft_wrap=True),
            deadline=errand.deadline,
        )
        run_jobs(rows, place)

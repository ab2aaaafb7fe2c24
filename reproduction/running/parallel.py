"""Rows in several processes on one device: a network of a few million parameters fills no GPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple

from reproduction.jobs import Job, Race, identity, in_order
from reproduction.rows import Store
from reproduction.running.context import Context
from reproduction.running.queue import Summary, run_jobs


class _Assignment(NamedTuple):
    """What a process has to know; a `Context` cannot be pickled."""

    output: Path
    device: str
    workers: int
    began: float
    deadline: float
    threads: int
    log: Path


def run_side_by_side(jobs: Iterable[Job], context: Context, processes: int) -> Summary:
    """Run jobs in several processes; races come after them, with the device to themselves.

    What the helpers leave is run here: for want of memory, say, which is shared while they work.
    """
    ordered, store, began = in_order(list(jobs)), context.store, time.time()
    before = {identity(job) for job in ordered if store.values(job) is not None}
    threads = max(1, (os.cpu_count() or 1) // processes)
    logs = [store.output / "work" / f"process-{number}.log" for number in range(processes)]
    rows = [job for job in ordered if not isinstance(job, Race)]
    about = (store.output, str(context.device), context.workers, began, context.deadline, threads)
    spawn = multiprocessing.get_context("spawn")
    helpers = [spawn.Process(target=_help, args=(rows, _Assignment(*about, log))) for log in logs]
    context.console.print(f"{processes} processes at work; logs in {logs[0].parent}")
    try:
        for helper in helpers:
            helper.start()
        for helper in helpers:
            helper.join()
    except KeyboardInterrupt:
        _stop(helpers)
        summary = Summary(interrupted=True, failed=_failures(ordered, store, began))
    else:
        for helper, log in zip(helpers, logs, strict=True):
            if helper.exitcode:
                context.console.print(f"a process ended with {helper.exitcode}: {log}")
        summary = run_jobs(ordered, context, began=began)
    there = {identity(job) for job in ordered if store.values(job) is not None}
    summary.ran, summary.already = sorted(there - before), sorted(there & before)
    return summary


def _stop(helpers: Sequence[SpawnProcess]) -> None:
    """Let helpers stop as for Ctrl-C, of which a terminal has told them already."""
    for helper in helpers:
        if helper.is_alive() and helper.pid is not None:
            os.kill(helper.pid, signal.SIGINT)
    for helper in helpers:
        if helper.pid is not None:
            helper.join()


def _failures(jobs: Sequence[Job], store: Store, began: float) -> dict[str, str]:
    noted = {identity(job): store.failure(job) for job in jobs}
    return {name: note.error for name, note in noted.items() if note and note.time >= began}


def _help(rows: list[Job], assignment: _Assignment) -> None:
    import torch  # noqa: PLC0415 - in the helper alone, as what follows
    from rich.console import Console  # noqa: PLC0415

    import reproduction.running  # noqa: F401, PLC0415 - registers how jobs are run

    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(assignment.threads)
    assignment.log.parent.mkdir(parents=True, exist_ok=True)
    with assignment.log.open("a", encoding="utf-8", buffering=1) as log:
        context = Context(
            store=Store(assignment.output),
            device=torch.device(assignment.device),
            workers=assignment.workers,
            console=Console(file=log, highlight=False, markup=False, soft_wrap=True),
            exclusive=False,
            deadline=assignment.deadline,
        )
        run_jobs(rows, context, began=assignment.began)


def _end_with_parent() -> None:
    """Stop as for Ctrl-C when the process that started this one is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGINT)

"""Run jobs one by one; what is done stays done, what fails is noted, and the rest goes on."""

from __future__ import annotations

import dataclasses
import shutil
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from filelock import Timeout

from ltm.evaluation.records import describe
from reproduction.jobs import Job, Race, identity, in_order, resolved
from reproduction.provenance import provenance
from reproduction.running.context import Context, perform

_WAIT_SECONDS = 0.5
"""Between looks at a row that another process works on."""


@dataclass(kw_only=True)
class Summary:
    """What a call did."""

    ran: list[str] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    """Finished before, or by another process."""
    failed: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    left: int = 0
    """Rows that were not begun, for want of time."""


def run_jobs(jobs: Iterable[Job], context: Context, *, began: float | None = None) -> Summary:
    """Run all jobs that are not done, and the networks that they need; races come last.

    Rows that another process is at, and those that wait for them, are left and looked at again.
    What has failed since this call `began`, now unless given, is not tried again.
    """
    ordered = sorted(in_order(list(jobs)), key=lambda job: isinstance(job, Race))
    return _Call(context, time.time() if began is None else began).run(ordered)


class _Call:
    """One call: what it began, and what came of it."""

    def __init__(self, context: Context, began: float) -> None:
        self.context, self.store = context, context.store
        self.began = began
        self.summary = Summary()
        self.done: set[str] = set()
        self.progress: dict[str, str] = {}

    def run(self, ordered: list[Job]) -> Summary:
        names = list(map(identity, ordered))
        self.progress = {name: f"{i} of {len(names)}" for i, name in enumerate(names, 1)}
        try:
            while wanted := self._wanted(ordered):
                if time.time() >= self.context.deadline:
                    self.summary.left = len(wanted)
                    break
                # Then all over again: a row further up may have got its networks meanwhile.
                if not any(self._try(job) for job in wanted):
                    time.sleep(_WAIT_SECONDS)
        except KeyboardInterrupt:
            self.summary.interrupted = True
        self.summary.already = [
            identity(job)
            for job in ordered
            if identity(job) not in self.summary.ran and self.store.values(job) is not None
        ]
        return self.summary

    def _wanted(self, ordered: list[Job]) -> list[Job]:
        """Jobs that are not done, and done ones whose lost network one of them needs."""
        wanted: set[str] = set()
        for job in reversed(ordered):
            if not self._is_done(job):
                wanted.add(identity(job))
            if identity(job) in wanted:
                wanted |= {identity(n) for n in job.needs() if self._has_lost_network(n)}
        wanted -= self.summary.failed.keys()
        return [job for job in ordered if identity(job) in wanted]

    def _has_lost_network(self, need: Job) -> bool:
        return need.leaves_network and not self.context.has_network(need)

    def _is_done(self, job: Job) -> bool:
        """Whether a job has a row; what is done stays so."""
        if identity(job) not in self.done and self.store.values(job) is not None:
            self.done.add(identity(job))
        return identity(job) in self.done

    def _try(self, job: Job) -> bool:
        """Run a job unless another process is at it or at what it needs; whether it is settled."""
        needed = [need for need in job.needs() if not self._complete(need)]
        if not all(self._is_hopeless(need) for need in needed):
            return False
        try:
            with self.store.lock(job):
                if self._settled(job):
                    return True
                if needed:
                    self._fail_without(job, needed[0])
                else:
                    self._run(job)
        except Timeout:
            return False
        return True

    def _settled(self, job: Job) -> bool:
        """Whether another process has finished it, or failed at it, since this call began."""
        if self.store.values(job) is not None:
            return self.context.has_network(job) or not job.leaves_network
        return self._has_failed(job)

    def _is_hopeless(self, need: Job) -> bool:
        """Whether there is no use in waiting for a network."""
        given_up = not need.leaves_network or identity(need) in self.summary.failed
        return given_up or self._has_failed(need)

    def _has_failed(self, job: Job) -> bool:
        """Whether any process has failed at it since this call began."""
        failure = self.store.failure(job)
        if failure is None or failure.time < self.began:
            return False
        self.summary.failed[identity(job)] = failure.error
        return True

    def _run(self, job: Job) -> None:
        name, context = identity(job), self.context
        context.console.print(f"running {name} ({self.progress[name]})")
        if self.store.is_stale(job):
            shutil.rmtree(context.work(job) / "run", ignore_errors=True)
            self.store.forget(job)
        began, mark = time.time(), context.work(job) / "begun"
        if mark.exists() and float(mark.read_text()) >= self.began:
            self._fail(job, "the process that ran it was killed; memory may be short")
            return
        mark.write_text(str(began))
        try:
            values = perform(job, context)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - one row fails, the table goes on
            self._fail(job, error, traceback.format_exc(limit=-4))
            return
        finally:
            mark.unlink(missing_ok=True)
        if self.store.values(job) is None:
            self.store.finish(job, self._row(job, values, began))
        self.summary.ran.append(name)

    def _complete(self, need: Job) -> bool:
        return self.context.has_network(need) and self._is_done(need)

    def _fail(self, job: Job, why: BaseException | str, trace: str = "") -> None:
        error = why if isinstance(why, str) else _reason(why)
        self.context.console.print(f"failed {identity(job)}: {error}")
        self.summary.failed[identity(job)] = error
        if not self.context.exclusive and isinstance(why, torch.OutOfMemoryError):
            return  # for want of others' memory: it is not noted, and can run when they are done
        note = {"job": resolved(job), "error": error, "trace": trace, "time": time.time()}
        self.store.fail(job, note)

    def _fail_without(self, job: Job, need: Job) -> None:
        error = f"it needs {identity(need)}, which failed"
        if self._has_failed(need) or not need.leaves_network:
            self._fail(job, error)
        else:
            self.summary.failed[identity(job)] = error  # only here: another process may do it

    def _row(self, job: Job, values: dict[str, Any], began: float) -> dict[str, Any]:
        return {
            "job": resolved(job),
            "values": values,
            "seconds": round(time.time() - began, 2),
            "finished": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            **dataclasses.asdict(provenance()),
            "environment": dataclasses.asdict(describe(self.context.device)),
        }


def _reason(error: BaseException) -> str:
    """An error in one line."""
    words = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {words}"[:300]

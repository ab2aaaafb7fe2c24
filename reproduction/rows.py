"""Rows on disk: `rows.jsonl`, one finished job a line, sorted by the job's name.

Several processes may fill one folder. Every change rewrites the file whole, under a lock.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltm.files import locked, write_text
from reproduction.jobs import Job, agrees, identity, resolved

_Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a job failed, and when, in seconds since 1970."""

    error: str
    time: float


class Store:
    """The rows of an output folder. Reads are safe while other processes write."""

    def __init__(self, output: str | Path) -> None:
        self.output = Path(output)
        self._rows = _Lines(self.output / "rows.jsonl")
        self._failures = _Lines(self.output / "failures.jsonl")

    def work_folder(self, job: Job) -> Path:
        """Where a job's networks, checkpoints and pictures are; they can be made again."""
        return self.output / "work" / identity(job)

    def network_folder(self, job: Job) -> Path:
        """Where the network of a job is."""
        return self.work_folder(job) / "model"

    def lock(self, job: Job) -> AbstractContextManager[None]:
        """Hold a job, or raise `filelock.Timeout` at once; a process that ends lets go of it."""
        return locked(self.work_folder(job) / "lock", timeout=0)

    def values(self, job: Job) -> dict[str, Any] | None:
        """The raw values of a finished job; None too where they were made with other defaults."""
        row = self._rows.read().get(identity(job))
        return None if row is None or not _current(row, job) else row["values"]

    def sources(self) -> set[tuple[str | None, str | None]]:
        """The commits of all rows, each with the hash of its code."""
        return {(row.get("commit"), row.get("tree")) for row in self._rows.read().values()}

    def is_stale(self, job: Job) -> bool:
        """Whether there is a row that was made with other defaults than today's."""
        row = self._rows.read().get(identity(job))
        return row is not None and not _current(row, job)

    def forget(self, job: Job) -> None:
        """Drop a row that was made with other defaults."""
        self._rows.drop(identity(job))

    def failure(self, job: Job) -> Failure | None:
        """Why a job failed when it was last tried."""
        noted = self._failures.read().get(identity(job))
        return None if noted is None else Failure(error=noted["error"], time=noted["time"])

    def finish(self, job: Job, row: dict[str, Any]) -> None:
        """Keep the row of a job."""
        self._rows.put({"id": identity(job), **row})
        self._failures.drop(identity(job))

    def fail(self, job: Job, note: dict[str, Any]) -> None:
        """Keep the reason why a job failed."""
        self._failures.put({"id": identity(job), **note})


def _current(row: dict[str, Any], job: Job) -> bool:
    return agrees(row.get("job", {}), resolved(job))


class _Lines:
    """A file of JSON objects, one a line, sorted by their `id`; read again only if it changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._lines: dict[str, _Line] = {}

    def read(self) -> dict[str, _Line]:
        try:
            about = self.path.stat()
        except FileNotFoundError:
            return {}
        version = (about.st_ino, about.st_mtime_ns, about.st_size)
        if version != self._seen:
            self._lines = read_lines(self.path)
            self._seen = version
        return self._lines

    def put(self, line: _Line) -> None:
        with locked(self._lock):
            self._write({**self.read(), line["id"]: line})

    def drop(self, name: str) -> None:
        if name in self.read():
            with locked(self._lock):
                self._write({n: line for n, line in self.read().items() if n != name})

    @property
    def _lock(self) -> Path:
        return self.path.parent / "work" / f"{self.path.name}.lock"

    def _write(self, lines: dict[str, _Line]) -> None:
        text = "".join(f"{json.dumps(lines[name])}\n" for name in sorted(lines))
        write_text(self.path, text)


def read_lines(path: Path) -> dict[str, _Line]:
    """The objects of a file of JSON lines, by their `id`."""
    found: dict[str, _Line] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            found[line["id"]] = line
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} is no row; delete the line, and it is made again"
            ) from error
    return found

"""Rows on disk: one folder per job, a row that is whole or not there, a lock while it is run."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from reproduction.jobs import Job, agrees, identity, resolved

ROW, FAILURE = "row.json", "failed.json"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a job failed, and when, in seconds since 1970."""

    error: str
    time: float


class Store:
    """All rows of an output folder. Reads are safe while other processes write."""

    def __init__(self, output: str | Path) -> None:
        self.output = Path(output)

    def row_folder(self, job: Job) -> Path:
        """Where a job's row and pictures are."""
        return self.output / "rows" / identity(job)

    def work_folder(self, job: Job) -> Path:
        """Where a job's networks and checkpoints are; they can be made again."""
        return self.output / "work" / identity(job)

    def network_folder(self, job: Job) -> Path:
        """Where the network of a job is."""
        return self.work_folder(job) / "model"

    def lock(self, job: Job) -> FileLock:
        """The lock of a job; it is free again when its process ends, however it ends."""
        folder = self.work_folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / "lock")

    def values(self, job: Job) -> dict[str, Any] | None:
        """The raw values of a finished job; None too where they were made with other defaults."""
        row = read_json(self.row_folder(job) / ROW)
        return None if row is None or not _current(row, job) else row["values"]

    def is_stale(self, job: Job) -> bool:
        """Whether there is a row that was made with other defaults than today's."""
        row = read_json(self.row_folder(job) / ROW)
        return row is not None and not _current(row, job)

    def forget(self, job: Job) -> None:
        """Drop a row that was made under other defaults."""
        (self.row_folder(job) / ROW).unlink(missing_ok=True)

    def failure(self, job: Job) -> Failure | None:
        """Why a job failed when it was last tried."""
        noted = read_json(self.row_folder(job) / FAILURE)
        return None if noted is None else Failure(error=noted["error"], time=noted["time"])

    def finish(self, job: Job, row: dict[str, Any]) -> None:
        """Keep the row of a job."""
        write_text(self.row_folder(job) / ROW, json.dumps(row, indent=1) + "\n")
        (self.row_folder(job) / FAILURE).unlink(missing_ok=True)

    def fail(self, job: Job, note: dict[str, Any]) -> None:
        """Keep the reason why a job failed."""
        write_text(self.row_folder(job) / FAILURE, json.dumps(note, indent=1) + "\n")


def _current(row: dict[str, Any], job: Job) -> bool:
    return agrees(row.get("job", {}), resolved(job))


def read_json(path: Path) -> Any:
    """What a JSON file holds; None where there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no readable JSON; delete it, and it is made again") from error


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: readers see the old one or the new one."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file in one step: readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

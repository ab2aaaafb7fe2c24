"""Several processes on one machine: they get ready side by side, and are timed one at a time."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no such locks: nobody waits there
    fcntl = None


SECONDS_TO_END = 1.0
"""How long a process may be busy with its end after its last turn."""


class Turns:
    """A file by which processes know of each other; without one nobody waits.

    Its lock is free again when its process ends, however it ends.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    @contextmanager
    def preparing(self) -> Generator[None]:
        """Any number of processes may be in here, while none is timed."""
        with self._locked(alone=False):
            yield

    @contextmanager
    def timing(self) -> Generator[None]:
        """One process is in here at a time, while none prepares."""
        with self._locked(alone=True):
            yield

    @contextmanager
    def _locked(self, *, alone: bool) -> Generator[None]:
        if self.path is None or fcntl is None:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            if alone:
                _wait_alone(file)
            else:
                fcntl.flock(file, fcntl.LOCK_SH)
            try:
                yield
            finally:  # now, though loader processes may have inherited the file
                fcntl.flock(file, fcntl.LOCK_UN)


def _wait_alone(file: IO[str]) -> None:
    """Wait until nobody else is in, and until whoever was last has come to its end."""
    assert fcntl is not None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(SECONDS_TO_END)

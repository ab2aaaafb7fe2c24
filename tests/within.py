"""Limits for what may hang, or take all memory. 0.1.0 has all that this needs."""

import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class TooLongError(BaseException):
    """It hangs; not an Exception, which the code that hangs may catch."""


@contextmanager
def seconds(number: int) -> Iterator[None]:
    """End what takes longer."""

    def ring(*_: object) -> None:
        raise TooLongError(f"it takes more than {number} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(number)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def one_more_gigabyte() -> Iterator[None]:
    """Refuse memory beyond a gigabyte more than there is in use, where Linux says how much."""
    if sys.platform != "linux":
        yield
        return
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    used = int(status.split("VmData:")[1].split()[0]) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + 2**30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def a_disk(folder: Path, size: str) -> list[str]:
    """What to write ahead of a command, for which `folder` is then a real disk of this size.

    The names of what is left on the disk are printed at the end.
    """
    folder.mkdir()
    script = f'mount -t tmpfs -o size={size} none "$0" && "$@"; code=$?; ls -A "$0"; exit $code'
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(folder)]
    if shutil.which(words[0]) is None or subprocess.run([*words, "true"], check=False).returncode:
        pytest.skip("no small disk can be mounted")
    return words

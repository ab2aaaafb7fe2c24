"""Damaged files: every one is read, or refused by a documented error of one line.

Nothing hangs, no file is written, no program started, no address opened. A case is known by its
format and number, so a failure repeats. `LTM_FUZZ_CASES` says how many cases of each format are
tried (`make fuzz`).
"""

import os
import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from fuzz.formats import FORMATS, Format
from fuzz.saved import SAVED

CASES = int(os.environ.get("LTM_FUZZ_CASES", "30"))

_CHANGES = {"os.mkdir": 1, "os.remove": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2}
"""Events that change files, and how many of their first arguments are paths."""
_NEVER = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")


class _Watch:
    """Notes what a case does to the world; hooks stay until Python ends, so there is only one."""

    def __init__(self) -> None:
        self.allowed: Path | None = None
        self.found: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple) -> None:
        if self.allowed is None:
            return
        if event == "open":
            path, _, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            paths = [path] if writes and isinstance(path, str | bytes | os.PathLike) else []
        else:
            paths = list(arguments[: _CHANGES.get(event, 0)])
        if event in _NEVER:
            self.found.append(f"{event}{arguments!r:.80}")
        for path in paths:
            if not Path(os.fsdecode(path)).resolve().is_relative_to(self.allowed):
                self.found.append(f"{event} of {path}")


_WATCH = _Watch()


class _HangError(BaseException):
    """A case took too long; not an Exception, which readers may catch."""


@contextmanager
def _watched(allowed: Path, seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    _WATCH.allowed = allowed
    try:
        yield
    finally:
        _WATCH.allowed = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _fault(kind: Format, path: Path, output: Path) -> str | None:
    """Read a damaged file; say what is wrong with how that ends, if anything is."""
    _WATCH.found.clear()
    try:
        with warnings.catch_warnings(), _watched(output, kind.seconds):
            warnings.simplefilter("ignore")
            kind.read(path)
    except kind.raises as error:
        message = str(error)
        if "\n" in message or not (path.name in message or str(path.parent) in message):
            return f"says {message!r:.300}"
    except _HangError:
        return f"took longer than {kind.seconds} s"
    except Exception as error:  # noqa: BLE001 - all others are faults
        return f"raised {error!r:.300}"
    return f"did {', '.join(_WATCH.found)}" if _WATCH.found else None


def _peak_memory() -> int:
    """The most bytes that this process ever had in memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("kind", [*FORMATS, *SAVED], ids=lambda kind: kind.name)
def test_damaged_files_are_read_or_refused(kind, tmp_path, monkeypatch):
    folder, output = tmp_path / "given", tmp_path / "output"
    folder.mkdir()
    output.mkdir()
    monkeypatch.chdir(output)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = kind.make(folder)
    good = path.read_bytes()
    kind.read(path)
    faults, memory = [], _peak_memory()
    cases = max(1, round(CASES * kind.share))
    for number in range(cases):
        path.write_bytes(kind.mutate(good, Random(f"{kind.name} {number}")))
        if fault := _fault(kind, path, output):
            faults.append(f"case {number} {fault}")
    assert not faults, f"{len(faults)} of {cases}: " + "; ".join(faults[:5])
    assert _peak_memory() - memory < 2**30


def test_the_watch_sees_what_cases_must_not_do(tmp_path):
    """A suite that never fails proves nothing."""

    def endless(path: Path) -> None:
        while True:
            pass

    def kind(read, **options):
        return Format(name="bad", make=lambda folder: folder, read=read, **options)

    path = tmp_path / "file"
    path.write_bytes(b"")
    output = tmp_path / "output"
    assert _fault(kind(lambda path: None), path, output) is None
    assert "took longer" in str(_fault(kind(endless, seconds=0.05), path, output))
    assert "raised KeyError" in str(_fault(kind(lambda path: {}["a"]), path, output))
    assert "says" in str(_fault(kind(lambda path: int("a")), path, output))
    assert "did open" in str(_fault(kind(lambda path: path.write_bytes(b"")), path, output))
    escape = output / ".." / "escaped"
    assert "did os.mkdir" in str(_fault(kind(lambda path: escape.mkdir()), path, output))

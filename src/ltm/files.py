"""Files of results. Folders are checked before any work; files are written whole or not at all."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ltm.interruption import in_steps

METRICS = "metrics.json"
"""The file of a run's numbers, written last: if it is there, all others are."""
_LARGEST_JSON = 2**28


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
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step."""
    write_bytes(path, text.encode())


def write_json(path: Path, values: object) -> None:
    """Write a readable JSON file in one step."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; one that is damaged or too large is a ValueError."""
    size = path.stat().st_size
    if size > _LARGEST_JSON:
        raise ValueError(f"{path} has {size} bytes; at most {_LARGEST_JSON} are read")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON ({error}); copy it again") from error


@contextmanager
def locked(path: Path, timeout: float = -1) -> Iterator[None]:
    """Hold the lock file `path` while inside; wait for its holder, forever by default."""
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path, timeout=timeout):
        yield


@contextmanager
def shared_lock(path: Path, *, exclusive: bool) -> Iterator[bool]:
    """Hold the lock file `path`, alone or together with others; yields whether it had to wait.

    Windows has no such locks, so nobody waits there.
    """
    try:
        import fcntl
    except ImportError:  # pragma: no cover
        yield False
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    kind, waited = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, False
    with path.open("a") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            fcntl.flock(file, kind)
        try:
            yield waited
        finally:  # closing is not enough: child processes may have inherited the open file
            fcntl.flock(file, fcntl.LOCK_UN)


# --- A folder of results --------------------------------------------------------------------------

_LOCK = ".lock"
_UNFINISHED = ".unfinished-"
"""How the name of a folder begins in which results are being written."""
_COMPLETE = ".complete"
"""Its name once all is written and its files move to their places."""
_REPLACED = ".replaced"
"""A file in it: patterns of earlier results, which the new ones replace."""

command_words: ContextVar[str | None] = ContextVar("command_words", default=None)
"""The running command, for messages to other runs; by default this process's arguments."""

_LOOKS, _PATIENCE, _PAUSE = 3, 20, 0.05
"""How often to try a lock, how often to wait for a process that is nearly done, and the seconds
between tries."""

_held: set[tuple[Path, int]] = set()
"""The folders that this process holds, each with the thread that holds it."""
_handles: set[int] = set()


class FolderInUseError(FileExistsError):
    """Another run writes into the folder."""


@contextmanager
def output_folder(
    output: str | Path | None,
    *,
    overwrite: bool = True,
    other_ways: str = "use --overwrite",
    written: Sequence[str] = (),
    shared: bool = False,
) -> Iterator[None]:
    """Hold a folder of results during a run; refuse what cannot work before the run begins.

    A second run into the folder is refused with `FolderInUseError`. The operating system releases
    the lock of a killed run. Of the processes that torchrun started, the first holds the folder.
    The thread that holds it may ask again, as `save` does inside a run. At the end, a folder that
    was made here and is still empty is removed.

    Args:
        output: The folder; nothing is held where it is None.
        overwrite: Allow a folder that holds another run's results, or a file named in `written`,
            which may be the user's own.
        other_ways: What else the user can do, for the error message.
        written: Names of files that the run will write.
        shared: Allow other runs that share the folder; they agree on who writes what.
    """
    if output is None or os.environ.get("RANK", "0") != "0":
        yield
        return
    folder = Path(output)
    _require_folder(folder)
    mine = (folder.resolve(), threading.get_ident())
    if mine in _held:
        _refuse_results(folder, overwrite, other_ways, written)
        yield
        return
    made = [place for place in (folder, *folder.parents) if not _is_there(place)]
    handle = _lock(folder, shared=shared)
    _held.add(mine)
    try:
        if not shared and handle is not None:
            _tidy(folder)
        _refuse_results(folder, overwrite, other_ways, written)
        yield
    finally:
        _held.discard(mine)
        _unlock(folder, handle)
        with suppress(OSError):
            for place in made:
                place.rmdir()


@contextmanager
def results_in(output: str | Path, *, replaced: Sequence[str] = ()) -> Iterator[Path]:
    """Write the results of a run as one set, into the temporary folder that this yields.

    At the end they move to `output`, which is held meanwhile, and older files there that match
    `replaced` are removed. If anything fails before that, `output` stays as it was. If the process
    is killed while files move, `complete` moves the rest.
    """
    folder = Path(output)
    with output_folder(folder):
        aside = Path(tempfile.mkdtemp(dir=folder, prefix=_UNFINISHED))
        try:
            yield aside
            write_json(aside / _REPLACED, list(replaced))
            for path in _files_in(aside):
                _sync(path)
            with in_steps():  # Ctrl-C waits
                aside.replace(folder / _COMPLETE)
                _move_in(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def complete(folder: Path) -> None:
    """Move results that a killed process has written, but not moved, to their places."""
    for _ in range(_PATIENCE):
        if not (folder / _COMPLETE).is_dir():
            return
        with suppress(FolderInUseError, PermissionError), output_folder(folder):
            return
        time.sleep(_PAUSE)  # whoever holds it is just doing this


def _tidy(folder: Path) -> None:
    """Finish, or remove, what a killed process has left."""
    if (folder / _COMPLETE).is_dir():
        _move_in(folder)
    for left in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


def _move_in(folder: Path) -> None:
    """Move complete results to their places; if it is cut short, it can be repeated.

    Files that say that the others are there are removed first and moved last.
    """
    aside = folder / _COMPLETE
    replaced: list[str] = []
    with suppress(OSError, ValueError):
        replaced = json.loads((aside / _REPLACED).read_text(encoding="utf-8"))
    files = sorted(_files_in(aside), key=lambda path: _DECIDING.get(path.name, 0))
    new = [path.relative_to(aside) for path in files if path.name != _REPLACED]
    outdated = {path for pattern in replaced for path in folder.glob(pattern)}
    outdated -= {folder / name for name in new if name.name not in _DECIDING}
    for path in (*outdated, *(folder / name for name in _DECIDING if Path(name) in new)):
        path.unlink(missing_ok=True)
    (aside / _REPLACED).unlink(missing_ok=True)  # a repetition must not remove new files
    for name in new:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).replace(folder / name)
    shutil.rmtree(aside)


_DECIDING = {"config.json": 1, METRICS: 2}
"""Files that say that the others are there too."""


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _lock(folder: Path, *, shared: bool) -> int | None:
    """Lock a folder, and note by whom; None where the system has no locks."""
    try:
        import fcntl
    except ImportError:  # pragma: no cover
        folder.mkdir(parents=True, exist_ok=True)
        return None
    path, kind = folder / _LOCK, fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    refused = 0
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # another run has just removed the folder
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            refused += 1
            if refused < _LOOKS:
                time.sleep(_PAUSE)
                continue
            raise FolderInUseError(f"output {folder} is in use by {_holder(path)}") from None
        except OSError:  # a file system without locks
            os.close(handle)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                break
        os.close(handle)  # its last holder has removed the file
    words = command_words.get() or shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    about = {"command": words, "process": os.getpid(), "host": socket.gethostname(), "since": since}
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(about).encode(), 0)
    _handles.add(handle)
    return handle


def _holder(path: Path) -> str:
    """Who holds a lock, in words."""
    for _ in range(_PATIENCE):
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            return (
                f"{about['command']} (process {about['process']} on {about['host']}, since "
                f"{about['since']}): wait for it, or choose another folder"
            )
        except (OSError, ValueError, KeyError, TypeError):
            time.sleep(_PAUSE)  # it has just begun
    return "another run: wait for it, or choose another folder"


def _unlock(folder: Path, handle: int | None) -> None:
    """Release a folder; the last of those who share it removes the lock file."""
    if handle is None:
        return
    import fcntl

    _handles.discard(handle)
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / _LOCK).unlink()
    os.close(handle)


def _forget_locks() -> None:
    """Close the locks in a forked worker, which may live longer than the run."""
    for handle in _handles:
        with suppress(OSError):
            os.close(handle)
    _handles.clear()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def _require_folder(output: Path) -> None:
    """Refuse a path that cannot become a folder of results, without creating anything."""
    try:
        nearest = next(place for place in (output, *output.parents) if _is_there(place))
        if nearest == output and not output.is_dir():
            raise ValueError(f"output is {output}, a file: a folder is needed")
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise PermissionError(
            f"output {output} cannot be written to ({error.strerror}): choose another folder"
        ) from error


def _refuse_results(output: Path, overwrite: bool, other_ways: str, written: Sequence[str]) -> None:
    if not overwrite and (output / METRICS).exists():
        raise FileExistsError(
            f"output {output} holds the results of another run: choose another folder, or "
            f"{other_ways}"
        )
    for name in () if overwrite else written:
        if _is_there(output / name):
            raise FileExistsError(
                f"output {output} has a {name}, which would be replaced: choose another folder, or "
                f"{other_ways}"
            )


def _is_there(place: Path) -> bool:
    """Whether the path exists, even as a dangling link; without permission to look, an error."""
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def write_metrics(output: str | Path | None, metrics: Mapping[str, object]) -> None:
    """Write `metrics.json` into the folder `output`, if one was asked for."""
    if output is not None:
        with output_folder(output):
            write_json(Path(output) / METRICS, metrics)

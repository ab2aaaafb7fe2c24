"""Files in a folder of results: checked before any work, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step."""
    write_bytes(path, text.encode())


def write_json(path: Path, values: object) -> None:
    """Write a readable JSON file in one step."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; what is none is a ValueError of one sentence."""
    size = path.stat().st_size
    if size > _LARGEST_JSON:
        raise ValueError(f"{path} has {size} bytes; at most {_LARGEST_JSON} are read")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no readable JSON ({error}); copy it again") from error


@contextmanager
def locked(path: Path, timeout: float = -1) -> Iterator[None]:
    """Hold the lock file `path` while inside; wait for whoever holds it, for ever by default."""
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path, timeout=timeout):
        yield


@contextmanager
def shared_lock(path: Path, *, exclusive: bool) -> Iterator[bool]:
    """Hold the file `path` together with others, or alone; yields whether it had to wait for that.

    Where the system has no such locks (Windows), nobody waits.
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
        finally:  # at once: child processes may have inherited the open file
            fcntl.flock(file, fcntl.LOCK_UN)


def check_folder(
    output: Path | None,
    *,
    overwrite: bool = True,
    other_ways: str = "use --overwrite",
    written: Sequence[str] = (),
) -> None:
    """Say before any work is done that `output` cannot be a folder of results; nothing stays.

    Without `overwrite` a folder that holds another run's results is refused, and so is one with a
    file of a name that is to be `written`, which may be the user's own.
    """
    if output is None:
        return
    try:
        # Nothing is made: other processes may be about to make the same folders.
        nearest = next(place for place in (output, *output.parents) if _is_there(place))
        if nearest == output and not output.is_dir():
            raise ValueError(f"output is {output}, a file: a folder is needed")
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise PermissionError(
            f"output {output} cannot be written to ({error.strerror}): choose another folder"
        ) from error
    if not overwrite and (output / "metrics.json").exists():
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
    """Whether there is anything at all, a link to nowhere too; what cannot be known is an error."""
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def write_metrics(output: Path | None, metrics: Mapping[str, object]) -> None:
    """Write `metrics.json` into the folder `output`, if one was asked for."""
    if output is not None:
        write_json(output / "metrics.json", metrics)

"""Checkpoints, which are complete or absent: written aside, synced, then renamed.

A checkpoint is a folder `epoch-0007`: weights in safetensors, the rest of the state in a file that
holds tensors and plain values only, and `manifest.json` with sizes and checksums, written last.
Random numbers need no file: every epoch draws its own from the seed and its number.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from safetensors.torch import load as load_tensors, save as save_tensors
from torch import Tensor

from ltm.core.validation import check_entries, first_line
from ltm.files import read_json, write_bytes

_MANIFEST = "manifest.json"
_STATE = "state.pt"
_WEIGHTS = "weights.safetensors"
SETTINGS = "config.yaml"
_FILE = re.compile(r"\w{1,50}\.\w{1,20}", re.ASCII)
_PREFIX, _UNFINISHED = "epoch-", ".unfinished-"


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint was damaged, so another one was read."""


class OutOfSpaceError(ValueError):
    """A run could not write what it has to keep."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    epoch: int
    """Epochs that were finished."""
    score: float | None
    """What the best checkpoint is chosen by; None if it cannot be the best."""
    history: list[dict[str, Any]]
    """The log of all epochs so far."""

    def weights(self, name: str = "weights") -> dict[str, Tensor]:
        """Tensors by name; those called "ema" are averaged weights."""
        return load_tensors((self.folder / f"{name}.safetensors").read_bytes())

    def has(self, name: str) -> bool:
        """Whether there are tensors of that name."""
        return (self.folder / f"{name}.safetensors").is_file()

    def state(self) -> dict[str, Any]:
        """Optimiser and counters. Nothing is unpickled but tensors and plain values."""
        path = self.folder / _STATE
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"  # torch would unpack older formats on the disk
        try:
            if is_zip:
                return torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception:  # noqa: BLE001, S110 - torch's message advises to load it unsafely
            pass
        raise ValueError(
            f"{path} cannot be read: it is damaged, or holds more than tensors and plain values; "
            "delete its folder to continue from the checkpoint before"
        )


class Checkpoints:
    """The checkpoints of a run: the last two, the best one, and each n-th if asked for."""

    def __init__(
        self, folder: str | Path, *, keep_every: int = 0, row_type: type[Any] | None = None
    ) -> None:
        """Read from a folder, and write to it.

        Args:
            folder: where they are.
            keep_every: also keep each n-th; 0 for none.
            row_type: the dataclass of the log's rows; a checkpoint with other rows is damaged.
        """
        self.folder = Path(folder)
        self.keep_every = keep_every
        self.row_type = row_type

    def save(
        self,
        *,
        epoch: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        score: float | None,
        history: list[dict[str, Any]],
        settings: str | None = None,
    ) -> Path:
        """Write a checkpoint, and delete those that are no longer needed.

        `settings` is a copy of the run's `config.yaml`.
        """
        files: dict[str, Callable[[], bytes]] = {
            f"{name}.safetensors": lambda values=values: _tensor_bytes(values)
            for name, values in tensors.items()
        }
        files[_STATE] = lambda: _state_bytes(state)
        if settings is not None:
            files[SETTINGS] = settings.encode
        target = self.folder / f"{_PREFIX}{epoch:04d}"
        with self.space_for(f"the checkpoint of epoch {epoch}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            aside = self.folder / f"{_UNFINISHED}{epoch:04d}"
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            written = {name: _write(aside / name, make()) for name, make in files.items()}
            content = {"epoch": epoch, "score": score, "files": written, "history": history}
            content["crc32"] = _content_crc(content)
            _write(aside / _MANIFEST, json.dumps(content, indent=1).encode())
            _sync_folder(aside)
            shutil.rmtree(target, ignore_errors=True)
            aside.replace(target)
            _sync_folder(self.folder)
        self._prune()
        return target

    def latest(self) -> Checkpoint | None:
        """The last checkpoint; damaged ones are skipped with a warning."""
        return self._first_whole(reversed(self._folders()))

    def best(self) -> Checkpoint | None:
        """The checkpoint of the highest score; damaged ones are skipped with a warning."""
        return self._first_whole(checkpoint.folder for checkpoint in _by_score(self._complete()))

    def _first_whole(self, folders: Iterable[Path]) -> Checkpoint | None:
        for folder in folders:
            try:
                return _read(folder, self.row_type)
            except ValueError as error:
                warnings.warn(
                    f"skipped checkpoint {folder}: {error}", DamagedCheckpointWarning, stacklevel=3
                )
        return None

    def __len__(self) -> int:
        return len(self._folders())

    def clear(self) -> None:
        """Delete all checkpoints."""
        for folder in self._folders():
            shutil.rmtree(folder)

    def _folders(self) -> list[Path]:
        found = self.folder.glob(f"{_PREFIX}[0-9]*") if self.folder.is_dir() else ()
        return sorted(found, key=lambda folder: (len(folder.name), folder.name))

    def _complete(self) -> list[Checkpoint]:
        """The checkpoints that have all their files, whose content is not checked."""
        found: list[Checkpoint] = []
        for folder in self._folders():
            with suppress(ValueError):
                found.append(_read(folder, self.row_type, checksums=False))
        return found

    def _prune(self) -> None:
        found = self._complete()
        kept = {c.folder for c in [*found[-2:], *_by_score(found)[:1]]}
        if self.keep_every:
            kept |= {c.folder for c in found if c.epoch % self.keep_every == 0}
        for checkpoint in found:
            if checkpoint.folder not in kept:
                shutil.rmtree(checkpoint.folder, ignore_errors=True)

    @contextmanager
    def space_for(self, what: str) -> Iterator[None]:
        """If the disk is full, say so in one sentence, with the last good checkpoint."""
        try:
            yield
        except OSError as error:
            for folder in self.folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(folder, ignore_errors=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            good = [c.folder.name for c in self._complete()]
            last = f"{good[-1]} is the last good one" if good else "there is none before it"
            raise OutOfSpaceError(
                f"no space left for {what} in {self.folder}; {last}: free some space and continue "
                "with --resume auto"
            ) from error


def _by_score(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Those that have a score, the highest first; of equal ones the latest."""
    scored = [c for c in checkpoints if c.score is not None]
    return sorted(scored, key=lambda c: (c.score, c.epoch), reverse=True)


_ENTRIES: dict[str, Any] = {
    "epoch": int,
    "score": float | None,
    "files": dict[str, dict[Literal["bytes", "crc32"], int]],
    "history": tuple[dict[str, Any], ...],
    "crc32": int,
}


def _read(folder: Path, row_type: type[Any] | None, *, checksums: bool = True) -> Checkpoint:
    """Read the manifest of a checkpoint and check its files; a ValueError says what is wrong."""
    if not (folder / _MANIFEST).is_file():
        raise ValueError("it was not finished")
    try:
        content = read_json(folder / _MANIFEST)
        _check_content(content, folder.name, row_type)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{_MANIFEST} is unreadable ({first_line(error)})") from error
    _check_files(folder, content["files"], checksums=checksums)
    return Checkpoint(
        folder=folder,
        epoch=content["epoch"],
        score=content["score"],
        history=content["history"],
    )


def _check_content(content: dict[str, Any], folder: str, row_type: type[Any] | None) -> None:
    check_entries(_with_finite(content), _ENTRIES, required=_ENTRIES.keys() - {"crc32"})
    epoch, history = content["epoch"], content["history"]
    if content.get("crc32") not in (None, _content_crc(content)):
        raise ValueError("it was changed")
    if folder != f"{_PREFIX}{epoch:04d}":
        raise ValueError("it is of another epoch")
    if row_type is not None:
        if [row.get("epoch") for row in history] != [at + 1 for at in range(len(history))]:
            raise ValueError("it does not log every epoch")
        if len(history) != epoch:
            raise ValueError(f"it logs {len(history)} epochs")
        hints, columns = get_type_hints(row_type), fields(row_type)
        required = [column.name for column in columns if column.default is MISSING]
        types = {column.name: hints[column.name] for column in columns}
        for row in history:
            check_entries(_with_finite(row), types, "history.", required=required)


def _with_finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with zeros for floats: a logged number or a score need not be finite."""
    return {name: 0.0 if isinstance(value, float) else value for name, value in values.items()}


def _check_files(folder: Path, files: Mapping[str, Mapping[str, int]], *, checksums: bool) -> None:
    for name in {_WEIGHTS, _STATE} - files.keys():
        raise ValueError(f"{_MANIFEST} is unreadable (it lacks {name})")
    for name, expected in files.items():
        path = folder / name
        if not _FILE.fullmatch(name):
            raise ValueError(f"{_MANIFEST} is unreadable ({name!r:.80} cannot be a file's name)")
        size = path.stat().st_size if path.is_file() else 0
        if size != expected.get("bytes"):
            raise ValueError(f"{name} has {size} bytes instead of {expected.get('bytes')}")
        if checksums and zlib.crc32(path.read_bytes()) != expected.get("crc32"):
            raise ValueError(f"{name} is damaged")


def _content_crc(content: Mapping[str, Any]) -> int:
    entries = {name: value for name, value in content.items() if name != "crc32"}
    return zlib.crc32(json.dumps(entries, sort_keys=True).encode())


def _write(path: Path, data: bytes) -> dict[str, int]:
    write_bytes(path, data)
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


def _sync_folder(folder: Path) -> None:
    """Make a folder's entries durable, as fsync of a file does not."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _tensor_bytes(values: Mapping[str, Tensor]) -> bytes:
    return save_tensors({name: v.detach().cpu().contiguous().clone() for name, v in values.items()})


def _state_bytes(state: Mapping[str, Any]) -> bytes:
    buffer = BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()

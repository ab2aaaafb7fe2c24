"""Checkpoints that are whole or not there: written aside, synced, then renamed.

A checkpoint is a folder `epoch-0007`: weights in safetensors, the rest of the state in a file that
holds tensors and plain values only, and `manifest.json` with sizes and checksums, written last.
Random numbers need no file: every epoch draws its own from the seed and its number.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors, save as save_tensors
from torch import Tensor

from ltm.files import write_bytes

_MANIFEST = "manifest.json"
_STATE = "state.pt"
_PREFIX, _UNFINISHED = "epoch-", ".unfinished-"


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint was incomplete; an earlier one took its place."""


class OutOfSpaceError(ValueError):
    """A checkpoint could not be written."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    epoch: int
    """Epochs that were finished."""
    score: float | None
    """What the best checkpoint is chosen by; None where it takes no part."""
    history: list[dict[str, Any]]
    """The log of all epochs so far."""

    def weights(self, name: str = "weights") -> dict[str, Tensor]:
        """Tensors by name; "ema" where averaged weights were kept."""
        return load_tensors((self.folder / f"{name}.safetensors").read_bytes())

    def has(self, name: str) -> bool:
        """Whether there are tensors of that name."""
        return (self.folder / f"{name}.safetensors").is_file()

    def state(self) -> dict[str, Any]:
        """Optimiser and counters. Nothing is unpickled but tensors and plain values."""
        return torch.load(self.folder / _STATE, map_location="cpu", weights_only=True)


class Checkpoints:
    """The checkpoints of a run: the last, the one before, the best, and each n-th if asked for."""

    def __init__(self, folder: str | Path, *, keep_every: int = 0) -> None:
        self.folder = Path(folder)
        self.keep_every = keep_every

    def save(
        self,
        *,
        epoch: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        score: float | None,
        history: list[dict[str, Any]],
    ) -> Path:
        """Write a checkpoint, and drop those that are no longer wanted."""
        files: dict[str, Callable[[], bytes]] = {
            f"{name}.safetensors": lambda values=values: _tensor_bytes(values)
            for name, values in tensors.items()
        }
        files[_STATE] = lambda: _state_bytes(state)
        target = self.folder / f"{_PREFIX}{epoch:04d}"
        with self._space_for(epoch):
            self.folder.mkdir(parents=True, exist_ok=True)
            aside = self.folder / f"{_UNFINISHED}{epoch:04d}"
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            written = {name: _write(aside / name, make()) for name, make in files.items()}
            content = {"epoch": epoch, "score": score, "files": written, "history": history}
            _write(aside / _MANIFEST, json.dumps(content, indent=1).encode())
            _sync_folder(aside)
            shutil.rmtree(target, ignore_errors=True)
            aside.replace(target)
            _sync_folder(self.folder)
        self._prune()
        return target

    def latest(self) -> Checkpoint | None:
        """The last complete checkpoint; damaged ones are skipped with a warning."""
        for folder in reversed(self._folders()):
            problem = damage(folder)
            if problem is None:
                return _read(folder)
            warnings.warn(
                f"skipped checkpoint {folder}: {problem}", DamagedCheckpointWarning, stacklevel=2
            )
        return None

    def best(self) -> Checkpoint | None:
        """The complete checkpoint of the highest score, the latest of equals."""
        scored = [c for c in self._complete() if c.score is not None]
        return max(scored, key=lambda c: (c.score, c.epoch)) if scored else None

    def __len__(self) -> int:
        return len(self._folders())

    def clear(self) -> None:
        """Delete all checkpoints."""
        for folder in self._folders():
            shutil.rmtree(folder)

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob(f"{_PREFIX}[0-9]*")) if self.folder.is_dir() else []

    def _complete(self) -> list[Checkpoint]:
        return [
            _read(folder) for folder in self._folders() if damage(folder, checksums=False) is None
        ]

    def _prune(self) -> None:
        found = self._complete()
        best = self.best()
        kept = {c.folder for c in found[-2:]} | ({best.folder} if best is not None else set())
        if self.keep_every:
            kept |= {c.folder for c in found if c.epoch % self.keep_every == 0}
        for checkpoint in found:
            if checkpoint.folder not in kept:
                shutil.rmtree(checkpoint.folder, ignore_errors=True)

    @contextmanager
    def _space_for(self, epoch: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            shutil.rmtree(self.folder / f"{_UNFINISHED}{epoch:04d}", ignore_errors=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            good = [c.folder.name for c in self._complete()]
            last = f"{good[-1]} is the last good one" if good else "there is none before it"
            raise OutOfSpaceError(
                f"no space left for the checkpoint of epoch {epoch} in {self.folder}; {last}: "
                "free some space and continue with --resume auto"
            ) from error


def damage(folder: Path, *, checksums: bool = True) -> str | None:
    """What is wrong with a checkpoint; None if nothing is."""
    try:
        files = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return "it was not finished"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{_MANIFEST} is unreadable"
    for name, expected in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        if checksums and zlib.crc32(path.read_bytes()) != expected["crc32"]:
            return f"{name} is damaged"
    return None


def _read(folder: Path) -> Checkpoint:
    content = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    return Checkpoint(
        folder=folder,
        epoch=content["epoch"],
        score=content["score"],
        history=content["history"],
    )


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

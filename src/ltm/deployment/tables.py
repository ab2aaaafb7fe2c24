"""Answers as Parquet files, one for each part of the images, each written whole or not at all.

A file says from which images and by which network it was made. So a stopped run can be continued,
but not with another network or other images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ltm.data.sources import Part
from ltm.extras import require
from ltm.files import METRICS, write_bytes

FOLDER = "parquet"
"""A folder of its own, because readers take every file in a folder for Parquet."""
PATTERN = "part-*.parquet"
_ABOUT, _KEY = b"ltm.run", b"ltm.part"
_TEXTS = ["id", "path", "error", "classes.list.element"]
"""Columns whose values repeat; looking for repetitions among numbers takes most of the time."""


class Tables:
    """The Parquet files of a folder.

    Rows may come in any order, and more than once. When a part is complete, a thread writes its
    file while the rows of the next one come; `close` waits for it.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        require("pyarrow")
        self.folder = folder / FOLDER
        self._about: dict[str, Any] = json.loads(json.dumps(about))  # as files have it
        self._keys: dict[int, str] = {}
        self._waiting: dict[int, _Rows] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tables")
        self._writing: Future[None] | None = None
        self.rows = self.unreadable = self.files = 0

    def path(self, number: int) -> Path:
        """The file of a part."""
        return self.folder / f"part-{number:05d}.parquet"

    def has(self, number: int, part: Part) -> bool:
        """Whether a part is done; a file of another run is an error."""
        self._keys[number] = part.key
        path = self.path(number)
        if not path.is_file():
            return False
        about, key = _origin(path)
        different = [name for name in self._about if about.get(name) != self._about[name]]
        if different:
            raise ValueError(
                f"{path} was written with other settings ({', '.join(different)}): "
                "choose another folder, or use --overwrite"
            )
        if key != part.key:
            raise ValueError(
                f"{path} was made from other images: choose another folder, or use --overwrite"
            )
        return True

    def add(self, batch: Mapping[str, Any]) -> int:
        """Take rows, which name their part and their place in it; returns how many are new."""
        columns = {name: _as_array(values) for name, values in batch.items()}
        new = 0
        for number in np.unique(columns["part"]).tolist():
            of_part = columns["part"] == number
            rows = int(columns["part_rows"][of_part][0])
            waiting = self._waiting.setdefault(number, _Rows(rows))
            new += waiting.add({name: values[of_part] for name, values in columns.items()})
            if waiting.missing == 0:
                del self._waiting[number]
                self._finish()  # memory holds one file that is being written
                self._writing = self._writer.submit(self._write, number, waiting)
        return new

    def close(self) -> None:
        """Wait until all complete parts are written."""
        self._writer.shutdown()
        self._finish()

    def _finish(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, number: int, rows: _Rows) -> None:
        pyarrow, columns = require("pyarrow"), rows.columns()
        unreadable = np.array([error is not None for error in columns["error"]])
        about = {_ABOUT: json.dumps(self._about), _KEY: self._keys.get(number, "")}
        filled = {n: _column(n, values, unreadable) for n, values in columns.items()}
        table = pyarrow.table(filled).replace_schema_metadata(about)
        buffer = pyarrow.BufferOutputStream()
        repeating: Any = {"use_dictionary": _TEXTS, "write_statistics": _TEXTS}
        require("pyarrow.parquet").write_table(table, buffer, **repeating)
        (self.folder.parent / METRICS).unlink(missing_ok=True)
        write_bytes(self.path(number), buffer.getvalue().to_pybytes())
        self.files += 1
        self.rows += len(unreadable)
        self.unreadable += int(unreadable.sum())


class _Rows:
    """Rows of a part, until it is complete."""

    def __init__(self, rows: int) -> None:
        self.missing = rows
        self._seen = np.zeros(rows, dtype=bool)
        self._batches: list[dict[str, np.ndarray]] = []

    def add(self, batch: dict[str, np.ndarray]) -> int:
        new = ~self._seen[batch["place"]]
        self._seen[batch["place"]] = True
        self._batches.append({name: values[new] for name, values in batch.items()})
        self.missing -= int(new.sum())
        return int(new.sum())

    def columns(self) -> dict[str, np.ndarray]:
        """What goes into the file, in order."""
        joint = {n: np.concatenate([b[n] for b in self._batches]) for n in self._batches[0]}
        order = np.argsort(joint["place"])
        return {name: values[order] for name, values in joint.items() if name not in _HIDDEN}


def _as_array(values: Any) -> np.ndarray:
    """Texts as objects: numpy would make all of them as long as the longest."""
    if isinstance(values, np.ndarray):
        return values
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


_HIDDEN = ("part", "place", "part_rows")


def _column(name: str, values: np.ndarray, unreadable: np.ndarray) -> Any:
    """A column of text, or of lists of a fixed size, null for an unreadable image."""
    pyarrow = require("pyarrow")
    if values.ndim == 1:
        return pyarrow.array([None if v is None else str(v) for v in values], pyarrow.string())
    flat = pyarrow.array(values.reshape(-1), _KINDS[name](pyarrow))
    mask = pyarrow.array(unreadable)
    return pyarrow.FixedSizeListArray.from_arrays(flat, values.shape[1], mask=mask)


_KINDS: dict[str, Any] = {
    "embedding": lambda pyarrow: pyarrow.float16(),
    "classes": lambda pyarrow: pyarrow.string(),
    "indices": lambda pyarrow: pyarrow.int32(),
    "logits": lambda pyarrow: pyarrow.float32(),
    "probabilities": lambda pyarrow: pyarrow.float32(),
}


def _origin(path: Path) -> tuple[dict[str, Any], str]:
    """By which run a file was written, and from which part."""
    try:
        metadata = require("pyarrow.parquet").read_schema(path).metadata or {}
        return _object(metadata.get(_ABOUT, b"{}")), metadata.get(_KEY, b"").decode()
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} is not a readable file of embeddings; delete it, and it is written again"
        ) from error


def _object(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{found} is not an object")
    return found

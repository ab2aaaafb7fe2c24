"""Any number of images without labels, found part by part.

A part is a tar shard, a Parquet file, or some images of folders, archives and lists. Its key is
known before its images are looked for, so finished parts cost nothing. An `ImageRef` says where an
image is; it is small and can be sent to another process, which reads the image.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from PIL import Image

from ltm.data.config import is_generated
from ltm.data.datasets import is_folder_of, open_dataset, open_hugging_face
from ltm.data.decoding import ARRAYS, decode, decode_array, read_image
from ltm.data.folders import Files, list_images, open_files, walk_images
from ltm.data.images import ImageFiles
from ltm.data.limits import LimitedSource, Limits, split_limits
from ltm.data.shards import expand_shards, require_shards, shard_images
from ltm.extras import require

STDIN = "-"
_LISTS = (".txt", ".lst", ".list")
"""Text files with these endings are lists of paths."""
_ROW_BYTES = 512
"""What a row of a Parquet file counts at least, as much as a member of a tar."""
_READ_ROWS = 8
_IDS = ("id", "__key__", "key", "path", "url")
"""Columns of a Parquet file that may name its images."""

Read = Callable[..., Image.Image | np.ndarray]


class ImageRef(NamedTuple):
    """One image: what to call it, and how to read it or why it cannot be read."""

    id: str
    path: str
    read: Read | None = None
    place: tuple[Any, ...] = ()
    error: str | None = None

    def open(self) -> Image.Image | np.ndarray:
        """The decoded image, or an array of 8-bit pixels; any error may be raised."""
        if self.read is None:
            raise ValueError(self.error or "there is no image")
        return self.read(*self.place)


class Part(NamedTuple):
    """Images that belong together: a tar shard, or a slice of a folder."""

    key: str
    """Identifies these images; for a shard without looking into it."""
    images: Callable[[], Sequence[ImageRef]]


def check_inputs(inputs: str | Path | Iterable[str | Path]) -> tuple[str, ...]:
    """The inputs by their names; none at all, or one that does not exist, is an error."""
    names = tuple(map(str, [inputs] if isinstance(inputs, str | Path) else inputs))
    if not names:
        raise ValueError(
            f"inputs: give images, folders, archives, shards, lists of paths or {STDIN}"
        )
    for name in names:
        bare = split_limits(name).name
        named = name == STDIN or _is_indexed(bare) or _is_pattern(bare)
        if not named and not Path(bare).exists():
            raise FileNotFoundError(f"{name}: there is no such image, folder or list of paths")
    return names


def find_parts(inputs: Iterable[str], *, rows: int = 4096, split: str = "train") -> Iterator[Part]:
    """The parts of all inputs, in their order.

    Args:
        inputs: images, folders, .zip archives, lists of paths, `-` for paths from standard input,
            tar shards, Parquet files, `hf:NAME` or `shapes`. Limits may be written behind each.
        rows: images in a part, for those that are not in shards.
        split: of `hf:NAME`, of generated shapes and of shards whose names hold {split}.
    """
    opened = (_open(split_limits(name), split) for name in inputs)
    for in_shards, group in itertools.groupby(opened, lambda found: isinstance(found, list)):
        found: Iterator[Any] = itertools.chain.from_iterable(group)
        if in_shards:
            yield from found
        else:
            while taken := tuple(itertools.islice(found, rows)):
                yield Part(_digest(image.path for image in taken), lambda taken=taken: taken)


def find_images(inputs: Iterable[str], *, split: str = "train") -> Iterator[ImageRef]:
    """All images of all inputs, in order; memory holds those of one part."""
    for part in find_parts(inputs, rows=1, split=split):
        yield from part.images()


def path_refs(paths: Iterable[str], words: str = "", base: str | None = None) -> Iterator[ImageRef]:
    """Images by their paths; `words` are limits, `base` is the folder they were found in."""
    for path in paths:
        name = split_limits(path).name
        known = name if base is None else os.path.relpath(name, base).replace(os.sep, "/")
        yield ImageRef(known, name, _read_path, (path + words,))


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()


def _open(source: LimitedSource, split: str) -> Iterable[ImageRef] | list[Part]:
    """Open an input by the form of its name: parts if it is in shards, else its images."""
    name, limits, words = source
    shards = _open_shards(name, limits, split)
    if shards or _is_indexed(name):
        return shards or _indexed(name, split, words)
    if name.lower().endswith(".zip"):
        return _members(name, limits)
    if name == STDIN:
        return path_refs(_lines(sys.stdin))
    if Path(name).is_dir():
        return path_refs(walk_images(name), words, name)
    listed = name.lower().endswith(_LISTS)
    return path_refs(_listed(Path(name)) if listed else [name], words)


def _open_shards(name: str, limits: Limits, split: str) -> list[Part]:
    for suffix, part in _SHARDS.items():
        folder = is_folder_of(suffix, Path(name))
        if folder or name.endswith(suffix):
            paths = sorted(Path(name).glob(f"*{suffix}")) if folder else expand_shards(name, split)
            require_shards(paths)
            return [part(path, limits) for path in paths]
    return []


def _is_indexed(name: str) -> bool:
    return name.startswith("hf:") or is_generated(name)


def _is_pattern(name: str) -> bool:
    return name.endswith(tuple(_SHARDS)) and any(letter in name for letter in "*?[{")


# --- Files ---------------------------------------------------------------------------------------


def _read_path(path: str) -> Image.Image:
    name, limits, _ = split_limits(path)
    return read_image(name, limits)


def _listed(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        yield from _lines(lines)


def _lines(lines: TextIO) -> Iterator[str]:
    return filter(None, (line.rstrip("\r\n") for line in lines))


def _members(archive: str, limits: Limits) -> Iterator[ImageRef]:
    for name in list_images(_archive(archive, limits)).images:
        yield ImageRef(name, f"{archive}/{name}", _read_member, (archive, name, limits))


@lru_cache(maxsize=4)
def _archive(path: str, limits: Limits) -> Files:
    """An archive, opened once in each process that reads from it."""
    opened = open_files(path, limits)
    assert opened is not None
    return opened


def _read_member(archive: str, name: str, limits: Limits) -> Image.Image:
    return decode(_archive(archive, limits).read(name), f"{archive}/{name}", limits)


# --- Tar shards ----------------------------------------------------------------------------------


def _tar_part(path: Path, limits: Limits) -> Part:
    def images() -> list[ImageRef]:
        return [_tar_ref(path, limits, found) for found in shard_images(path, limits)]

    return Part(_sized(path), images)


def _sized(path: Path) -> str:
    return _digest([str(path), str(path.stat().st_size)])


def _tar_ref(path: Path, limits: Limits, found: Any) -> ImageRef:
    if isinstance(found, ValueError):
        return ImageRef(str(path), str(path), error=str(found))
    where = f"{path}/{found.name}"
    return ImageRef(found.key, where, _read_extent, (str(path), *found.extent, where, limits))


class _Window(threading.local):
    """The stretch of a shard that was read last, which also holds the next images."""

    shard, start, data = "", 0, memoryview(b"")

    def read(self, shard: str, offset: int, size: int) -> memoryview:
        """Return some bytes of a shard, and keep those that follow; each thread keeps its own."""
        first = offset - self.start
        if shard != self.shard or not 0 <= first <= len(self.data) - size:
            with open(shard, "rb", buffering=0) as file:  # noqa: PTH123
                file.seek(offset)
                data = np.empty(
                    max(size, _WINDOW_BYTES), np.uint8
                )  # images still refer to the old one
                read = file.readinto(data.data)
            self.shard, self.start, self.data, first = shard, offset, data.data[:read], 0
        return self.data[first : first + size]


_WINDOW_BYTES = 2**22
_window = _Window()


def _read_extent(
    shard: str, offset: int, size: int, name: str, limits: Limits
) -> Image.Image | np.ndarray:
    data = _window.read(shard, offset, size)
    if name.endswith(tuple(ARRAYS)):
        return decode_array(data, name, limits)
    return decode(bytes(data), name, limits)


# --- Parquet -------------------------------------------------------------------------------------


def _parquet_part(path: Path, limits: Limits) -> Part:
    file = _parquet(str(path))
    column = _image_column(path, file.schema_arrow)
    groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
    inflated = sum(max(group.total_byte_size, _ROW_BYTES * group.num_rows) for group in groups)
    limits.check_inflation(path, stored=path.stat().st_size, inflated=inflated)

    def images() -> list[ImageRef]:
        key = next((name for name in _IDS if name in file.schema_arrow.names), None)
        found: list[ImageRef] = []
        for group, about in enumerate(groups):
            with _readable(str(path)):
                values = [] if key is None else _values(str(path), key, group, limits)
                keys = [str(value) for value in values]
            for row in range(about.num_rows):
                where = f"{path}[{len(found)}]"
                place = str(path), column, group, row, limits
                found.append(ImageRef(keys[row] if keys else where, where, _read_row, place))
        return found

    return Part(_sized(path), images)


@lru_cache(maxsize=8)
def _parquet(path: str) -> Any:
    with _readable(path):
        return require("pyarrow.parquet").ParquetFile(path)


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """Say which file is damaged; pyarrow does not, and some of its errors have several lines."""
    try:
        yield
    except (require("pyarrow").ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a missing file, or one that may not be read
        raise ValueError(f"{path} is not a readable Parquet file; copy it again") from error


def _values(path: str, column: str, group: int, limits: Limits) -> Any:
    """A column of a row group, a few rows at a time: a value that repeats is stored once."""
    stored, inflated, found = Path(path).stat().st_size, 0, []
    with _readable(path):
        rows = _parquet(path).metadata.row_group(group).num_rows
        batches = _parquet(path).iter_batches(_READ_ROWS, row_groups=[group], columns=[column])
        for batch in batches:
            inflated += batch.nbytes
            limits.check_inflation(path, stored=stored, inflated=inflated)
            found.append(batch.column(0))
    if sum(map(len, found)) != rows:
        raise ValueError(f"{path} does not have the {rows} rows that it tells; copy it again")
    return require("pyarrow").chunked_array(found) if rows else []


def _image_column(path: Path, schema: Any) -> str:
    """The first column of bytes, or of bytes and a path, as `datasets` writes images."""
    types = require("pyarrow").types
    for field in schema:
        inner = field.type.field("bytes").type if _has_bytes(types, field.type) else field.type
        if types.is_binary(inner) or types.is_large_binary(inner):
            return field.name
    raise ValueError(f"{path} has no column of image bytes among {', '.join(schema.names)}")


def _has_bytes(types: Any, kind: Any) -> bool:
    return types.is_struct(kind) and kind.get_field_index("bytes") >= 0


@lru_cache(maxsize=1)
def _images(path: str, column: str, group: int, limits: Limits) -> Any:
    """The images of a row group, or why it cannot be read, which is found out once."""
    try:
        return _values(path, column, group, limits)
    except ValueError as error:
        return error


def _read_row(path: str, column: str, group: int, row: int, limits: Limits) -> Image.Image:
    images = _images(path, column, group, limits)
    if isinstance(images, ValueError):
        raise images
    stored = images[row].as_py()
    data, name = stored["bytes"] if isinstance(stored, dict) else stored, f"row {row} of {path}"
    if data is None:
        raise ValueError(f"{name} has no bytes")
    limits.check("most_bytes", len(data), f"{name} has {len(data)} bytes")
    return decode(data, name, limits)


_SHARDS: dict[str, Callable[[Path, Limits], Part]] = {
    ".tar": _tar_part,
    ".parquet": _parquet_part,
}


# --- Data sets by index --------------------------------------------------------------------------


@lru_cache(maxsize=2)
def _images_of(source: str, split: str, words: str) -> ImageFiles:
    """A data set, opened once in each process that reads from it."""
    if source.startswith("hf:"):
        return open_hugging_face(source, split, split_limits(source + words).limits).files
    return open_dataset(source, split=split).files


def _indexed(source: str, split: str, words: str) -> Iterator[ImageRef]:
    for index in range(len(_images_of(source, split, words))):
        where = f"{source}/{split}[{index}]"
        yield ImageRef(where, where, _read_index, (source, split, words, index))


def _read_index(source: str, split: str, words: str, index: int) -> Image.Image:
    return _images_of(source, split, words).read(index)

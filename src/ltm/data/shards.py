"""Tar shards in webdataset's layout: `key.jpg` and `key.cls` side by side.

webdataset streams shards, and a stream cannot give the images that a sampler asks for. So the
shards are indexed once, when they are opened: tarfile finds the members, webdataset groups them
into samples, and an image is then read by its offset. Sampling, resuming and choosing a few images
are therefore the same as for folders, whatever the number of workers and processes. Only local
files are opened (webdataset runs `pipe:` URLs in a shell), nothing is unpickled, and sizes are
checked before anything is read.
"""

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ltm.data.decoding import ARRAYS, EXTENSIONS, decode
from ltm.data.images import LabelledFiles, NoLabelsError
from ltm.data.limits import Limits, read_file
from ltm.extras import require

_MOST_LABEL_BYTES = 32
_NO_LABEL = -1
_MOST_HEADER_BYTES = 2**20  # long names and pax headers, which tarfile reads at once


class ShardImages:
    """Images of tar shards, in the order of the shards as listed.

    `places` (n x 4) has for every image its shard, its number in there, its offset and its size.
    """

    def __init__(self, paths: Sequence[Path], places: np.ndarray, limits: Limits) -> None:
        self.paths = tuple(paths)
        self._places = places
        self._limits = limits

    def __len__(self) -> int:
        return len(self._places)

    def name(self, index: int) -> str:
        """Say which image this is, counted within its shard."""
        shard, number = self._places[index, :2]
        return f"{self.paths[shard]}, image {number}"

    def read(self, index: int) -> Image.Image:
        """Return the decoded image."""
        shard, _, offset, size = self._places[index].tolist()
        with self.paths[shard].open("rb") as file:
            file.seek(offset)
            return decode(file.read(size), self.name(index), self._limits)


def expand_shards(pattern: str, split: str) -> tuple[Path, ...]:
    """Turn `name-{000..123}.tar`, a glob, or a folder of .tar files into a list of paths.

    `{split}` in a pattern stands for the split; in a folder, shards that have the split's name in
    their own are chosen where there are any.
    """
    folder = Path(pattern)
    if folder.is_dir():
        paths = sorted(folder.glob("*.tar"))
        of_split = [path for path in paths if _has_word(path.stem, split)]
        return tuple(of_split or paths)
    found: list[Path] = []
    expand = require("braceexpand").braceexpand  # comes with webdataset
    for name in expand(pattern.replace("{split}", split), escape=False):
        path = Path(name)
        is_glob = any(character in path.name for character in "*?[")
        found += sorted(path.parent.glob(path.name)) if is_glob else [path]
    return tuple(found)


def _has_word(name: str, start: str) -> bool:
    words = "".join(c if c.isalnum() else " " for c in name).split()
    return any(word.startswith(start) for word in words)


def open_shards(
    paths: Sequence[Path], limits: Limits | None = None, *, labelled: bool = True
) -> LabelledFiles:
    """Index shards; `classes.txt` beside them, a name a line, names the classes.

    If `labelled` is False, images may lack .cls files; then none of them has a label.
    """
    limits = limits or Limits()
    require_shards(paths)
    rows = [
        (shard, number, *sample)
        for shard, path in enumerate(paths)
        for number, sample in enumerate(_samples(path, limits))
    ]
    if not rows:
        raise ValueError(f"no images in {len(paths)} tar shards, {paths[0]} first")
    table = np.array(rows, dtype=np.int64)
    places, labels = table[:, :4], table[:, 4]
    files = ShardImages(paths, places, limits)
    if (labels == _NO_LABEL).any():
        if labelled:
            raise _unlabelled(files, labels)
        return LabelledFiles(files, np.zeros_like(labels), ())
    names = _listed_classes(paths[0].parent / "classes.txt", limits)
    if names and labels.max() >= len(names):
        raise ValueError(
            f"classes.txt beside {paths[0]} names {len(names)} classes, but labels go up to "
            f"{labels.max()}"
        )
    names = names or tuple(str(label) for label in range(labels.max() + 1))
    return LabelledFiles(files, labels, names)


def _unlabelled(files: ShardImages, labels: np.ndarray) -> ValueError:
    """The error that no image has a label, or that some lack one."""
    missing = np.flatnonzero(labels == _NO_LABEL)
    kind = NoLabelsError if len(missing) == len(labels) else ValueError
    return kind(f"{files.name(missing[0])} has no .cls file with its class index")


def require_shards(paths: Sequence[Path]) -> None:
    """Refuse a pattern that no shard matches, or that names shards which are missing."""
    if not paths:
        raise FileNotFoundError("no shards match; check the pattern, such as a-{000..123}.tar")
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(paths)} shards are missing, {missing[0]} first; check the "
            "pattern"
        )


def _listed_classes(path: Path, limits: Limits) -> tuple[str, ...]:
    try:
        text = read_file(path, limits).decode("utf-8") if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason}") from error
    names = text.removesuffix("\n").split("\n") if text else []
    limits.check("most_classes", len(names), f"{path} has {len(names)} classes")
    return tuple(names)


class Extent(NamedTuple):
    """Where a member's bytes are in its shard."""

    offset: int
    size: int


def _samples(path: Path, limits: Limits) -> Iterator[tuple[int, int, int]]:
    """Yield offset and size of every image of a shard, and its label."""
    with path.open("rb") as file:
        for sample in _grouped(path):
            extent, label = _image(path, sample, limits).extent, _label(path, file, sample, limits)
            yield extent.offset, extent.size, label


def _grouped(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a shard: extents by extension."""
    group_by_keys = require("webdataset.tariterators").group_by_keys

    def refuse(error: Exception) -> bool:
        reason = error.args[0] if error.args else type(error).__name__
        raise ValueError(f"{path}: {reason}") from error

    yield from group_by_keys(_members(path), handler=refuse)


class Member(NamedTuple):
    """An image of a shard: its key, its file name there, and where its bytes are."""

    key: str
    name: str
    extent: Extent


def shard_images(path: Path, limits: Limits) -> Iterator[Member | ValueError]:
    """Yield the images and .npy arrays of a shard, labelled or not.

    An image that is refused is an error in the sequence; a damaged shard ends with one.
    """
    try:
        for sample in _grouped(path):
            try:
                yield _image(path, sample, limits, EXTENSIONS | ARRAYS)
            except ValueError as error:
                yield error
    except ValueError as error:
        yield error


def _members(path: Path) -> Iterator[dict[str, Any]]:
    """List the files of a shard as webdataset does, with extents instead of contents."""
    end = path.stat().st_size
    try:
        with _HeaderFile(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isreg() and not member.issparse():
                    extent = _extent(member, end)
                    yield {"fname": member.name, "data": extent, "__url__": str(path)}
    except OSError:
        raise
    except Exception as error:  # tarfile lets errors of its parts through
        raise ValueError(f"{path} is not a readable tar file ({error}); copy it again") from error


def _extent(member: tarfile.TarInfo, end: int) -> Extent:
    if not 0 <= member.size <= end - member.offset_data:
        raise tarfile.ReadError(f"{member.name} is cut off")
    return Extent(member.offset_data, member.size)


class _HeaderFile(io.FileIO):
    """A shard for tarfile, which reads its headers: one that claims to be huge is refused."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MOST_HEADER_BYTES:
            raise tarfile.ReadError(
                f"a header of {size} bytes, but must have at most {_MOST_HEADER_BYTES}"
            )
        return super().read(size) or b""


def _image(
    path: Path, sample: dict[str, Any], limits: Limits, extensions: frozenset[str] = EXTENSIONS
) -> Member:
    for extension, extent in sample.items():
        if f".{extension}" in extensions:
            key, name = sample["__key__"], f"{sample['__key__']}.{extension}"
            limits.check("most_bytes", extent.size, f"{path}: {name} has {extent.size} bytes")
            return Member(key, name, extent)
    parts = sorted(f".{name}" for name in sample if not name.startswith("__"))
    raise ValueError(f"{path}: {sample['__key__']} has {', '.join(parts)}, but no image")


def _label(path: Path, file: Any, sample: dict[str, Any], limits: Limits) -> int:
    """Read an image's class index, or say that it has none."""
    key, extent = sample["__key__"], sample.get("cls")
    if extent is None:
        return _NO_LABEL
    if extent.size > _MOST_LABEL_BYTES:
        raise ValueError(
            f"{path}: {key}.cls has {extent.size} bytes, but must have at most {_MOST_LABEL_BYTES}"
        )
    file.seek(extent.offset)
    label = file.read(extent.size).strip()
    if not label.isdigit():
        raise ValueError(f"{path}: {key}.cls must hold a class index, not {label[:20]!r}")
    number = int(label)
    limits.check("most_classes", number + 1, f"{path}: {key}.cls names class {number}")
    return number

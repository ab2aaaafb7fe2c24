"""Tar shards in the layout of webdataset, read in sequence: `key.jpg` and `key.cls` side by side.

For data sets larger than a disk or a file system's patience. Shards are counted once, when opened,
so that processes and workers get exact, even shares and nothing is dropped or read twice.
"""

import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ltm.data.images import EXTENSIONS, UnreadableImages, UnreadableImagesError, decode
from ltm.data.shapes import Transform

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_WORD = re.compile(r"[a-zA-Z0-9]+")


class Sample(NamedTuple):
    """One image as stored, and its place, counted through all shards as listed."""

    position: int
    data: bytes
    label: int


@dataclass(frozen=True)
class ShardIndex:
    """How many images each shard holds, and the classes' names."""

    counts: tuple[int, ...]
    class_names: tuple[str, ...]


class TarShards:
    """Labelled images in tar files; iterate over it, or let `loading.build_loader` do so.

    Reading is sequential; an image by its index, to look at a few, takes a walk through its shard.
    `classes.txt` beside the shards, a name a line, names the classes; `sizes.json`,
    `{"a-000.tar": 1000}`, saves counting the images.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        split: str = "all",
        transform: Transform | None = None,
        max_unreadable: int = 10,
    ) -> None:
        self.paths = tuple(Path(path) for path in paths)
        self.split = split
        self.transform = transform
        self.index = index_shards(self.paths)
        self.unreadable = UnreadableImages(len(self), max_unreadable, self.name)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes, by label."""
        return self.index.class_names

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        return len(self.class_names)

    @property
    def labels(self) -> np.ndarray:
        """Return every image's label, read from the shards without the images."""
        found = (read_labels(path) for path in self.paths)
        cut = zip(found, self.index.counts, strict=True)
        return np.concatenate([np.array(labels[:count], dtype=int) for labels, count in cut])

    def __len__(self) -> int:
        return sum(self.index.counts)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        place = range(len(self))[index]
        for item in self.decode(self.samples(range(len(self.paths)), place, place + 1)):
            return item
        raise UnreadableImagesError(f"{self.name(place)} could not be read")

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return self.decode(self.samples(range(len(self.paths)), 0, len(self)))

    def name(self, position: int) -> str:
        """Say which image this is, counted through the shards as listed."""
        ends = np.cumsum(self.index.counts)
        shard = int(np.searchsorted(ends, position, side="right"))
        return (
            f"{self.paths[shard]}, image {position - int(ends[shard]) + self.index.counts[shard]}"
        )

    def with_transform(self, transform: Transform | None) -> "TarShards":
        """Return the same images under another transform."""
        changed = copy(self)
        changed.transform = transform
        return changed

    def take(self, num_images: int) -> "TarShards":
        """Return the first `num_images` images, or all of them if there are fewer."""
        if num_images < 1:
            raise ValueError(f"num_images is {num_images}, but must be at least 1")
        ends = np.minimum(np.cumsum(self.index.counts), num_images)
        counts = np.diff(ends, prepend=0).tolist()
        taken = copy(self)
        taken.index = replace(self.index, counts=tuple(counts))
        return taken

    def samples(self, order: Sequence[int], start: int, stop: int) -> Iterator[Sample]:
        """Read encoded images `start` to `stop`, counted through the shards in the given order."""
        counts = self.index.counts
        offsets = np.concatenate(([0], np.cumsum(counts)))
        before = 0
        for shard in order:
            first, last = max(start - before, 0), min(stop - before, counts[shard])
            if first < last:
                yield from read_shard(self.paths[shard], first, last, int(offsets[shard]))
            before += counts[shard]

    def decode(self, samples: Iterator[Sample]) -> Iterator[tuple[Any, int]]:
        """Decode and transform images; as many come out as go in.

        The next readable image also takes an unreadable one's place (at the end, the last one).
        """
        owed = 0
        latest = None
        for sample in samples:
            try:
                latest = decode(sample.data), sample.label
            except Exception as error:  # noqa: BLE001 - decoders raise anything on damaged bytes
                self.unreadable.add(sample.position, error)
                owed += 1
                continue
            for _ in range(owed + 1):
                yield self._transformed(latest)
            owed = 0
        if latest is not None:
            for _ in range(owed):
                yield self._transformed(latest)

    def _transformed(self, item: tuple[Image.Image, int]) -> tuple[Any, int]:
        image, label = item
        return image if self.transform is None else self.transform(image), label


def expand_shards(pattern: str, split: str) -> tuple[Path, ...]:
    """Turn `name-{000..123}.tar`, a glob, or a folder of .tar files into a list of paths.

    `{split}` in a pattern stands for the split; in a folder, shards that have the split's name in
    their own are chosen where there are any.
    """
    folder = Path(pattern)
    if folder.is_dir():
        paths = sorted(folder.glob("*.tar"))
        words = {path: _WORD.findall(path.stem) for path in paths}
        of_split = [path for path in paths if any(w.startswith(split) for w in words[path])]
        return tuple(of_split or paths)
    pattern = pattern.replace("{split}", split)
    match = _RANGE.search(pattern)
    if match:
        first, last = match.groups()
        numbers = range(int(first), int(last) + 1)
        names = [_RANGE.sub(f"{number:0{len(first)}d}", pattern, count=1) for number in numbers]
        return tuple(path for name in names for path in expand_shards(name, split))
    if any(character in pattern for character in "*?["):
        return tuple(sorted(folder.parent.glob(Path(pattern).name)))
    return (Path(pattern),)


def index_shards(paths: Sequence[Path]) -> ShardIndex:
    """Count the images and classes of shards, from files beside them or by reading them once."""
    if not paths:
        raise FileNotFoundError("no tar shards match; check the pattern, such as a-{000..123}.tar")
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(paths)} tar shards are missing, {missing[0]} first; "
            "check the pattern"
        )
    names = _listed_classes(paths[0].parent / "classes.txt")
    sizes = _listed_sizes(paths)
    if names and sizes:
        return ShardIndex(sizes, names)
    labels = [read_labels(path) for path in paths]
    num_classes = 1 + max((max(found) for found in labels if found), default=-1)
    if num_classes == 0:
        raise ValueError(f"no images in {len(paths)} tar shards, {paths[0]} first")
    if names and num_classes > len(names):
        raise ValueError(
            f"classes.txt beside {paths[0]} names {len(names)} classes, but labels go up to "
            f"{num_classes - 1}"
        )
    counts = tuple(len(found) for found in labels)
    return ShardIndex(counts, names or tuple(str(label) for label in range(num_classes)))


def _listed_classes(path: Path) -> tuple[str, ...]:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return tuple(text.removesuffix("\n").split("\n")) if text else ()


def _listed_sizes(paths: Sequence[Path]) -> tuple[int, ...]:
    """Read `sizes.json`; empty where it is absent or does not list every shard."""
    listed = paths[0].parent / "sizes.json"
    sizes = json.loads(listed.read_text(encoding="utf-8")) if listed.is_file() else {}
    known = all(isinstance(sizes.get(path.name), int) for path in paths)
    return tuple(sizes[path.name] for path in paths) if known else ()


def read_labels(path: Path) -> list[int]:
    """Read the labels of one shard, skipping over its images."""
    return [_label(path, tar, group) for tar, group in _open_groups(path)]


def read_shard(path: Path, start: int, stop: int, offset: int = 0) -> Iterator[Sample]:
    """Read the images `start` to `stop` of one shard; `offset` counts those of earlier shards."""
    for position, (tar, group) in enumerate(_open_groups(path)):
        if position >= stop:
            return
        if position >= start:
            data = _content(tar, _image(path, group))
            yield Sample(offset + position, data, _label(path, tar, group))


def _open_groups(path: Path) -> Iterator[tuple[tarfile.TarFile, "_Group"]]:
    try:
        with tarfile.open(path, "r:") as tar:
            for group in _groups(tar):
                yield tar, group
    except tarfile.TarError as error:
        raise ValueError(f"{path} is no readable tar file ({error}); copy it again") from error


class _Group(NamedTuple):
    """The members of one key, by extension."""

    key: str
    parts: dict[str, tarfile.TarInfo]


def _groups(tar: tarfile.TarFile) -> Iterator[_Group]:
    """Group neighbouring members by key: the name up to the first dot of its last part."""
    group = _Group("", {})
    for member in iter(tar.next, None):
        tar.members = []  # pyright: ignore[reportAttributeAccessIssue] - lest they pile up
        if not member.isfile():
            continue
        folder, slash, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        key = folder + slash + stem
        if key != group.key:
            if group.parts:
                yield group
            group = _Group(key, {})
        group.parts[f".{extension.lower()}"] = member
    if group.parts:
        yield group


def _image(path: Path, group: _Group) -> tarfile.TarInfo:
    for extension, member in group.parts.items():
        if extension in EXTENSIONS:
            return member
    raise ValueError(
        f"{path}: {group.key} has {', '.join(sorted(group.parts))}, but no image among them"
    )


def _label(path: Path, tar: tarfile.TarFile, group: _Group) -> int:
    _image(path, group)
    if ".cls" not in group.parts:
        raise ValueError(f"{path}: {group.key} has no .cls file with its class index")
    label = _content(tar, group.parts[".cls"]).strip()
    if not label.isdigit():
        raise ValueError(f"{path}: {group.key}.cls must hold a class index, not {label[:20]!r}")
    return int(label)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None, "only regular files are listed"
    return file.read()

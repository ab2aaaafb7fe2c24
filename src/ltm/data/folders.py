"""Class folders, on disk or in a .zip archive: which images there are, and of which class."""

import os
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from ltm.core.validation import require
from ltm.data.decoding import EXTENSIONS, decode
from ltm.data.images import LabelledFiles, NoLabelsError
from ltm.data.limits import Limits, read_file

# The names in an archive may claim anything.
_MOST_DEPTH = 64
_MOST_LETTERS = 255

_SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}


class Files:
    """Files of a folder by relative name, with "/" between its parts. Links are followed."""

    def __init__(self, path: Path, limits: Limits | None = None) -> None:
        self.path = path
        self.limits = limits or Limits()

    def names(self) -> list[str]:
        """Return the names of all files, and of folders, which end in "/"."""
        found: list[str] = []
        for where, folders, files in os.walk(self.path, followlinks=True):
            folders[:] = [name for name in folders if not _leads_back(where, name)]
            inside = Path(where).relative_to(self.path).as_posix()
            prefix = "" if inside == "." else f"{inside}/"
            found.extend(f"{prefix}{name}/" for name in folders)
            found.extend(prefix + name for name in files)
        return found

    def read(self, name: str, limit: str = "most_bytes") -> bytes:
        """Return a file's content; `limit` is the field of the limits that bounds its size."""
        return read_file(self.path / name, self.limits, limit)


def _leads_back(where: str, name: str) -> bool:
    """Say whether a folder is a link to a folder around it: a walk would never end."""
    path = Path(where, name)
    return path.is_symlink() and Path(where).resolve().is_relative_to(path.resolve())


def open_files(source: str | Path, limits: Limits | None = None) -> Files | None:
    """Open a folder or a .zip archive; None if the source is neither."""
    path = Path(source)
    if path.is_dir():
        return Files(path, limits)
    if path.is_file() and path.suffix.lower() == ".zip":
        return _ZipFiles(path, limits)
    return None


class _ZipFiles(Files):
    """Members of a .zip archive, read without unpacking it.

    Each process opens the archive by itself when it first reads: forked workers that shared one
    open file would move each other's position. Threads may share it.
    """

    def __init__(self, path: Path, limits: Limits | None) -> None:
        super().__init__(path, limits)
        self._opened: tuple[int, zipfile.ZipFile] | None = None
        try:
            members = self._archive().infolist()
        except OSError:
            raise
        except Exception as error:  # zipfile raises half a dozen kinds on damaged directories
            raise ValueError(
                f"{self.path} is not a readable .zip archive ({error}); copy it again"
            ) from error
        self.limits.check_inflation(
            path, stored=path.stat().st_size, inflated=sum(member.file_size for member in members)
        )

    def names(self) -> list[str]:
        """Return the names of all members; folders need not be among them."""
        return self._archive().namelist()

    def read(self, name: str, limit: str = "most_bytes") -> bytes:
        """Return a member's content; raise `ValueError` when it is damaged."""
        where, archive = f"{self.path}/{name}", self._archive()
        member = archive.getinfo(name)
        self.limits.check(limit, member.file_size, f"{where} has {member.file_size} bytes")
        # Only with these does zipfile bound what it inflates.
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{where} is compressed in an unusual way; use deflate or store")
        try:
            with archive.open(member) as file:
                content = file.read(member.file_size)
        except OSError:
            raise
        except Exception as error:  # zlib.error, BadZipFile, RuntimeError of encrypted ones
            raise ValueError(
                f"{where} is damaged, wrong header or checksum: {error}; copy the archive again"
            ) from error
        if len(content) != member.file_size:
            raise ValueError(f"{where} is cut off; copy the archive again")
        return content

    def _archive(self) -> zipfile.ZipFile:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), zipfile.ZipFile(self.path)
        return self._opened[1]

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "limits": self.limits, "_opened": None}


@dataclass(frozen=True)
class Listing:
    """Paths relative to a root, with "/" between their parts: images, and all folders."""

    where: str
    images: tuple[str, ...]
    folders: frozenset[str]


class FileImages:
    """Images of a folder or an archive; `sizes` are those that annotations give them."""

    def __init__(
        self,
        files: Files,
        paths: Sequence[str],
        sizes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self._files = files
        self._paths = paths
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._paths)

    def name(self, index: int) -> str:
        """Return the path to show a user."""
        return f"{self._files.path}/{self._paths[index]}"

    def read(self, index: int) -> Image.Image:
        """Return the decoded image."""
        size = None if self._sizes is None else self._sizes[index]
        content = self._files.read(self._paths[index])
        return decode(content, self.name(index), self._files.limits, size=size)


def list_images(files: Files) -> Listing:
    """List all images and folders; archives need not mention folders by themselves."""
    names = [name for name in files.names() if _visible(name)]
    images = sorted(name for name in names if os.path.splitext(name)[1].lower() in EXTENSIONS)  # noqa: PTH122 - a million of them
    folders: set[str] = set()
    for folder in {name.rpartition("/")[0] for name in names}:
        parts = folder.split("/") if folder else []
        if len(parts) > _MOST_DEPTH:
            raise ValueError(
                f"{files.path} nests {len(parts)} folders, but must nest at most {_MOST_DEPTH}: "
                f"{folder:.40}..."
            )
        if max(map(len, parts), default=0) > _MOST_LETTERS:
            raise ValueError(
                f"{files.path} has a folder whose name is longer than {_MOST_LETTERS} letters: "
                f"{folder:.40}..."
            )
        folders.update("/".join(parts[: depth + 1]) for depth in range(len(parts)))
    return Listing(str(files.path), tuple(images), frozenset(folders))


def walk_images(folder: str | Path) -> Iterator[str]:
    """Find the images of a folder, and of those in it, sorted; hidden ones are left out.

    Only the names in the folders on the way down are in memory at a time.
    """
    with os.scandir(folder) as entries:
        found = sorted((e for e in entries if _visible(e.name)), key=lambda e: e.name)
    for entry in found:
        if entry.is_dir():
            if not _leads_back(os.fspath(folder), entry.name):
                yield from walk_images(entry.path)
        elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:  # noqa: PTH122
            yield entry.path


def _visible(path: str) -> bool:
    """Leave out hidden files and what macOS adds to archives."""
    return not (path.startswith((".", "__MACOSX")) or "/." in path)


def label_images(
    files: Files, split: str, holdout_ratio: float = 0.0, *, labelled: bool = True
) -> LabelledFiles:
    """Choose a split and label its images by their class folder.

    Class folders lie in split folders (`train`, `val`, `test`) or directly in the root; one folder
    around everything is tolerated. Without split folders every split is the whole data set, or,
    given a hold-out ratio, "val" is that share of each class and "train" is the rest. If `labelled`
    is False, the images of a flat folder, and of the folders in it, may lack classes.
    """
    listing = list_images(files)
    root = _class_root(listing)
    splits = _split_folders(listing, root)
    wanted = _SPLIT_NAMES.get(split, split)
    if splits and wanted not in splits:
        raise ValueError(
            f"{listing.where} has no split {split!r}; choose from {', '.join(sorted(splits))}"
        )
    inside = splits.get(wanted, root)
    if not labelled and _is_flat(listing, inside):
        paths = [path for path in listing.images if path.startswith(inside)]
        labels = np.zeros(len(paths), dtype=np.int64)
        return LabelledFiles(FileImages(files, paths), labels, (), wanted if splits else "all")
    # The training classes define the labels, so that a class missing elsewhere shifts nothing.
    classes = _class_folders(listing, splits.get("train", inside))
    files.limits.check(
        "most_classes", len(classes), f"{listing.where} has {len(classes)} class folders"
    )
    paths, labels, names = _label(listing, inside, classes, files.limits)
    if not splits and holdout_ratio:
        chosen = _hold_out(labels, wanted, holdout_ratio)
        paths, labels = [paths[index] for index in chosen], labels[chosen]
    is_split = splits or holdout_ratio
    return LabelledFiles(FileImages(files, paths), labels, names, wanted if is_split else "all")


def _class_root(listing: Listing) -> str:
    """Step into a folder that merely wraps the data set."""
    root = ""
    while len(children := _children(listing, root)) == 1 and _holds_only_folders(listing, root):
        inner = f"{root}{children[0]}/"
        if children[0] in _SPLIT_NAMES or not _holds_only_folders(listing, inner):
            break
        root = inner
    return root


def _children(listing: Listing, root: str) -> list[str]:
    """Return the names of the folders directly in `root` ("" or ending in "/")."""
    inside = (name[len(root) :] for name in listing.folders if name.startswith(root))
    return sorted(name for name in inside if name and "/" not in name)


def _holds_only_folders(listing: Listing, root: str) -> bool:
    inside = (name[len(root) :] for name in listing.images if name.startswith(root))
    return bool(_children(listing, root)) and all("/" in name for name in inside)


def _is_flat(listing: Listing, root: str) -> bool:
    """Say whether images lie in a folder itself, or in one that merely wraps them."""
    inside = [name for name in listing.images if name.startswith(root)]
    children = _children(listing, root)
    wrapped = len(children) == 1 and not _holds_only_folders(listing, f"{root}{children[0]}/")
    return bool(inside) and (wrapped or not _holds_only_folders(listing, root))


def _split_folders(listing: Listing, root: str) -> dict[str, str]:
    """Find split folders: so named, and holding class folders (a class may be named "train")."""
    return {
        _SPLIT_NAMES[name]: f"{root}{name}/"
        for name in _children(listing, root)
        if name in _SPLIT_NAMES and _holds_only_folders(listing, f"{root}{name}/")
    }


def _class_folders(listing: Listing, root: str) -> list[str]:
    where = f"{listing.where}/{root}".rstrip("/")
    folders = _children(listing, root)
    if not folders:
        raise NoLabelsError(
            f"{where} has no class folders; put the images of each class into a folder of its own"
        )
    return folders


def _label(
    listing: Listing, root: str, classes: list[str], limits: Limits
) -> tuple[list[str], np.ndarray, tuple[str, ...]]:
    """Return paths in order of their labels, the labels, and the names of all classes."""
    where = f"{listing.where}/{root}".rstrip("/")
    by_class = defaultdict(list)
    for path in listing.images:
        if path.startswith(root) and "/" in path[len(root) :]:
            by_class[path[len(root) :].split("/", 1)[0]].append(path)
    if not by_class:
        raise ValueError(f"{where} has class folders but no images in them; check the path")
    if unknown := sorted(by_class.keys() - set(classes)):
        raise ValueError(
            f"{where} has classes that the training images lack: {', '.join(unknown)}; "
            "remove them or add training images"
        )
    if empty := sorted(set(_children(listing, root)) - by_class.keys()):
        raise ValueError(
            f"{where} has class folders without images: {', '.join(empty)}; "
            "remove them or add images"
        )
    names, label_of = _number_classes(classes, where, limits)
    ordered = sorted(by_class, key=label_of.__getitem__)
    paths = [path for name in ordered for path in by_class[name]]
    counts = [len(by_class[name]) for name in ordered]
    labels = np.repeat(np.array([label_of[name] for name in ordered], dtype=np.int64), counts)
    return paths, labels, names


def _number_classes(
    classes: list[str], where: str, limits: Limits
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Number classes in order of their names; names that are indices (0000, 0001) are kept."""
    if not all(name.isascii() and name.isdecimal() for name in classes):
        return tuple(classes), {name: label for label, name in enumerate(classes)}
    ordered = sorted(classes, key=lambda name: (len(name.lstrip("0")), name.lstrip("0")))
    padded = len({len(name) for name in classes}) == 1 and any(name[0] == "0" for name in classes)
    complete = [name.lstrip("0") or "0" for name in ordered] == [*map(str, range(len(ordered)))]
    if not (padded or complete):
        return tuple(ordered), {name: label for label, name in enumerate(ordered)}
    width = len(ordered[0]) if padded else 0
    _check_index(ordered[-1], where, limits)
    names = tuple(f"{label:0{width}d}" for label in range(int(ordered[-1].lstrip("0") or "0") + 1))
    return names, {name: int(name.lstrip("0") or "0") for name in ordered}


def _check_index(name: str, where: str, limits: Limits) -> None:
    """Refuse a highest class that is no index, such as a bar code that begins with a zero."""
    digits = name.lstrip("0") or "0"
    number = int(digits[:_MOST_DIGITS])
    limits.check(
        "most_classes",
        number + 1,
        f"{where}: folder {name:.40} stands for class {digits:.40} (a letter in front would make "
        "it a name)",
    )


_MOST_DIGITS = 18


def _hold_out(labels: np.ndarray, split: str, ratio: float) -> np.ndarray:
    """Return the images of a split: "val" has evenly spread ones of every class that has two."""
    require(0.0 < ratio < 1.0, "holdout_ratio", ratio, "between 0 and 1")
    if split not in ("train", "val"):
        raise ValueError(f"a hold-out has no split {split!r}; choose from train, val")
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(round(len(members) * ratio), 1), len(members) - 1)
        held[members[(np.arange(count) * len(members)) // max(count, 1)]] = True
    return np.flatnonzero(held if split == "val" else ~held)

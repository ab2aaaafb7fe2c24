"""Data sets of image files: labelled images by index, unreadable ones skipped."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, get_worker_info

from ltm.core.validation import require_least

_MOST_NAMED = 20  # unreadable images in one error

Transform = Callable[[Image.Image], Any]


class NoLabelsError(ValueError):
    """Images have no classes, and labelled ones were asked for."""


class ImageFiles(Protocol):
    """Images by number: files of a folder, members of an archive, pictures painted on demand."""

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def name(self, index: int) -> str:
        """Return the path to show a user."""
        ...

    def read(self, index: int) -> Image.Image:
        """Return the decoded image; raise anything at all when that fails."""
        ...


class LabelledFiles(NamedTuple):
    """The images of one split, their labels and the classes' names; "all" is no split.

    Images without labels have no class names, and 0 in place of each label.
    """

    files: ImageFiles
    labels: np.ndarray
    class_names: tuple[str, ...]
    split: str = "all"


class ImageDataset(Dataset[tuple[Any, int]]):
    """Labelled images by index: PIL images in RGB, or what the transform makes of them.

    An unreadable image is reported by its path and replaced by the next readable one, label
    included; the `max_unreadable + 1`-th raises `UnreadableImagesError` with all the paths.
    """

    def __init__(
        self,
        files: ImageFiles,
        labels: np.ndarray,
        class_names: tuple[str, ...],
        *,
        split: str = "all",
        transform: Transform | None = None,
        max_unreadable: int = 10,
    ) -> None:
        if len(files) != len(labels):
            raise ValueError(f"{len(files)} images have {len(labels)} labels")
        self.files = files
        self.class_names = class_names
        self.split = split
        self.transform = transform
        self.unreadable = UnreadableImages(files, max_unreadable)
        self.indices: Sequence[int] = range(len(files))
        self.file_labels = np.asarray(labels, dtype=np.int64)
        """Labels of all files; `labels` has those of the chosen images."""

    @property
    def num_classes(self) -> int:
        """Return the number of classes, including those without images."""
        return len(self.class_names)

    @property
    def labels(self) -> np.ndarray:
        """Return every image's label, without reading the images."""
        return self.file_labels[np.asarray(self.indices)]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        start = range(len(self))[index]
        image, file = next_readable(self.files, self.unreadable, self.indices, start)
        label = int(self.file_labels[file])
        return image if self.transform is None else self.transform(image), label

    def name(self, index: int) -> str:
        """Return an image's path."""
        return self.files.name(self.indices[index])

    def with_transform(self, transform: Transform | None) -> Self:
        """Return the same images under another transform."""
        changed = copy(self)
        changed.transform = transform
        return changed

    def with_labels(self, labels: Sequence[int] | np.ndarray) -> Self:
        """Return the same images with other labels, one for each in their order."""
        if len(labels) != len(self):
            raise ValueError(f"{len(self)} images have {len(labels)} labels")
        changed = copy(self)
        changed.file_labels = self.file_labels.copy()
        changed.file_labels[np.asarray(self.indices)] = labels
        return changed

    def take(self, num_images: int) -> Self:
        """Return `num_images` images spread over the classes, or all if there are fewer.

        They are evenly spaced in the data set sorted by class, and keep their order.
        """
        require_least("num_images", num_images)
        count = min(num_images, len(self))
        by_class = np.argsort(self.labels, kind="stable")
        return self.select(np.sort(by_class[np.arange(count) * len(self) // count]).tolist())

    def select(self, positions: Iterable[int]) -> Self:
        """Return the images at these positions, in this order."""
        chosen = copy(self)
        chosen.indices = [self.indices[position] for position in positions]
        return chosen


class UnreadableImageWarning(UserWarning):
    """An image could not be read; another one took its place."""


class UnreadableImagesError(ValueError):
    """More images were unreadable than allowed."""


class UnreadableImages:
    """Which images of a data set could not be read, counted over all loader workers together.

    The flags lie in shared memory: each worker process works on a copy of the data set, and the
    limit is one for all.
    """

    def __init__(self, files: ImageFiles, limit: int) -> None:
        require_least("max_unreadable", limit, 0)
        self.limit = limit
        self._files, self._name = files, files.name
        self._reported: set[int] = set()
        self._flags = torch.zeros(len(files), dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        return int(self._flags.count_nonzero())

    def __contains__(self, index: int) -> bool:
        return bool(self._flags[index])

    def add(self, index: int, error: Exception) -> None:
        """Note an image, and raise `UnreadableImagesError` when it is one too many.

        The warning comes at once, or from a worker process later, through `report`.
        """
        if index in self:
            return
        self._flags[index] = 1
        self.check(error)
        if get_worker_info() is None:
            self._reported.add(index)
            _warn(self._name(index), error)

    def report(self) -> None:
        """Warn of images that worker processes have noted since the last report."""
        if len(self) > len(self._reported):
            for index in self._flags.nonzero().flatten().tolist():
                if index not in self._reported:
                    self._reported.add(index)
                    _warn(self._name(index))

    def check(self, last: BaseException | None = None) -> None:
        """Raise `UnreadableImagesError` when more images are unreadable than allowed."""
        count = len(self)
        if count > self.limit:
            indices = self._flags.nonzero().flatten().tolist()
            paths, last = [self._name(index) for index in indices], last or self._why(indices[-1])
            more = f" and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""
            raise UnreadableImagesError(
                f"{count} unreadable images, max_unreadable is {self.limit}: "
                f"{', '.join(paths[:_MOST_NAMED])}{more}; repair or remove them"
                f"{'' if last is None else f' (the last one: {last})'}"
            ) from last

    def _why(self, index: int) -> Exception | None:
        """Why an image cannot be read; the error of a worker stays in its process."""
        try:
            self._files.read(index)
        except Exception as error:  # noqa: BLE001 - decoders raise anything on damaged bytes
            return error
        return None


def next_readable(
    files: ImageFiles, unreadable: UnreadableImages, indices: Sequence[int], start: int
) -> tuple[Image.Image, int]:
    """Read the image at `indices[start]`, or the next readable one; return it and its index."""
    for step in range(len(indices)):
        file = int(indices[(start + step) % len(indices)])
        if file in unreadable:
            continue
        try:
            return files.read(file), file
        except Exception as error:  # noqa: BLE001 - decoders raise anything on damaged bytes
            unreadable.add(file, error)
    raise UnreadableImagesError(
        f"none of {len(indices)} images could be read, {files.name(int(indices[0]))} first"
    )


def _warn(path: str, error: Exception | None = None) -> None:
    message = f"skipped unreadable image {path}" if error is None else f"skipped an image: {error}"
    if path not in message:
        message = f"skipped unreadable image {path}: {error}"
    warnings.warn(message, UnreadableImageWarning, stacklevel=6)

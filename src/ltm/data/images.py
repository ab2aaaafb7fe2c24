"""Decode image files, and keep count of those that cannot be decoded."""

import io
import warnings
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch
from PIL import Image

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif"}
)


class ImageFiles(Protocol):
    """Encoded images by number: files of a folder, members of an archive."""

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def name(self, index: int) -> str:
        """Return the path to show a user."""
        ...

    def read(self, index: int) -> Image.Image:
        """Return the decoded image; raise anything at all when that fails."""
        ...


class UnreadableImageWarning(UserWarning):
    """An image could not be read; another one took its place."""


class UnreadableImagesError(ValueError):
    """More images were unreadable than allowed."""


class UnreadableImages:
    """Which images of a data set could not be read, counted over all loader workers together.

    The flags lie in shared memory: each worker process works on a copy of the data set, and the
    limit is one for all.
    """

    def __init__(self, num_images: int, limit: int, name: Callable[[int], str]) -> None:
        if limit < 0:
            raise ValueError(f"max_unreadable is {limit}, but must not be negative")
        self.limit = limit
        self._name = name
        self._flags = torch.zeros(num_images, dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        return int(self._flags.count_nonzero())

    def __contains__(self, index: int) -> bool:
        return bool(self._flags[index])

    def add(self, index: int, error: Exception) -> None:
        """Report an image, and raise `UnreadableImagesError` when it is one too many."""
        if index not in self:
            self._flags[index] = 1
            self.check()
            reason = str(error) or type(error).__name__
            warnings.warn(
                f"skipped unreadable image {self._name(index)}: {reason}",
                UnreadableImageWarning,
                stacklevel=2,
            )

    def check(self) -> None:
        """Raise `UnreadableImagesError` when more images are unreadable than allowed."""
        count = len(self)
        if count > self.limit:
            paths = [self._name(index) for index in self._flags.nonzero().flatten().tolist()]
            raise UnreadableImagesError(
                f"{count} unreadable images, {self.limit} allowed (max_unreadable): {_some(paths)}; "
                "repair or remove them"
            )


def _some(paths: Iterable[str], limit: int = 20) -> str:
    paths = list(paths)
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return ", ".join(paths[:limit]) + more


def decode(data: bytes) -> Image.Image:
    """Decode an image to RGB, whatever its mode."""
    with warnings.catch_warnings():
        # About the metadata of images that do decode: of no use to whoever trains on them.
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as image:
            return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB: 16-bit grey is scaled, not clipped, and transparency is dropped."""
    if image.mode.startswith("I"):
        grey = np.asarray(image, dtype=np.float64)
        return Image.fromarray((grey / 257.0).clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")

"""Decode image files, and keep count of those that cannot be decoded."""

import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch.utils.data import get_worker_info

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
        self._reported: set[int] = set()
        self._flags = torch.zeros(num_images, dtype=torch.uint8).share_memory_()

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
        self.check()
        if get_worker_info() is None:
            self._reported.add(index)
            _warn(self._name(index), f": {error}" if str(error) else "")

    def report(self) -> None:
        """Warn of images that worker processes have noted since the last report."""
        if len(self) > len(self._reported):
            for index in self._flags.nonzero().flatten().tolist():
                if index not in self._reported:
                    self._reported.add(index)
                    _warn(self._name(index))

    def check(self) -> None:
        """Raise `UnreadableImagesError` when more images are unreadable than allowed."""
        count = len(self)
        if count > self.limit:
            paths = [self._name(index) for index in self._flags.nonzero().flatten().tolist()]
            raise UnreadableImagesError(
                f"{count} unreadable images, max_unreadable is {self.limit}: {_some(paths)}; "
                "repair or remove them"
            )


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


def _warn(path: str, reason: str = "") -> None:
    message = f"skipped unreadable image {path}{reason}"
    warnings.warn(message, UnreadableImageWarning, stacklevel=6)


def _some(paths: Sequence[str], limit: int = 20) -> str:
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return ", ".join(paths[:limit]) + more


class OnDevices(dict[str, Any]):
    """What a process keeps of a data set by device; views share it, pickles leave it behind."""

    def __reduce__(self) -> Any:
        return OnDevices, ()


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


def require_tensor(image: Any) -> None:
    """Refuse what no transform has made a tensor of."""
    if not isinstance(image, torch.Tensor):
        raise TypeError(
            f"images are {type(image).__name__}; give the data set a transform to tensors"
        )


def require_bytes(image: Any) -> None:
    """Refuse what the device could not normalise."""
    require_tensor(image)
    if image.dtype != torch.uint8:
        raise TypeError(f"images are {image.dtype} but would be normalised; use 8-bit or no spec")

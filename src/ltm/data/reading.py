"""Images by reference, read and prepared in batches: by threads here, or by loader processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ltm.data.decoding import decode
from ltm.data.sources import ImageRef
from ltm.data.transforms import ImageSpec, evaluation_transform

Content = Image.Image | np.ndarray
Prepare = Callable[[Content], Tensor]
T = TypeVar("T")


class Chunk(NamedTuple):
    """Images to be read together: some of a part, `first` counted within it."""

    images: tuple[ImageRef, ...]
    part: int = 0
    first: int = 0
    part_rows: int = 0
    """How many images the whole part has."""


class Readings(NamedTuple):
    """The images of a chunk as a network expects them, or why they could not be read."""

    chunk: Chunk
    images: list[Tensor | None]
    errors: list[str | None]


class Preparation:
    """Images as 8-bit tensors (3, height, width), resized and cropped as timm evaluates.

    An array that has the network's size already is taken as it is.
    """

    def __init__(self, spec: ImageSpec) -> None:
        self.spec = spec
        self._transform = evaluation_transform(spec)

    def __call__(self, content: Content) -> Tensor:
        if isinstance(content, np.ndarray):
            taken = _of_size(content, self.spec.size)
            if taken is not None:
                return taken
            by_rows = content if content.shape[2] == 3 else content.transpose(1, 2, 0)
            content = Image.fromarray(np.ascontiguousarray(by_rows))
        return self._transform(content)


def _of_size(pixels: np.ndarray, size: tuple[int, int]) -> Tensor | None:
    if not pixels.flags.writeable:  # of which torch would warn
        pixels = pixels.copy()
    if pixels.shape == (3, *size):
        return torch.from_numpy(pixels)
    return torch.from_numpy(pixels).permute(2, 0, 1) if pixels.shape == (*size, 3) else None


def decoded(content: Any, name: str) -> Content:
    """Decode an image: bytes, bytes in a dict, 8-bit pixels, or a Pillow image."""
    if isinstance(content, dict):  # as `datasets` stores images
        content = content.get("bytes")
    if isinstance(content, bytes | bytearray | memoryview):
        return decode(bytes(content), name)
    if isinstance(content, np.ndarray) and content.dtype == np.uint8 and content.ndim == 3:
        return content
    if isinstance(content, Image.Image):
        return content
    raise ValueError(
        f"{name} is of type {type(content).__name__}; bytes or 8-bit pixels are needed"
    )


def sentence(error: Exception) -> str:
    """Why an image could not be read, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


class ChunkReader(Dataset[Readings]):
    """Reads the images of a chunk; one that cannot be read has an error in place of pixels."""

    def __init__(self, prepare: Prepare, threads: int = 1) -> None:
        self.prepare, self.threads = prepare, threads

    def __getitem__(self, chunk: Chunk) -> Readings:
        if self.threads > 1:
            with ThreadPoolExecutor(self.threads, thread_name_prefix="decode") as pool:
                found = list(pool.map(self._read, chunk.images))
        else:
            found = [self._read(image) for image in chunk.images]
        images = [value if isinstance(value, Tensor) else None for value in found]
        return Readings(chunk, images, [v if isinstance(v, str) else None for v in found])

    def _read(self, image: ImageRef) -> Tensor | str:
        try:
            return self.prepare(image.open())
        except Exception as error:  # noqa: BLE001 - decoders raise anything on damaged bytes
            return sentence(error)


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The items in order; a thread makes the next one while this one is in use."""
    end, making = object(), iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        coming: Any = pool.submit(next, making, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, making, end)
            yield item


def read_chunks(
    chunks: Iterable[Chunk],
    prepare: Prepare,
    *,
    workers: int = 0,
    threads: int = 1,
    collate: Callable[[Readings], Any] | None = None,
    pin_memory: bool = False,
) -> Iterator[Any]:
    """Read chunks in order, when they are needed; workers read a few ahead.

    Args:
        chunks: what to read; memory does not grow with their number.
        prepare: makes a tensor of an image.
        workers: processes that read; 0 reads in this one.
        threads: threads that read in this process if there are no workers.
        collate: applied to what was read, by the worker that read it.
        pin_memory: have tensors ready to be copied to a GPU.
    """
    of_one: Any = collate or _as_it_is  # torch's type is for lists of items
    return iter(
        DataLoader(
            ChunkReader(prepare, 1 if workers else threads),
            batch_size=None,
            sampler=chunks,
            num_workers=workers,
            collate_fn=of_one,
            pin_memory=pin_memory,
        )
    )


def _as_it_is(read: Readings) -> Readings:
    return read

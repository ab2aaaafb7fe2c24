"""What the launches of all kernels share."""

# pyright: basic

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

FEW_IMAGES = 16
"""Batches below this leave most of a GPU idle: smaller programs finish earlier."""
ROOM = 96 * 1024
"""Bytes of shared memory that the largest tiles take; GPUs with less have too few registers too."""


def parts_of(number: int, size: int) -> int:
    """How many parts of a size it takes; Triton's own `cdiv` is slow outside of kernels."""
    return -(-number // size)


def fitting(number: int, least: int = 1) -> int:
    """The power of two that holds a number; Triton's own is slow outside of kernels."""
    return max(least, 1 << (max(number, 1) - 1).bit_length())


def warps_for(number: int) -> int:
    """Warps of a program that holds this many numbers at once, at most 32 a thread."""
    return min(max(fitting(number) // 512, 4), 16)


def sizes_of(size: Tensor | None, nothing: Tensor) -> tuple[Tensor, int]:
    """Sizes, and the step from one image to the next: none where all share them."""
    if size is None:
        return nothing, 0
    size = size.contiguous()
    return size, 0 if size.shape[0] == 1 else size.shape[1]


@contextmanager
def branch(x: Tensor) -> Generator[Callable[[], None]]:
    """In a CUDA graph for few images, what is inside runs beside what follows, until joined.

    Elsewhere it runs as it stands: many images fill a GPU, and without a graph another stream would
    cost the processor more than it saves.
    """
    few = x.is_cuda and x.shape[0] < FEW_IMAGES
    if not (few and torch.cuda.is_current_stream_capturing()):
        yield lambda: None
        return
    here, there = torch.cuda.current_stream(x.device), _second_stream(x.device.index)
    there.wait_stream(here)
    with torch.cuda.stream(there):
        # Memory of this stream is safe after the join: its next work waits for the first stream.
        yield lambda: here.wait_stream(there)


@cache
def _second_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def has_room(device: torch.device, size: int) -> bool:
    """Whether a program may take this many bytes of shared memory."""
    if device.type != "cuda":
        return True  # Triton's interpreter
    found = torch.cuda.get_device_properties(device)
    return found.shared_memory_per_block_optin >= size

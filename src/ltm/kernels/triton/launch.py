"""What all kernel launches share."""

# pyright: basic

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

FEW_IMAGES = 16
"""Smaller batches leave most of a GPU idle, and finish earlier with smaller programs."""
ROOM = 96 * 1024
"""Shared memory in bytes for the largest tiles; GPUs with less also have too few registers."""


def parts_of(number: int, size: int) -> int:
    """Divide and round up; Triton's `cdiv` is slow outside of kernels."""
    return -(-number // size)


def fitting(number: int, least: int = 1) -> int:
    """The next power of two; Triton's own function is slow outside of kernels."""
    return max(least, 1 << (max(number, 1) - 1).bit_length())


def warps_for(number: int) -> int:
    """Warps for a program that holds this many numbers, at most 32 per thread."""
    return min(max(fitting(number) // 512, 4), 16)


def sizes_of(size: Tensor | None, nothing: Tensor) -> tuple[Tensor, int]:
    """Sizes and their stride between images, which is 0 if all images share them."""
    if size is None:
        return nothing, 0
    size = size.contiguous()
    return size, 0 if size.shape[0] == 1 else size.shape[1]


@contextmanager
def branch(x: Tensor) -> Generator[Callable[[], None]]:
    """In a CUDA graph for few images, run what is inside in parallel, until the yielded join.

    Otherwise it runs in order: many images fill a GPU, and without a graph a second stream costs
    more CPU time than it saves.
    """
    few = x.is_cuda and x.shape[0] < FEW_IMAGES
    if not (few and torch.cuda.is_current_stream_capturing()):
        yield lambda: None
        return
    here, there = torch.cuda.current_stream(x.device), _second_stream(x.device.index)
    there.wait_stream(here)
    with torch.cuda.stream(there):
        # Its memory is safe after the join, because its next work waits for the first stream.
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

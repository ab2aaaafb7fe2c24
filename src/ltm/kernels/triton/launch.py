"""What all kernel launches share."""

# pyright: basic

from __future__ import annotations

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


@cache
def has_room(device: torch.device, size: int) -> bool:
    """Whether a program may take this many bytes of shared memory."""
    if device.type != "cuda":
        return True  # Triton's interpreter
    found = torch.cuda.get_device_properties(device)
    return found.shared_memory_per_block_optin >= size

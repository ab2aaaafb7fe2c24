"""What the launches of all kernels share."""

from __future__ import annotations

from torch import Tensor

FEW_IMAGES = 16
"""Batches below this leave most of a GPU idle: smaller programs finish earlier."""


def sizes_of(size: Tensor | None, nothing: Tensor) -> tuple[Tensor, int]:
    """Sizes, and the step from one image to the next: none where all share them."""
    if size is None:
        return nothing, 0
    size = size.contiguous()
    return size, 0 if size.shape[0] == 1 else size.shape[1]

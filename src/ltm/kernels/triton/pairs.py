"""All pairs of patches: their distances, the least harm of merging each patch, and the ranking.

Products and distances are in float32, so tokens need not be centred first; distances lose digits
only if tokens differ by much less than their common part.

Letters: b images, t tokens with their k prefix tokens, n patch tokens, c channels.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltm.kernels.triton.launch import FEW_IMAGES, ROOM, fitting, has_room, parts_of, sizes_of


@triton.jit
def _product_kernel(
    tokens, products, t, k, c,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The products of two blocks of patches of an image."""
    image, n = tl.program_id(0), t - k
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside, there = rows < n, columns < n
    start = tokens + (image * t + k).to(tl.int64) * c
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for channel in range(0, c, CHANNELS):
        channels = channel + tl.arange(0, CHANNELS)
        known = channels < c
        # Nothing but the product may read these tiles: on Hopper, Triton (3.6, 3.9) continues a
        # product while the next tile is loaded, and does not wait for other readers.
        own = tl.load(
            start + rows[:, None] * c + channels[None],
            mask=inside[:, None] & known[None], other=0.0,
        )  # fmt: skip
        theirs = tl.load(
            start + columns[:, None] * c + channels[None],
            mask=there[:, None] & known[None], other=0.0,
        )  # fmt: skip
        if tokens.dtype.element_ty == tl.float32:  # a sum a tile: one long sum would round more
            found += tl.dot(own, tl.trans(theirs), input_precision="ieee")
        else:
            found = tl.dot(own, tl.trans(theirs), found)
    tl.store(
        products + (image.to(tl.int64) * n + rows[:, None]) * n + columns[None],
        found, mask=inside[:, None] & there[None],
    )  # fmt: skip


@triton.jit
def distances(products, everyone, inside, rows, here, n):
    """Squared distances of all patches (down) from some (across); squares are on the diagonal.

    NaN and infinity become the largest distance, still less than that of excluded patches. Patches
    to compare are in one column, so that each thread compares its own numbers.
    """
    theirs = tl.load(products + everyone * (n + 1), mask=inside, other=0.0)
    own = tl.load(products + rows * (n + 1), mask=here, other=0.0)
    both = tl.load(
        products + everyone[:, None] * n + rows[None],
        mask=inside[:, None] & here[None], other=0.0,
    )  # fmt: skip
    apart = theirs[:, None] + own[None] - 2 * both
    return tl.where(apart < 3e38, tl.maximum(apart, 0.0), 3e38)


@triton.jit
def _harm_kernel(
    products, size, attention, harm, t, k, size_stride, protection,
    HAS_SIZE: tl.constexpr, HAS_ATTENTION: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The least harm of merging some patches into others."""
    image, n = tl.program_id(0), t - k
    everyone, rows = tl.arange(0, TOKENS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside, here = everyone < n, rows < n
    apart = distances(products + image.to(tl.int64) * n * n, everyone, inside, rows, here, n)
    open_ = inside[:, None] & (everyone[:, None] > rows[None])
    strength = tl.full((ROWS,), 1.0, tl.float32)
    if HAS_ATTENTION:
        seen = tl.load(attention + image * t + k + everyone, mask=inside, other=0.0)
        own_seen = tl.load(attention + image * t + k + rows, mask=here, other=0.0)
        same = seen[:, None] == own_seen[None]
        open_ = inside[:, None] & ((seen[:, None] > own_seen[None]) | (same & open_))
        strength = tl.exp(protection * tl.log(tl.maximum(own_seen, 1e-12)))
    if HAS_SIZE:
        sizes = size + image * size_stride + k
        weight = tl.load(sizes + everyone, mask=inside, other=0.0).to(tl.float32)
        own_weight = tl.load(sizes + rows, mask=here, other=1.0).to(tl.float32)
        total = tl.maximum(weight[:, None] + own_weight[None], 1e-6)
        apart = apart * (2 * weight[:, None] * own_weight[None] / total)
        open_ = open_ & (weight > 0)[:, None]
    # Multiplied before the choice: infinity times a strength of zero would be NaN.
    least = tl.min(tl.where(open_, apart * strength[None], float("inf")), axis=0)
    if HAS_SIZE:
        least = tl.where(own_weight <= 0, 0.0, least)  # padding leaves first
    least = tl.where(least == least, least, float("inf"))  # noqa: PLR0124 - NaN
    tl.store(harm + image * n + rows, least, mask=here)


@triton.jit
def _rank_kernel(harm, rank, n, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """The rank of some patches of an image: how many others would leave before."""
    image = tl.program_id(0)
    everyone, rows = tl.arange(0, TOKENS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside, here = everyone < n, rows < n
    theirs = tl.load(harm + image * n + everyone, mask=inside, other=float("inf"))
    own = tl.load(harm + image * n + rows, mask=here, other=float("inf"))
    tie = (theirs[:, None] == own[None]) & (everyone[:, None] < rows[None])
    first = inside[:, None] & ((theirs[:, None] < own[None]) | tie)
    tl.store(rank + image * n + rows, tl.sum(first.to(tl.int32), axis=0), mask=here)


class Pairs(NamedTuple):
    """All pairs of patches, and the ranking that follows."""

    products: Tensor
    """`b n n`; distances follow from them."""
    rank: Tensor
    """The rank of each patch by the harm of its merge, least first, `b n`."""


def compare(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    num_prefix: int,
    protection: float,
) -> Pairs:
    """Compare all pairs of patches, and rank patches by the least harm of their merge."""
    b, n = tokens.shape[0], tokens.shape[1] - num_prefix
    products = _multiply(tokens.contiguous(), num_prefix)
    harm = products.new_empty(b, n)
    rank = torch.empty(b, n, device=harm.device, dtype=torch.int32)
    size_, stride = sizes_of(size, harm)
    everyone = fitting(n)
    _harm_kernel[b, parts_of(n, 16)](
        products, size_, harm if attention is None else attention.contiguous(), harm,
        n + num_prefix, num_prefix, stride, protection,
        HAS_SIZE=size is not None, HAS_ATTENTION=attention is not None,
        TOKENS=everyone, ROWS=16, num_warps=8,
    )  # fmt: skip
    _rank_kernel[b, parts_of(n, 32)](harm, rank, n, TOKENS=everyone, ROWS=32, num_warps=4)
    return Pairs(products, rank)


def _multiply(tokens: Tensor, num_prefix: int) -> Tensor:
    """The products of all pairs of patches of an image."""
    b, t, c = tokens.shape
    n = t - num_prefix
    products = torch.empty(b, n, n, device=tokens.device, dtype=torch.float32)
    half = tokens.element_size() == 2
    if b < FEW_IMAGES:
        rows, columns, warps = 64, 32, 4
    elif half and has_room(tokens.device, ROOM):
        rows, columns, warps = 128, 128, 8
    else:
        rows, columns, warps = 64, 64, 4
    channels, stages = (64, 3) if half else (32, 2)
    _product_kernel[b, parts_of(n, rows), parts_of(n, columns)](
        tokens, products, t, num_prefix, c,
        ROWS=rows, COLUMNS=columns, CHANNELS=channels, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return products

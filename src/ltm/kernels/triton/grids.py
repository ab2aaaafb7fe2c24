"""Merges of grids: weighted means over the rows and columns of a support.

Letters: b images, h x w tokens before, h2 x w2 after, c channels.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ltm.kernels.dispatch import stays_map
from ltm.kernels.triton.launch import FEW_IMAGES, ROOM, fitting, has_room, parts_of, sizes_of


@triton.jit
def _grid_kernel(
    tokens, weight, rows, columns, merged, h, w, h2, w2, c, weight_stride,
    image_in, token_in, channel_in, image_out, token_out, channel_out,
    HAS_WEIGHT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some channels of one row of merged tokens, from the rows in its support only."""
    image, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channels = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    across, places = tl.arange(0, WIDTH), tl.arange(0, PLACES)
    inside, known = across < w, channels < c
    table = tl.load(
        columns + across[None] * w2 + places[:, None],
        mask=inside[None] & (places < w2)[:, None], other=0.0,
    ).to(tl.float32)  # fmt: skip
    down = tl.arange(0, HEIGHT)
    parts = tl.load(rows + down * h2 + row, mask=down < h, other=0.0)
    first = tl.min(tl.where(parts != 0, down, HEIGHT), axis=0)
    last = tl.max(tl.where(parts != 0, down, -1), axis=0)
    found = tl.zeros((PLACES, CHANNELS), tl.float32)
    weighed = tl.zeros((WIDTH,), tl.float32)
    for y in range(first, last + 1):
        x = tl.load(
            tokens + image * image_in + (y * w + across[:, None]) * token_in
            + channels[None] * channel_in,
            mask=inside[:, None] & known[None], other=0.0,
        )  # fmt: skip
        part = tl.load(rows + y * h2 + row).to(tl.float32)
        share = part * table
        if HAS_WEIGHT:
            own = tl.load(weight + image * weight_stride + y * w + across, mask=inside, other=0.0)
            own = tl.minimum(own.to(tl.float32), 32768.0)  # half precision holds twice of that
            weighed += part * own
            share = share * own[None]
        found = tl.dot(share.to(x.dtype), x, found, input_precision="ieee")
    if HAS_WEIGHT:
        found = found / tl.maximum(tl.sum(weighed[None] * table, axis=1), 1e-6)[:, None]
    tl.store(
        merged + image * image_out + (row * w2 + places[:, None]) * token_out
        + channels[None] * channel_out,
        found.to(merged.dtype.element_ty), mask=(places < w2)[:, None] & known[None],
    )  # fmt: skip


def merge_grid(tokens: Tensor, weight: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
    """Weighted means over the support `rows (x) columns`; without weights, the plain product.

    Tokens are in raster order.
    """
    (h, h2), (w, w2) = rows.shape, columns.shape
    b, _, c = tokens.shape
    if stays_map(tokens):
        merged = tokens.new_empty(b, c, h2 * w2).mT
    else:
        tokens, merged = tokens.contiguous(), tokens.new_empty(b, h2 * w2, c)
    weight_, stride = sizes_of(weight, merged)
    half = tokens.element_size() == 2
    wide = c > 64 and b >= FEW_IMAGES and half and has_room(tokens.device, ROOM)
    some = 16 if c <= 32 else 128 if wide else 64
    _grid_kernel[b, h2, parts_of(c, some)](
        tokens, weight_, rows.contiguous(), columns.contiguous(), merged,
        h, w, h2, w2, c, stride, *tokens.stride(), *merged.stride(), HAS_WEIGHT=weight is not None,
        HEIGHT=fitting(h), WIDTH=fitting(w, 16), PLACES=fitting(w2, 16), CHANNELS=some,
        num_warps=2 if w <= 32 else 4, num_stages=1,  # supports have few rows
    )  # fmt: skip
    return merged

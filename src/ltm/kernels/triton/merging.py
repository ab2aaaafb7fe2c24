"""The merge: into the places that a matching gave, or by a constant matrix.

Letters: b images, t tokens with their k prefix tokens, p tokens that stay (prefix included), r
tokens that leave, c channels.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltm.kernels.triton.launch import FEW_IMAGES, fitting, parts_of, sizes_of


@triton.jit
def _merge_kernel(
    tokens, weight, size, values, assignment, stays, leaves, merged, merged_size, means, t, p, r, c,
    k, weight_stride, size_stride, value_stride,
    KEEP_NORM: tl.constexpr, HAS_SIZE: tl.constexpr, HAS_VALUES: tl.constexpr,
    LEAVING: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One merged token, its size and value: of those that leave, only who comes here is read."""
    image, place = tl.program_id(0) // p, tl.program_id(0) % p
    weights, sizes = weight + image * weight_stride, size + image * size_stride
    turns, channels = tl.arange(0, LEAVING), tl.arange(0, CHANNELS)
    own = tl.load(stays + image * p + place)
    start = tokens + image.to(tl.int64) * t * c + channels
    x = tl.load(start + own * c, mask=channels < c, other=0.0)  # comes while others are looked for
    who = tl.load(leaves + image * r + turns, mask=turns < r, other=0)
    goes = tl.load(assignment + image * t + who, mask=turns < r, other=-1).to(tl.int32)
    brings = tl.load(weights + who, mask=goes == place, other=0.0)
    comes = brings > 0
    share = tl.load(weights + own)
    total = tl.maximum(share + tl.sum(tl.where(comes, brings, 0.0), axis=0), 1e-12)
    if HAS_SIZE:
        more = tl.load(sizes + who, mask=comes, other=0.0).to(tl.float32)
        counted = tl.where(share > 0, tl.load(sizes + own).to(tl.float32), 0.0) + tl.sum(more, 0)
    else:
        counted = tl.where(share > 0, 1.0, 0.0) + tl.sum(comes.to(tl.float32), axis=0)
    tl.store(merged_size + image * p + place, counted)
    if HAS_VALUES:
        patches = values + image * value_stride - k
        theirs = tl.load(patches + who, mask=comes, other=0.0).to(tl.float32)
        value = tl.load(patches + own, mask=place >= k, other=0.0).to(tl.float32)
        value = (share * value + tl.sum(tl.where(comes, brings * theirs, 0.0), axis=0)) / total
        tl.store(means + image * (p - k) + place - k, value, mask=place >= k)
    out = merged + (image.to(tl.int64) * p + place) * c + channels
    number = tl.sum(comes.to(tl.int32), axis=0)
    if number == 0:  # as most tokens of most merges: they only move
        tl.store(out, tl.where(share == 0, 0.0, x), mask=channels < c)
        return
    x = x.to(tl.float32)
    largest = tl.where(share > 0, tl.sum(x * x, axis=0), 0.0)
    mean = x * (share / total)
    last = -1
    for _ in range(number):
        last = tl.min(tl.where(comes & (turns > last), turns, LEAVING), axis=0)
        token = tl.sum(tl.where(turns == last, who, 0), axis=0)
        part = tl.sum(tl.where(turns == last, brings, 0.0), axis=0) / total
        y = tl.load(start + token * c, mask=channels < c, other=0.0).to(tl.float32)
        mean += part * y
        largest = tl.maximum(largest, tl.sum(y * y, axis=0))
    if KEEP_NORM:
        length = tl.sqrt(tl.sum(mean * mean, axis=0))
        mean = mean * (tl.sqrt(largest) / tl.maximum(length, 1e-12))
    tl.store(out, mean.to(merged.dtype.element_ty), mask=channels < c)


@triton.jit
def _mix_kernel(
    matrix, tokens, merged, t, wide, p, c,
    PLACES: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some channels of some merged tokens: a tile of a matrix that is the same for all images."""
    image = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    channels = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    valid, known = places < p, channels < c
    found = tl.zeros((PLACES, CHANNELS), tl.float32)
    for first in range(0, t, TOKENS):
        some = first + tl.arange(0, TOKENS)
        weight = tl.load(
            matrix + places[:, None] * wide + some[None],
            mask=valid[:, None] & (some < wide)[None], other=0.0,
        )  # fmt: skip
        x = tl.load(
            tokens + (image * t + some[:, None]) * c + channels[None],
            mask=(some < t)[:, None] & known[None], other=0.0,
        )  # fmt: skip
        found = tl.dot(weight, x, found, input_precision="ieee")
    tl.store(
        merged + (image * p + places[:, None]) * c + channels[None],
        found.to(merged.dtype.element_ty), mask=valid[:, None] & known[None],
    )  # fmt: skip


def merge_groups(
    tokens: Tensor,
    weight: Tensor,
    size: Tensor | None,
    values: Tensor | None,
    assignment: Tensor,
    stays: Tensor,
    leaves: Tensor,
    keep_norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted means, of the largest norm of their group if asked for; their sizes and values."""
    b, t, c = tokens.shape
    num_places = stays.shape[1]
    tokens = tokens.contiguous()
    merged = tokens.new_empty(b, num_places, c)
    merged_size = torch.empty(b, num_places, device=tokens.device, dtype=torch.float32)
    weight_, weight_stride = sizes_of(weight.float(), merged_size)
    size_, stride = sizes_of(size, merged_size)
    values_, value_stride = sizes_of(values, merged_size)
    k = 0 if values is None else t - values.shape[1]
    means = merged_size.new_empty(0 if values is None else (b, num_places - k))
    num_leaving = leaves.shape[1]
    _merge_kernel[(b * num_places,)](
        tokens, weight_, size_, values_, assignment, stays, leaves, merged, merged_size, means,
        t, num_places, num_leaving, c, k, weight_stride, stride, value_stride,
        KEEP_NORM=keep_norm, HAS_SIZE=size is not None, HAS_VALUES=values is not None,
        LEAVING=fitting(num_leaving), CHANNELS=fitting(c), num_warps=1,
    )  # fmt: skip
    return merged, merged_size, means


def mix(matrix: Tensor, tokens: Tensor) -> Tensor:
    """The same product for every image. Any number of tokens will do, 197 of them are usual.

    Rows of the matrix are read at once where their length is a multiple of 16: columns beyond the
    tokens may fill them up.
    """
    (b, t, c), (p, wide) = tokens.shape, matrix.shape
    merged = tokens.new_empty(b, p, c)
    small = b < FEW_IMAGES and tokens.element_size() == 2
    some, channels = (64, 64) if small else (32, 128)
    _mix_kernel[b, parts_of(p, 64), parts_of(c, channels)](
        matrix.contiguous(), tokens.contiguous(), merged, t, wide, p, c,
        PLACES=64, TOKENS=some, CHANNELS=channels, num_warps=4, num_stages=3,
    )  # fmt: skip
    return merged

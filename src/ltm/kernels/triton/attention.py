"""Attention to tokens that count by their size, and what tokens receive of it.

Letters: b images, t tokens, h heads, d channels of a head.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltm.kernels.triton.launch import FEW_IMAGES, fitting, has_room, parts_of, sizes_of

LOG2_E = 1.4426950408889634
MOST_AT_ONCE = 256
"""Tokens of half precision whose keys and values a program can hold."""
ROOM = 160 * 1024
"""Bytes of shared memory that this takes: an A100 and what came after it have them."""


@triton.jit
def _bias_of(size, power):
    """What sizes add to scores, in powers of two; a size of zero marks what is not there."""
    return power * tl.log2(tl.maximum(size.to(tl.float32), 1e-10))


@triton.jit
def _importance_kernel(
    qkv, size, importance, t, heads, d, size_stride, scale, power,
    HAS_SIZE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The attention that every token of an image receives from the first in one head."""
    image, head = tl.program_id(0), tl.program_id(1)
    everyone, width = tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    inside, known = everyone < t, width < d
    row = 3 * heads * d
    start = qkv + image.to(tl.int64) * t * row
    query = tl.load(start + head * d + width, mask=known, other=0.0).to(tl.float32)
    key = tl.load(
        start + everyone[:, None] * row + (heads + head) * d + width[None],
        mask=inside[:, None] & known[None], other=0.0,
    )  # fmt: skip
    scores = tl.sum(key.to(tl.float32) * query[None], axis=1) * scale
    if HAS_SIZE:
        found = tl.load(size + image * size_stride + everyone, mask=inside, other=1.0)
        scores += _bias_of(found, power)
    scores = tl.where(inside, scores, float("-inf"))
    scores = tl.exp2(scores - tl.max(scores, axis=0))
    received = scores / tl.sum(scores, axis=0)
    tl.store(importance + (image * heads + head) * t + everyone, received, mask=inside)


@triton.jit
def _keys_of(
    start, sizes, first, t, row, across, d, power, KEYS: tl.constexpr, WIDTH: tl.constexpr
):
    """Some keys and values of a head, and what the keys' sizes add to scores in powers of two."""
    keys, width = first + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    there = keys < t
    place = start + keys[:, None] * row + width[None]
    valid = there[:, None] & (width < d)[None]
    key = tl.load(place + across, mask=valid, other=0.0)
    value = tl.load(place + 2 * across, mask=valid, other=0.0)
    found = tl.load(sizes + keys, mask=there, other=1.0)
    return key, value, tl.where(there, _bias_of(found, power), float("-inf"))


@triton.jit
def _short_attention_kernel(
    qkv, size, out, t, heads, d, size_stride, scale, power, REPEATS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attention of some blocks of queries of a head; all keys, in one tile or two, are at hand."""
    blocks = tl.cdiv(t, ROWS * REPEATS)
    which = tl.program_id(0) // blocks
    image, head = which // heads, which % heads
    across, width = heads * d, tl.arange(0, WIDTH)
    row, known = 3 * across, width < d
    start = qkv + image.to(tl.int64) * t * row + head * d
    sizes = size + image * size_stride
    key, value, bias = _keys_of(start, sizes, 0, t, row, across, d, power, KEYS, WIDTH)
    if MORE > 0:
        key2, value2, bias2 = _keys_of(start, sizes, KEYS, t, row, across, d, power, MORE, WIDTH)
    for repeat in range(REPEATS):
        rows = (tl.program_id(0) % blocks * REPEATS + repeat) * ROWS + tl.arange(0, ROWS)
        asking = (rows < t)[:, None] & known[None]
        query = tl.load(start + rows[:, None] * row + width[None], mask=asking, other=0.0)
        scores = tl.dot(query, tl.trans(key)) * scale + bias[None]
        largest = tl.max(scores, axis=1)
        if MORE > 0:
            scores2 = tl.dot(query, tl.trans(key2)) * scale + bias2[None]
            largest = tl.maximum(largest, tl.max(scores2, axis=1))
        scores = tl.exp2(scores - largest[:, None])
        total = tl.sum(scores, axis=1)
        answer = tl.dot(scores.to(value.dtype), value)
        if MORE > 0:
            scores2 = tl.exp2(scores2 - largest[:, None])
            total += tl.sum(scores2, axis=1)
            answer = tl.dot(scores2.to(value.dtype), value2, answer)
        answer = answer / total[:, None]
        tl.store(
            out + (image.to(tl.int64) * t + rows[:, None]) * across + head * d + width[None],
            answer.to(out.dtype.element_ty), mask=asking,
        )  # fmt: skip


@triton.jit
def _attention_kernel(
    qkv, size, out, t, heads, d, size_stride, scale, power,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attention of some queries of a head, to keys that count as often as their size says."""
    blocks = tl.cdiv(t, ROWS)
    which = tl.program_id(0) // blocks
    image, head = which // heads, which % heads
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    width = tl.arange(0, WIDTH)
    known, asking = width < d, rows < t
    row = 3 * heads * d
    start = qkv + image.to(tl.int64) * t * row + head * d
    sizes = size + image * size_stride
    query = tl.load(
        start + rows[:, None] * row + width[None], mask=asking[:, None] & known[None], other=0.0
    )
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    answer = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, t, COLUMNS):
        key, value, bias = _keys_of(
            start, sizes, first, t, row, heads * d, d, power, COLUMNS, WIDTH
        )
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores += bias[None]
        now = tl.maximum(largest, tl.max(scores, axis=1))
        scores = tl.exp2(scores - now[:, None])
        before = tl.exp2(largest - now)
        total = total * before + tl.sum(scores, axis=1)
        answer = answer * before[:, None]
        answer = tl.dot(scores.to(value.dtype), value, answer, input_precision="ieee")
        largest = now
    answer = answer / total[:, None]
    tl.store(
        out + (image.to(tl.int64) * t + rows[:, None]) * heads * d + head * d + width[None],
        answer.to(out.dtype.element_ty), mask=asking[:, None] & known[None],
    )  # fmt: skip


def importance(
    qkv: Tensor, size: Tensor | None, num_heads: int, scale: float, power: float = 1.0
) -> Tensor:
    """Attention received from the first token, from the output of a `qkv` projection."""
    b, t, width = qkv.shape
    d = width // (3 * num_heads)
    found = torch.empty(b, num_heads, t, device=qkv.device, dtype=torch.float32)
    size_, stride = sizes_of(size, found)
    _importance_kernel[b, num_heads](
        qkv.contiguous(), size_, found, t, num_heads, d, stride, scale * LOG2_E, power,
        HAS_SIZE=size is not None, TOKENS=fitting(t), WIDTH=fitting(d), num_warps=4,
    )  # fmt: skip
    return found.mean(dim=1)


def attention(
    qkv: Tensor, size: Tensor, num_heads: int, scale: float, power: float = 1.0
) -> Tensor:
    """Proportional attention, from the output of a `qkv` projection to the input of `proj`."""
    b, t, width = qkv.shape
    d = width // (3 * num_heads)
    out = qkv.new_empty(b, t, num_heads * d)
    size_, stride = sizes_of(size, size)
    arguments = (qkv.contiguous(), size_, out, t, num_heads, d, stride, scale * LOG2_E, power)
    channels, few = fitting(d, 16), b < FEW_IMAGES
    if qkv.element_size() == 2 and t <= MOST_AT_ONCE and has_room(qkv.device, ROOM):
        keys, more = _tiles(t)
        repeats = 1 if few else parts_of(t, 64)
        _short_attention_kernel[(parts_of(t, 64 * repeats) * b * num_heads,)](
            *arguments, REPEATS=repeats, ROWS=64, KEYS=keys, MORE=more, WIDTH=channels,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        return out
    rows, columns, stages = (32, 64, 2) if few else (64, 32, 3)
    _attention_kernel[(parts_of(t, rows) * b * num_heads,)](
        *arguments, ROWS=rows, COLUMNS=columns, WIDTH=channels, num_warps=4, num_stages=stages
    )
    return out


def _tiles(t: int) -> tuple[int, int]:
    """One power of two for all keys, or two of them where that wastes less."""
    whole = fitting(t, 16)
    if whole <= 128 or t > 192:
        return whole, 0
    return 128, fitting(t - 128, 16)

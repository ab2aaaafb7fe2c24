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

from ltm.core.kernels.launch import FEW_IMAGES, sizes_of

LOG2_E = tl.constexpr(1.4426950408889634)
SMALLEST_SIZE = tl.constexpr(1e-10)


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
        scores += power * tl.log(tl.maximum(found.to(tl.float32), SMALLEST_SIZE))
    scores = tl.where(inside, scores, float("-inf"))
    scores = tl.exp(scores - tl.max(scores, axis=0))
    received = scores / tl.sum(scores, axis=0)
    tl.store(importance + (image * heads + head) * t + everyone, received, mask=inside)


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
    query = tl.load(
        start + rows[:, None] * row + width[None], mask=asking[:, None] & known[None], other=0.0
    )
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    answer = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, t, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        there = columns < t
        place = start + columns[:, None] * row + width[None]
        valid = there[:, None] & known[None]
        key = tl.load(place + heads * d, mask=valid, other=0.0)
        value = tl.load(place + 2 * heads * d, mask=valid, other=0.0)
        found = tl.load(size + image * size_stride + columns, mask=there, other=1.0)
        bias = power * tl.log2(tl.maximum(found.to(tl.float32), SMALLEST_SIZE))
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
        scores = tl.where(there[None], scores + bias[None], float("-inf"))
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
        qkv.contiguous(), size_, found, t, num_heads, d, stride, scale, power,
        HAS_SIZE=size is not None, TOKENS=triton.next_power_of_2(t),
        WIDTH=triton.next_power_of_2(d), num_warps=4,
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
    rows, columns, stages = (32, 64, 2) if b < FEW_IMAGES else (64, 32, 3)
    _attention_kernel[(triton.cdiv(t, rows) * b * num_heads,)](
        qkv.contiguous(), size_, out, t, num_heads, d, stride, scale, power,
        ROWS=rows, COLUMNS=columns, WIDTH=max(16, triton.next_power_of_2(d)),
        num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out

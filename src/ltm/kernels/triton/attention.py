"""Proportional attention, in which a token counts by its size, and the attention tokens receive.

Letters: b images, t tokens, h heads, d channels of a head.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltm.kernels.triton.launch import (
    FEW_IMAGES,
    fitting,
    has_room,
    parts_of,
    sizes_of,
)

_LOG2_E = 1.4426950408889634
_MOST_AT_ONCE = 256
"""Most tokens whose keys and values fit into a program, in half precision."""
_ROOM = 160 * 1024
"""The shared memory that this takes, in bytes; an A100 and later GPUs have it."""
_MOST_CHANNELS = 64
"""Wider heads go through all keys tile by tile."""


@triton.jit
def _bias_of(size, power):
    """The bias of sizes on the scores, to base two; a token of size zero is masked out."""
    size = size.to(tl.float32)
    return tl.where(size > 0, power * tl.log2(tl.maximum(size, 1e-10)), -33.2)  # log2(1e-10)


@triton.jit
def _score_kernel(
    asking, key, size, scores, peaks, sums, t, d, asking_image, asking_head,
    key_image, key_token, key_head, key_offset, size_stride, scale, power,
    HAS_SIZE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The scores of some tokens of an image in one head, to base two.

    Peak and sum of these tokens are combined later with those of others into a softmax.
    """
    image, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    some, width = part * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    inside, known = some < t, width < d
    place = asking + image * asking_image + head * asking_head + width
    query = tl.load(place, mask=known, other=0.0).to(tl.float32)
    start = key + image * key_image + head * key_head + key_offset
    keys = tl.load(
        start + some[:, None] * key_token + width[None],
        mask=inside[:, None] & known[None], other=0.0,
    )  # fmt: skip
    found = tl.sum(keys.to(tl.float32) * query[None], axis=1) * scale
    if HAS_SIZE:
        there = tl.load(size + image * size_stride + some, mask=inside, other=1.0)
        found += _bias_of(there, power)
    found = tl.where(inside, found, float("-inf"))
    peak = tl.max(found, axis=0)
    row = image * tl.num_programs(1) + head
    tl.store(scores + row * t + some, found, mask=inside)
    tl.store(peaks + row * tl.num_programs(2) + part, peak)
    tl.store(sums + row * tl.num_programs(2) + part, tl.sum(tl.exp2(found - peak), axis=0))


@triton.jit
def _share_kernel(
    scores, peaks, sums, importance, t, heads, parts, TOKENS: tl.constexpr, PARTS: tl.constexpr
):
    """The attention that some tokens of an image receive, averaged over heads."""
    image = tl.program_id(0)
    some, part = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, PARTS)
    inside = some < t
    received = tl.zeros((TOKENS,), tl.float32)
    for head in range(heads):
        row = image.to(tl.int64) * heads + head
        peak = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
        total = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
        top = tl.max(peak, axis=0)
        total = tl.sum(total * tl.exp2(peak - top), axis=0)
        found = tl.load(scores + row * t + some, mask=inside, other=float("-inf"))
        received += tl.exp2(found - top) / total
    tl.store(importance + image * t + some, received / heads, mask=inside)


@triton.jit
def _bias_kernel(size, bias, number, power, TOKENS: tl.constexpr):
    """The bias of sizes on the scores, computed once for all heads and queries."""
    some = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = some < number
    found = tl.load(size + some, mask=inside, other=1.0)
    tl.store(bias + some, _bias_of(found, power), mask=inside)


@triton.jit
def _keys_of(
    start, sizes, first, t, row, across, d, power, KEYS: tl.constexpr, WIDTH: tl.constexpr
):
    """Some keys and values of a head, and the bias of the keys' sizes, to base two."""
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
    """Attention of some blocks of queries of a head, with all keys held in one tile or two."""
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
def _take_in(
    asked, keys, values, biases, first, t, key_token, value_token, d, scale,
    largest, total, answer,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Take some keys, from `first` on, and their values into the softmax so far.

    WHOLE says that all of them are there.
    """
    columns, width = first + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    there = (columns < t) | WHOLE
    valid = there[:, None] & ((width < d) | EVEN)[None]
    key = tl.load(keys + columns[:, None] * key_token + width[None], mask=valid, other=0.0)
    value = tl.load(values + columns[:, None] * value_token + width[None], mask=valid, other=0.0)
    counted = tl.load(biases + columns, mask=there, other=float("-inf"))
    scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale + counted[None]
    now = tl.maximum(largest, tl.max(scores, axis=1))
    scores = tl.exp2(scores - now[:, None])
    before = tl.exp2(largest - now)
    total = total * before + tl.sum(scores, axis=1)
    answer = answer * before[:, None]
    answer = tl.dot(scores.to(value.dtype), value, answer, input_precision="ieee")
    return now, total, answer


@triton.jit
def _attention_kernel(
    query, key, value, bias, out, t, heads, d,
    query_image, query_token, query_head, key_image, key_token, key_head,
    value_image, value_token, value_head, key_offset, value_offset, bias_stride, scale,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attention of some queries of a head, with a bias on the keys.

    Keys come in tiles of COLUMNS; what is left after them fits in REST.
    """
    blocks = tl.cdiv(t, ROWS)
    which = tl.program_id(0) // blocks
    image, head = (which // heads).to(tl.int64), which % heads
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    width = tl.arange(0, WIDTH)
    asking = (rows < t)[:, None] & ((width < d) | EVEN)[None]
    asked = tl.load(
        query + image * query_image + head * query_head + rows[:, None] * query_token + width[None],
        mask=asking, other=0.0,
    )  # fmt: skip
    keys = key + image * key_image + head * key_head + key_offset
    values = value + image * value_image + head * value_head + value_offset
    biases = bias + image * bias_stride
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    answer = tl.zeros((ROWS, WIDTH), tl.float32)
    whole = t // COLUMNS * COLUMNS
    for first in range(0, whole, COLUMNS):
        largest, total, answer = _take_in(
            asked, keys, values, biases, first, t, key_token, value_token, d, scale,
            largest, total, answer, EVEN, True, COLUMNS, WIDTH,
        )  # fmt: skip
    if REST > 0:
        largest, total, answer = _take_in(
            asked, keys, values, biases, whole, t, key_token, value_token, d, scale,
            largest, total, answer, EVEN, False, REST, WIDTH,
        )  # fmt: skip
    answer = answer / total[:, None]
    place = out + (image * t + rows[:, None]) * heads * d + head * d + width[None]
    tl.store(place, answer.to(out.dtype.element_ty), mask=asking)


@triton.jit
def _turn_kernel(
    x, sines, cosines, positions, out, t, heads, d, prefix, groups, x_image, x_token, x_head,
    angle_image, angle_head, angle_token, position_image,
    PLACED: tl.constexpr, HALVES: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some tokens of a head, turned by the angles of their places; the prefix is not turned."""
    image, head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    some = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    width = tl.arange(0, WIDTH)
    inside = (some < t)[:, None] & (width < d)[None]
    if HALVES:
        other = tl.where(width < d // 2, width + d // 2, width - d // 2)
        sign = tl.where(width < d // 2, -1.0, 1.0)
    else:
        other = width ^ 1
        sign = tl.where(width % 2 == 0, -1.0, 1.0)
    start = x + image * x_image + head * x_head + some[:, None] * x_token
    whole = tl.load(start + width[None], mask=inside, other=0.0).to(tl.float32)
    across = tl.load(start + other[None], mask=inside, other=0.0).to(tl.float32) * sign[None]
    stands = (some >= prefix) & (some < t)
    place = some.to(tl.int64)
    if PLACED:
        place = tl.load(positions + image * position_image + some, mask=stands, other=0)
    place = (place - prefix)[:, None]
    angle = image * angle_image + head % groups * angle_head + place * angle_token
    turns = stands[:, None] & (width < d)[None]
    cosine = tl.load(cosines + angle + width[None], mask=turns, other=1.0).to(tl.float32)
    sine = tl.load(sines + angle + width[None], mask=turns, other=0.0).to(tl.float32)
    found = whole * cosine + across * sine
    to = out + ((image * t + some[:, None]) * heads + head) * d + width[None]
    tl.store(to, found.to(out.dtype.element_ty), mask=inside)


class Heads(NamedTuple):
    """Queries, keys or values, with their strides over images, tokens and heads."""

    tensor: Tensor
    image: int
    token: int
    head: int
    offset: int = 0

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.image, self.token, self.head


def _heads(x: Tensor) -> Heads:
    """The heads of a tensor `b t h d`."""
    x = x if x.stride(3) == 1 else x.contiguous()
    return Heads(x, x.stride(0), x.stride(1), x.stride(2))


def _parts(qkv: Tensor, num_heads: int) -> tuple[Heads, Heads, Heads]:
    """Queries, keys and values in the output of a `qkv` projection."""
    _, t, width = qkv.shape
    across = width // 3
    query, key, value = (
        Heads(qkv, t * width, width, across // num_heads, part * across) for part in range(3)
    )
    return query, key, value


def importance(
    qkv: Tensor,
    size: Tensor | None,
    num_heads: int,
    scale: float,
    power: float = 1.0,
    class_token: bool = True,
) -> Tensor:
    """Attention received from the first token, or from the mean query, of a `qkv` projection."""
    qkv = qkv.contiguous()
    query, key, _ = _parts(qkv, num_heads)
    across = qkv.shape[2] // 3
    if not class_token:
        mean = qkv[..., :across].mean(dim=1, dtype=torch.float32)
        query = Heads(mean, across, 0, query.head)
    return _received(query, key, size, qkv.shape[1], num_heads, across // num_heads, scale, power)


def importance_of(
    asking: Tensor, key: Tensor, size: Tensor | None, scale: float, power: float = 1.0
) -> Tensor:
    """Attention that keys, `b t h d`, receive from one query, `b 1 h d`."""
    _, t, h, d = key.shape
    return _received(_heads(asking), _heads(key), size, t, h, d, scale, power)


def _received(
    query: Heads, key: Heads, size: Tensor | None, t: int, h: int, d: int, scale: float,
    power: float,
) -> Tensor:  # fmt: skip
    b = key.tensor.shape[0]
    some = min(fitting(t), _MOST_AT_ONCE if b >= FEW_IMAGES else 64)
    parts = parts_of(t, some)
    scores = torch.empty(b, h, t, device=key.tensor.device, dtype=torch.float32)
    peaks, sums = scores.new_empty(b, h, parts), scores.new_empty(b, h, parts)
    found = scores.new_empty(b, t)
    size_, stride = sizes_of(size, scores)
    _score_kernel[b, h, parts](
        query.tensor, key.tensor, size_, scores, peaks, sums, t, d, query.image, query.head,
        *key.strides, key.offset, stride, scale * _LOG2_E, power,
        HAS_SIZE=size is not None, TOKENS=some, WIDTH=fitting(d), num_warps=4,
    )  # fmt: skip
    _share_kernel[b, parts_of(t, 128)](
        scores, peaks, sums, found, t, h, parts, TOKENS=128, PARTS=fitting(parts), num_warps=4
    )
    return found


def attention(
    qkv: Tensor, size: Tensor, num_heads: int, scale: float, power: float = 1.0
) -> Tensor:
    """Proportional attention, from the output of a `qkv` projection to the input of `proj`."""
    b, t, width = qkv.shape
    qkv, d = qkv.contiguous(), width // (3 * num_heads)
    short = qkv.element_size() == 2 and t <= _MOST_AT_ONCE and d <= _MOST_CHANNELS
    if not (short and has_room(qkv.device, _ROOM)):
        return _attend(*_parts(qkv, num_heads), size, t, num_heads, d, scale, power)
    out = qkv.new_empty(b, t, num_heads * d)
    size_, stride = sizes_of(size, size)
    keys, more = _tiles(t)
    repeats = 1 if b < FEW_IMAGES else parts_of(t, 64)
    _short_attention_kernel[(parts_of(t, 64 * repeats) * b * num_heads,)](
        qkv, size_, out, t, num_heads, d, stride, scale * _LOG2_E, power,
        REPEATS=repeats, ROWS=64, KEYS=keys, MORE=more, WIDTH=fitting(d, 16),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def attention_of(
    query: Tensor, key: Tensor, value: Tensor, size: Tensor, scale: float, power: float = 1.0
) -> Tensor:
    """Proportional attention of queries, keys and values, `b t h d`, to the input of `proj`."""
    _, t, h, d = query.shape
    return _attend(_heads(query), _heads(key), _heads(value), size, t, h, d, scale, power)


def turned(
    x: Tensor,
    sines: Tensor,
    cosines: Tensor,
    positions: Tensor | None,
    num_prefix: int,
    halves: bool,
) -> Tensor:
    """Queries or keys, `b t h d`, turned by angles `i g n d`."""
    b, t, h, d = x.shape
    x, *strides, _ = _heads(x)
    if sines.stride() != cosines.stride() or sines.stride(3) != 1:
        sines, cosines = sines.contiguous(), cosines.contiguous()
    angles = sines.stride(0) if len(sines) > 1 else 0, sines.stride(1), sines.stride(2)
    placed = positions is not None
    at = x if positions is None else positions
    some = 16 if b < FEW_IMAGES else 32
    out = x.new_empty(b, t, h, d)
    _turn_kernel[b, parts_of(t, some), h](
        x, sines, cosines, at, out, t, h, d, num_prefix, sines.shape[1], *strides, *angles,
        at.stride(0) if placed else 0,
        PLACED=placed, HALVES=halves, TOKENS=some, WIDTH=fitting(d), num_warps=4,
    )  # fmt: skip
    return out


def _attend(
    query: Heads, key: Heads, value: Heads, size: Tensor, t: int, h: int, d: int, scale: float,
    power: float,
) -> Tensor:  # fmt: skip
    b, x = query.tensor.shape[0], query.tensor
    out = x.new_empty(b, t, h * d)
    size, stride = sizes_of(size, size)
    bias = torch.empty(size.shape, device=x.device, dtype=torch.float32)
    number = bias.numel()
    _bias_kernel[(parts_of(number, 256),)](size, bias, number, power, TOKENS=256, num_warps=2)
    rows, columns, warps, stages = _blocks(x, t, fitting(d, 16))
    _attention_kernel[(parts_of(t, rows) * b * h,)](
        query.tensor, key.tensor, value.tensor, bias, out, t, h, d,
        *query.strides, *key.strides, *value.strides, key.offset, value.offset, stride,
        scale * _LOG2_E, EVEN=d == fitting(d, 16), ROWS=rows, COLUMNS=columns,
        REST=fitting(t % columns, 16) if t % columns else 0, WIDTH=fitting(d, 16),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _blocks(x: Tensor, num_keys: int, width: int) -> tuple[int, int, int, int]:
    """Queries and keys per program, warps, and pipeline stages."""
    wide = width > _MOST_CHANNELS
    if x.element_size() == 4:
        return (32, 32, 4, 1) if wide else (64, 32, 4, 2)
    if not has_room(x.device, _ROOM):
        return (64, 32, 4, 2)
    if wide:
        return (64, 64, 4, 3)
    columns = 128
    return (64, columns, 4, 2 if num_keys % columns else 3)  # as measured on an H200


def _tiles(t: int) -> tuple[int, int]:
    """One power of two that holds all keys, or two if that wastes less."""
    whole = fitting(t, 16)
    if whole <= 128 or t > 192:
        return whole, 0
    return 128, fitting(t - 128, 16)

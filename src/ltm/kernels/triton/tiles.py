"""Matching of long sequences: pairs of patches are compared tile by tile, and none is stored.

The first pass goes over all pairs and keeps the least harm of merging each patch. The patches of
least harm leave. The second pass compares those that leave with those that stay, and keeps the
nearest of each. If even patches may only join odd ones, one pass finds both.

Tiles are combined by atomic minima of integers, so every run gives the same result: floats that are
not negative have the order of their bits, and the bits of a pair's distance come before the place
of the partner, so that the first of equal partners is taken.

Letters: b images, t tokens with their k prefix tokens, n patch tokens, p tokens that stay (prefix
included), r tokens that leave, c channels.
"""

# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltm.kernels.triton.launch import (
    ROOM,
    fitting,
    has_room,
    parts_of,
    sizes_of,
    warps_for,
)
from ltm.kernels.triton.weighing import Step, step_of, weight_of

_MANY_TILES = 512
"""With enough of them, tiles of 128 x 128 patches are faster."""
NOBODY = tl.constexpr(0x7FFFFFFF)
"""Larger than the bits of any float: a patch with this value never leaves."""
FARTHEST = tl.constexpr(0x7FFFFFFFFFFFFFFF)
"""Larger than any pair of distance and place."""


@triton.jit
def _square_kernel(
    tokens, squares, least, t, k, c,
    ALTERNATE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The squared lengths of some patches of an image; also resets their least harm or partner."""
    image, n = tl.program_id(0), t - k
    rows = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    here = rows < n
    start = tokens + (image * t + k).to(tl.int64) * c + rows[:, None] * c
    found = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, c, CHANNELS):
        channels = first + tl.arange(0, CHANNELS)
        valid = here[:, None] & (channels < c)[None]
        x = tl.load(start + channels[None], mask=valid, other=0.0).to(tl.float32)
        found += tl.sum(x * x, axis=1)
    tl.store(squares + image * n + rows, found, mask=here)
    if ALTERNATE:
        nothing = tl.full((TOKENS,), FARTHEST, tl.int64)
        even = here & (rows % 2 == 0)
        tl.store(least + image * ((n + 1) // 2) + rows // 2, nothing, mask=even)
    else:
        tl.store(least + image * n + rows, tl.full((TOKENS,), NOBODY, tl.int32), mask=here)


@triton.jit
def _products(
    own, theirs, inside, there, c, FULL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Products of tokens (down) with others (across), given the addresses of their channels."""
    found = tl.zeros((own.shape[0], theirs.shape[0]), tl.float32)
    for first in range(0, c, CHANNELS):
        channels = first + tl.arange(0, CHANNELS)
        known = (channels < c) | FULL
        # Nothing but the product may read these tiles: on Hopper, Triton (3.6, 3.9) continues a
        # product while the next tile is loaded, and does not wait for other readers.
        x = tl.load(own[:, None] + channels[None], mask=inside[:, None] & known[None], other=0.0)
        y = tl.load(theirs[:, None] + channels[None], mask=there[:, None] & known[None], other=0.0)
        if x.dtype == tl.float32:  # a sum a tile: one long sum would round more
            found += tl.dot(x, tl.trans(y), input_precision="ieee")
        else:
            found = tl.dot(x, tl.trans(y), found)
    return found


@triton.jit
def _apart(own, theirs, both):
    """Squared distances from squared lengths and products.

    NaN and infinity become the largest distance, still less than that of excluded patches.
    """
    found = own[:, None] + theirs[None] - 2 * both
    return tl.where(found < 3e38, tl.maximum(found, 0.0), 3e38)


@triton.jit
def _ward(own, theirs):
    """`2 m_i m_j / (m_i + m_j)`, which is 1 if all sizes are one."""
    return 2 * own[:, None] * theirs[None] / tl.maximum(own[:, None] + theirs[None], 1e-6)


@triton.jit
def _harm_kernel(
    tokens, squares, size, attention, harm, t, k, c, size_stride,
    HAS_SIZE: tl.constexpr, HAS_ATTENTION: tl.constexpr, FULL: tl.constexpr,
    SIDE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The least harm of merging patches of one block into those of another, and the reverse.

    Of two patches only the one that receives less attention may join the other, so each pair of
    blocks is compared once.
    """
    tile, image, n = tl.program_id(0), tl.program_id(1), t - k
    # Tiles are those of a triangle, row by row: the second block is never before the first.
    second = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    second = tl.where((second + 1) * (second + 2) // 2 <= tile, second + 1, second)
    second = tl.where(second * (second + 1) // 2 > tile, second - 1, second)
    first = tile - second * (second + 1) // 2
    rows, columns = first * SIDE + tl.arange(0, SIDE), second * SIDE + tl.arange(0, SIDE)
    inside, there = rows < n, columns < n
    start = tokens + (image * t + k).to(tl.int64) * c
    both = _products(start + rows * c, start + columns * c, inside, there, c, FULL, CHANNELS)
    squares += image * n
    own = tl.load(squares + rows, mask=inside, other=0.0)
    theirs = tl.load(squares + columns, mask=there, other=0.0)
    apart = _apart(own, theirs, both)
    later = columns[None] > rows[:, None]
    goes, comes = later, columns[None] < rows[:, None]
    if HAS_ATTENTION:
        attention += image * t + k
        seen = tl.load(attention + rows, mask=inside, other=0.0)
        others = tl.load(attention + columns, mask=there, other=0.0)
        same = seen[:, None] == others[None]
        goes = (seen[:, None] < others[None]) | (same & goes)
        comes = (seen[:, None] > others[None]) | (same & comes)
    if HAS_SIZE:
        size += image * size_stride + k
        count = tl.load(size + rows, mask=inside, other=0.0).to(tl.float32)
        counts = tl.load(size + columns, mask=there, other=0.0).to(tl.float32)
        apart = apart * _ward(count, counts)
        goes, comes = goes & (counts > 0)[None], comes & (count > 0)[:, None]
    goes, comes = goes & there[None], comes & inside[:, None]
    harm += image * n
    leaving = tl.min(tl.where(goes, apart, float("inf")), axis=1)
    tl.atomic_min(harm + rows, leaving.to(tl.int32, bitcast=True), mask=inside, sem="relaxed")
    leaving = tl.min(tl.where(comes, apart, float("inf")), axis=0)
    tl.atomic_min(harm + columns, leaving.to(tl.int32, bitcast=True), mask=there, sem="relaxed")


@triton.jit
def _nearest_kernel(
    tokens, squares, size, leaves, stays, nearest, t, k, c, num_rows, num_columns, size_stride,
    ALTERNATE: tl.constexpr, HAS_SIZE: tl.constexpr, FULL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The nearest of some other patches for each: of those that stay, or of the odd ones."""
    image, n = tl.program_id(2), t - k
    turns = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside, there = turns < num_rows, columns < num_columns
    if ALTERNATE:
        rows, others = 2 * turns, 2 * columns + 1
    else:
        rows = tl.load(leaves + image * num_rows + turns, mask=inside, other=k) - k
        others = tl.load(stays + image * (t - num_rows) + k + columns, mask=there, other=k) - k
    start = tokens + (image * t + k).to(tl.int64) * c
    both = _products(start + rows * c, start + others * c, inside, there, c, FULL, CHANNELS)
    squares += image * n
    own = tl.load(squares + rows, mask=inside, other=0.0)
    theirs = tl.load(squares + others, mask=there, other=0.0)
    apart = _apart(own, theirs, both)
    if HAS_SIZE:
        size += image * size_stride + k
        counts = tl.load(size + others, mask=there, other=0.0).to(tl.float32)
        if ALTERNATE:
            count = tl.load(size + rows, mask=inside, other=0.0).to(tl.float32)
            apart = apart * _ward(count, counts)
        there = there & (counts > 0)
    apart = tl.where(there[None], apart, float("inf"))
    least, which = tl.min(apart, axis=1, return_indices=True)
    which = tl.program_id(0) * COLUMNS + which
    found = (least.to(tl.int32, bitcast=True).to(tl.int64) << 32) | which.to(tl.int64)
    tl.atomic_min(nearest + image * num_rows + turns, found, mask=inside, sem="relaxed")


@triton.jit
def _last(key, num_leaving):
    """The key of the last patch that leaves, found two bits at a time by counting smaller keys.

    Three counts are packed into one integer.
    """
    last = tl.where(tl.sum((key < (1 << 30)).to(tl.int32), axis=0) < num_leaving, 1 << 30, 0)
    for step in range(15):
        unit = 1 << (28 - 2 * step)
        counts = (key < last + unit).to(tl.int64)
        counts += (key < last + 2 * unit).to(tl.int64) << 20
        counts += (key < last + 3 * unit).to(tl.int64) << 40
        found = tl.sum(counts, axis=0)
        more = ((found & 0xFFFFF) < num_leaving).to(tl.int32)
        more += (((found >> 20) & 0xFFFFF) < num_leaving).to(tl.int32)
        more += ((found >> 40) < num_leaving).to(tl.int32)
        last += more * unit
    return last


@triton.jit
def _choose_kernel(
    least, size, weight, attention, fall, carry, gain,
    assignment, stays, leaves, weighed, logits, nearest,
    t, k, num_leaving, size_stride, weight_stride, carry_stride, protection, power, fewest, eta,
    ALTERNATE: tl.constexpr, HAS_SIZE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_ATTENTION: tl.constexpr, ATTENDED: tl.constexpr, PRUNE: tl.constexpr,
    STEPS: tl.constexpr, HAS_CARRY: tl.constexpr, HAS_GAIN: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Which tokens of an image leave and stay, in order, and the weight of each token."""
    image, n = tl.program_id(0), t - k
    tokens = tl.arange(0, TOKENS)
    inside, patches = tokens < t, tokens - k
    patch = inside & (patches >= 0)
    if ALTERNATE:
        free = patch & (patches % 2 == 0)
        packed = tl.load(least + image * ((n + 1) // 2) + patches // 2, mask=free, other=0)
        harm = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        free = patch
        found = tl.load(least + image * n + patches, mask=free, other=0)
        harm = found.to(tl.float32, bitcast=True)
    harm = tl.where(harm < float("inf"), harm, float("inf"))  # none was found
    if HAS_ATTENTION:
        seen = tl.load(attention + image * t + tokens, mask=free, other=1.0)
        harm = harm * tl.exp(protection * tl.log(tl.maximum(seen, 1e-12)))
    harm = tl.where(harm == harm, harm, float("inf"))  # noqa: PLR0124 - infinity times nothing
    if HAS_SIZE:
        count = tl.load(size + image * size_stride + tokens, mask=inside, other=1.0)
        harm = tl.where(count.to(tl.float32) <= 0, 0.0, harm)  # what is not there leaves first
    key = tl.where(free, harm.to(tl.int32, bitcast=True), NOBODY)
    last = _last(key, num_leaving)
    below, tied = key < last, (key == last).to(tl.int32)
    turn = tl.cumsum(tied, axis=0) - tied
    gone = below | ((tied > 0) & (turn < num_leaving - tl.sum(below.to(tl.int32), axis=0)))
    left = tl.cumsum(gone.to(tl.int32), axis=0)
    goes, place = gone & inside, tokens - left
    tl.store(leaves + image * num_leaving + left - 1, tokens, mask=goes)
    tl.store(stays + image * (t - num_leaving) + place, tokens, mask=inside & (gone == 0))
    tl.store(assignment + image * t + tokens, place.to(tl.int64), mask=inside & (gone == 0))
    if ALTERNATE == 0:
        nothing = tl.full((TOKENS,), FARTHEST, tl.int64)
        tl.store(nearest + image * num_leaving + left - 1, nothing, mask=goes)
    share = weight_of(
        weight + image * weight_stride, size + image * size_stride, attention + image * t,
        tokens, inside, patch, t, power, fewest, HAS_WEIGHT, HAS_SIZE, ATTENDED,
    )  # fmt: skip
    if STEPS:
        found = step_of(
            fall + image * n, carry + image * carry_stride, gain, size + image * size_stride + k,
            patches, patch, patches, n, eta, HAS_CARRY, HAS_GAIN, HAS_SIZE,
        )  # fmt: skip
        tl.store(logits + image * n + patches, found, mask=patch)
        share = tl.where(patch, share * tl.exp(found), share)
    if PRUNE:
        share = tl.where(gone, 0.0, share)
    tl.store(weighed + image * t + tokens, share, mask=inside)


@triton.jit
def _settle_kernel(
    nearest, leaves, assignment, goes, t, k, num_leaving, ALTERNATE: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """The place of some patches that leave, which is that of their nearest."""
    image = tl.program_id(0)
    turns = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    here = turns < num_leaving
    who = tl.load(leaves + image * num_leaving + turns, mask=here, other=k)
    if ALTERNATE:
        even = (t - k + 1) // 2
        found = tl.load(nearest + image * even + (who - k) // 2, mask=here, other=0)
        other = k + 2 * (found & 0x7FFFFFFF).to(tl.int32) + 1
        place = tl.load(assignment + image * t + other, mask=here, other=0)
    else:
        found = tl.load(nearest + image * num_leaving + turns, mask=here, other=0)
        place = k + (found & 0x7FFFFFFF)
    tl.store(assignment + image * t + who, place, mask=here)
    tl.store(goes + image * num_leaving + turns, place.to(tl.int32), mask=here)


class Places(NamedTuple):
    """The result of a matching."""

    assignment: Tensor
    """The place of each token after the merge, `b t`."""
    stays: Tensor
    """The tokens that stay, in order, `b p`."""
    leaves: Tensor
    """The tokens that leave, `b r`."""
    goes: Tensor
    """The places they go to, `b r`."""
    weighed: Tensor
    """The weight of each token in the merge, `b t`."""

    @classmethod
    def empty(cls, b: int, t: int, num_leaving: int, device: torch.device) -> Places:
        """Uninitialised tensors, to be filled."""
        leaves = torch.empty(b, num_leaving, device=device, dtype=torch.int32)
        return cls(
            assignment=torch.empty(b, t, device=device, dtype=torch.int64),
            stays=leaves.new_empty(b, t - num_leaving),
            leaves=leaves,
            goes=torch.empty_like(leaves),
            weighed=torch.empty(b, t, device=device, dtype=torch.float32),
        )


class Rule(NamedTuple):
    """How many tokens leave, and by which rule, as in `core.matching`."""

    num_leaving: int
    num_prefix: int
    protection: float
    power: float
    least: float
    prune: bool
    alternate: bool


def place_by_tiles(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    weight: Tensor | None,
    step: Callable[[], Step] | None,
    rule: Rule,
) -> tuple[Places, Tensor]:
    """The place of each token after the merge, and the logits, which only a step fills."""
    (b, t, c), k, r = tokens.shape, rule.num_prefix, rule.num_leaving
    n, alternate, device = t - k, rule.alternate, tokens.device
    places = Places.empty(b, t, r, device)
    squares = torch.empty(b, n, device=device, dtype=torch.float32)
    nearest = torch.empty(b, (n + 1) // 2 if alternate else r, device=device, dtype=torch.int64)
    least = nearest if alternate else torch.empty(b, n, device=device, dtype=torch.int32)
    nothing = places.weighed
    size_, stride = sizes_of(size, nothing)
    attention_ = nothing if attention is None else attention.contiguous()
    side, options = _tiling(tokens, n)
    _square_kernel[b, parts_of(n, 16)](
        tokens, squares, least, t, k, c,
        ALTERNATE=alternate, TOKENS=16, CHANNELS=min(fitting(c), 256), num_warps=4,
    )  # fmt: skip

    def find_nearest(num_rows: int, num_columns: int) -> None:
        if num_rows == 0 or num_columns == 0:
            return
        _nearest_kernel[parts_of(num_columns, side), parts_of(num_rows, side), b](
            tokens, squares, size_, places.leaves, places.stays, nearest,
            t, k, c, num_rows, num_columns, stride,
            ALTERNATE=alternate, HAS_SIZE=size is not None, ROWS=side, COLUMNS=side, **options,
        )  # fmt: skip

    if alternate:
        find_nearest((n + 1) // 2, n // 2)
    else:
        blocks = parts_of(n, side)
        _harm_kernel[blocks * (blocks + 1) // 2, b](
            tokens, squares, size_, attention_, least, t, k, c, stride,
            HAS_SIZE=size is not None, HAS_ATTENTION=attention is not None, SIDE=side, **options,
        )  # fmt: skip
    logits = _choose(least, nearest, places, size, attention, weight, step and step(), rule)
    if not alternate:
        find_nearest(r, n - r)
    if r > 0:
        _settle_kernel[b, parts_of(r, 256)](
            nearest, places.leaves, places.assignment, places.goes, t, k, r,
            ALTERNATE=alternate, TOKENS=256, num_warps=4,
        )  # fmt: skip
    return places, logits


def _choose(
    least: Tensor, nearest: Tensor, places: Places, size: Tensor | None, attention: Tensor | None,
    weight: Tensor | None, step: Step | None, rule: Rule,
) -> Tensor:  # fmt: skip
    """Fill in everything but the places of leaving tokens; returns the logits."""
    b, t = places.weighed.shape
    nothing = places.weighed
    logits = nothing if step is None else nothing.new_empty(b, t - rule.num_prefix)
    size_, stride = sizes_of(size, nothing)
    weight_, weight_stride = sizes_of(weight, nothing)
    fall, carry, gain, eta = (nothing, None, None, 0.0) if step is None else step
    carry_, carry_stride = sizes_of(carry, nothing)
    _choose_kernel[(b,)](
        least, size_, weight_, nothing if attention is None else attention.contiguous(),
        fall, carry_, nothing if gain is None else gain,
        places.assignment, places.stays, places.leaves, places.weighed, logits, nearest,
        t, rule.num_prefix, rule.num_leaving, stride, weight_stride, carry_stride,
        rule.protection, rule.power, rule.least, eta,
        ALTERNATE=rule.alternate, HAS_SIZE=size is not None, HAS_WEIGHT=weight is not None,
        HAS_ATTENTION=attention is not None,
        ATTENDED=attention is not None and rule.power != 0, PRUNE=rule.prune,
        STEPS=step is not None, HAS_CARRY=carry is not None, HAS_GAIN=gain is not None,
        TOKENS=fitting(t), num_warps=warps_for(t),
    )  # fmt: skip
    return logits


def _tiling(tokens: Tensor, num_patches: int) -> tuple[int, dict[str, Any]]:
    """The side of a tile of pairs in patches, and options for the loop over channels."""
    half = tokens.element_size() == 2
    room = half and has_room(tokens.device, ROOM)
    channels = 64 if half else 32
    large = tokens.shape[0] * parts_of(num_patches, 128) ** 2 >= 2 * _MANY_TILES
    return 128 if room and large else 64, {
        "CHANNELS": channels,
        "FULL": tokens.shape[2] % channels == 0,
        "num_warps": 4,
        "num_stages": 3 if room else 2,
    }

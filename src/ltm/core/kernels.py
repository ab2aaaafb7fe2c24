"""Triton kernels of the matching path: who leaves, where to, and the merge, in three launches.

Each is the plain torch path of `ltm.methods.ltm.harm` and `ltm.core.merge` in one pass over the
tokens; distances are kept in float32, so no token has to be centred first. Programs are per image
and block of rows. Imported only where there is a GPU (or Triton's interpreter).

Letters: b images, t tokens with their k prefix tokens, n patch tokens, p tokens that stay (prefix
included), c channels, h heads, d channels of a head.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _harm_kernel(
    tokens, size, attention, distance, harm, t, k, c, protection,
    HAS_SIZE: tl.constexpr, HAS_ATTENTION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Distances of a block of patches to all, and the least harm of merging each of them."""
    image, n = tl.program_id(0), t - k
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    start = tokens + (image * t + k).to(tl.int64) * c
    own_attention = tl.zeros((ROWS,), tl.float32)
    if HAS_ATTENTION:
        own_attention = tl.load(attention + image * t + k + rows, mask=inside, other=0.0)
        own_attention = own_attention.to(tl.float32)
    own_size = tl.full((ROWS,), 1.0, tl.float32)
    if HAS_SIZE:
        own_size = tl.load(size + image * t + k + rows, mask=inside, other=1.0)
    least = tl.full((ROWS,), float("inf"), tl.float32)
    for first in range(0, n, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        there = columns < n
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        own_square = tl.zeros((ROWS,), tl.float32)
        their_square = tl.zeros((COLUMNS,), tl.float32)
        for channel in range(0, c, CHANNELS):
            channels = channel + tl.arange(0, CHANNELS)
            known = channels < c
            own = tl.load(
                start + rows[:, None] * c + channels[None],
                mask=inside[:, None] & known[None], other=0.0,
            )  # fmt: skip
            theirs = tl.load(
                start + columns[:, None] * c + channels[None],
                mask=there[:, None] & known[None], other=0.0,
            )  # fmt: skip
            product = tl.dot(own, tl.trans(theirs), product, input_precision="ieee")
            own_square += tl.sum(own.to(tl.float32) * own.to(tl.float32), axis=1)
            their_square += tl.sum(theirs.to(tl.float32) * theirs.to(tl.float32), axis=1)
        apart = tl.maximum(own_square[:, None] + their_square[None] - 2 * product, 0.0)
        tl.store(
            distance + (image.to(tl.int64) * n + rows[:, None]) * n + columns[None],
            apart, mask=inside[:, None] & there[None],
        )  # fmt: skip
        open_ = there[None] & (columns[None] > rows[:, None])
        if HAS_ATTENTION:
            seen = tl.load(attention + image * t + k + columns, mask=there, other=0.0)
            seen = seen.to(tl.float32)
            same = seen[None] == own_attention[:, None]
            open_ = there[None] & ((seen[None] > own_attention[:, None]) | (same & open_))
        if HAS_SIZE:
            weight = tl.load(size + image * t + k + columns, mask=there, other=0.0)
            total = tl.maximum(own_size[:, None] + weight[None], 1e-6)
            apart = apart * (2 * own_size[:, None] * weight[None] / total)
            open_ = open_ & (weight[None] > 0)
        least = tl.minimum(least, tl.min(tl.where(open_, apart, float("inf")), axis=1))
    if HAS_ATTENTION:
        strength = tl.maximum(own_attention, 1e-12)
        least = least * tl.exp(protection * tl.log(strength))
    tl.store(harm + image * n + rows, least, mask=inside)


@triton.jit
def _assign_kernel(
    distance, harm, size, leaves, assignment, t, k, num_leaving,
    HAS_SIZE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Who leaves an image, and the place of every token after the merge."""
    image, n = tl.program_id(0), t - k
    everyone = tl.arange(0, TOKENS)
    inside = everyone < n
    own = tl.load(harm + image * n + everyone, mask=inside, other=float("inf"))
    before = tl.zeros((TOKENS,), tl.int32)
    for first in range(0, n, ROWS):
        others = first + tl.arange(0, ROWS)
        there = others < n
        theirs = tl.load(harm + image * n + others, mask=there, other=float("inf"))
        less = theirs[None] < own[:, None]
        tie = (theirs[None] == own[:, None]) & (others[None] < everyone[:, None])
        before += tl.sum(((less | tie) & there[None]).to(tl.int32), axis=1)
    leave = (before < num_leaving) & inside
    place = k + tl.cumsum((inside & (before >= num_leaving)).to(tl.int32), axis=0) - 1
    tl.store(leaves + image * t + k + everyone, leave.to(tl.int8), mask=inside)
    tl.store(assignment + image * t + k + everyone, place.to(tl.int64), mask=inside & ~leave)
    prefix = everyone < k
    tl.store(leaves + image * t + everyone, tl.zeros((TOKENS,), tl.int8), mask=prefix)
    tl.store(assignment + image * t + everyone, everyone.to(tl.int64), mask=prefix)
    closed = leave | ~inside
    if HAS_SIZE:
        closed = closed | (tl.load(size + image * t + k + everyone, mask=inside, other=0.0) <= 0)
    for first in range(0, n, ROWS):
        rows = first + tl.arange(0, ROWS)
        here = rows < n
        apart = tl.load(
            distance + (image.to(tl.int64) * n + rows[:, None]) * n + everyone[None],
            mask=here[:, None] & inside[None], other=float("inf"),
        )  # fmt: skip
        apart = tl.where(closed[None], float("inf"), apart)
        target = tl.argmin(apart, axis=1)
        chosen = everyone[None] == target[:, None]
        taken = tl.sum(tl.where(chosen, place[None], 0), axis=1)
        gone = tl.sum(
            tl.where(everyone[None] == rows[:, None], leave.to(tl.int32)[None], 0), axis=1
        )
        tl.store(assignment + image * t + k + rows, taken.to(tl.int64), mask=here & (gone > 0))


@triton.jit
def _merge_kernel(
    tokens, weight, assignment, merged, t, p, c,
    KEEP_NORM: tl.constexpr, PLACES: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A block of merged tokens: one product with a mask that is made on the fly."""
    image = tl.program_id(0)
    places = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    everyone = tl.arange(0, TOKENS)
    inside = everyone < t
    goes = tl.load(assignment + image * t + everyone, mask=inside, other=-1).to(tl.int32)
    share = tl.load(weight + image * t + everyone, mask=inside, other=0.0)
    member = (goes[None] == places[:, None]) & (share[None] > 0)
    mask = tl.where(member, share[None], 0.0)
    mask = mask / tl.maximum(tl.sum(mask, axis=1), 1e-12)[:, None]
    mask = mask.to(tokens.dtype.element_ty)
    start = tokens + image.to(tl.int64) * t * c
    out = merged + image.to(tl.int64) * p * c
    squares = tl.zeros((TOKENS,), tl.float32)
    length = tl.zeros((PLACES,), tl.float32)
    for channel in range(0, c, CHANNELS):
        channels = channel + tl.arange(0, CHANNELS)
        known = channels < c
        x = tl.load(
            start + everyone[:, None] * c + channels[None],
            mask=inside[:, None] & known[None], other=0.0,
        )  # fmt: skip
        mean = tl.dot(mask, x, input_precision="ieee")
        if KEEP_NORM:
            squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
            length += tl.sum(mean * mean, axis=1)
        tl.store(
            out + places[:, None] * c + channels[None], mean.to(merged.dtype.element_ty),
            mask=(places < p)[:, None] & known[None],
        )  # fmt: skip
    if KEEP_NORM:
        largest = tl.max(tl.where(member, squares[None], 0.0), axis=1)
        scale = tl.sqrt(largest) / tl.maximum(tl.sqrt(length), 1e-12)
        for channel in range(0, c, CHANNELS):
            channels = channel + tl.arange(0, CHANNELS)
            valid = (places < p)[:, None] & (channels < c)[None]
            spot = out + places[:, None] * c + channels[None]
            mean = tl.load(spot, mask=valid, other=0.0).to(tl.float32)
            tl.store(spot, (mean * scale[:, None]).to(merged.dtype.element_ty), mask=valid)


@triton.jit
def _importance_kernel(
    qkv, size, importance, t, heads, d, scale,
    HAS_SIZE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The attention that every token of an image receives from the first, a mean over heads."""
    image = tl.program_id(0)
    everyone, width = tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    inside, known = everyone < t, width < d
    row = 3 * heads * d
    start = qkv + image.to(tl.int64) * t * row
    bias = tl.where(inside, 0.0, float("-inf"))
    if HAS_SIZE:
        found = tl.load(size + image * t + everyone, mask=inside, other=1.0)
        bias += tl.log(tl.maximum(found, 1e-10))
    received = tl.zeros((TOKENS,), tl.float32)
    for head in range(heads):
        query = tl.load(start + head * d + width, mask=known, other=0.0).to(tl.float32)
        key = tl.load(
            start + everyone[:, None] * row + (heads + head) * d + width[None],
            mask=inside[:, None] & known[None], other=0.0,
        )  # fmt: skip
        scores = tl.sum(key.to(tl.float32) * query[None], axis=1) * scale + bias
        scores = tl.exp(scores - tl.max(scores, axis=0))
        received += scores / tl.sum(scores, axis=0)
    tl.store(importance + image * t + everyone, received / heads, mask=inside)


def assign(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    *,
    num_leaving: int,
    num_prefix: int,
    protection: float,
) -> tuple[Tensor, Tensor]:
    """Whether each token leaves, and its place after the merge; `match_least_harm` in order."""
    b, t, c = tokens.shape
    n, device = t - num_prefix, tokens.device
    tokens = tokens.contiguous()
    distance = torch.empty(b, n, n, device=device)
    harm = torch.empty(b, n, device=device)
    leaves = torch.empty(b, t, device=device, dtype=torch.int8)
    assignment = torch.empty(b, t, device=device, dtype=torch.int64)
    rows, columns, channels = 32, 64, 64
    nothing = harm
    size_ = nothing if size is None else size.float().expand(b, t).contiguous()
    attention_ = nothing if attention is None else attention.contiguous()
    _harm_kernel[b, triton.cdiv(n, rows)](
        tokens, size_, attention_, distance, harm, t, num_prefix, c, protection,
        HAS_SIZE=size is not None, HAS_ATTENTION=attention is not None,
        ROWS=rows, COLUMNS=columns, CHANNELS=channels, num_warps=4,
    )  # fmt: skip
    _assign_kernel[(b,)](
        distance, harm, size_, leaves, assignment, t, num_prefix, num_leaving,
        HAS_SIZE=size is not None, TOKENS=triton.next_power_of_2(t), ROWS=16, num_warps=8,
    )  # fmt: skip
    return leaves.bool(), assignment


def merge_groups(
    tokens: Tensor, weight: Tensor, assignment: Tensor, num_places: int, *, keep_norm: bool
) -> Tensor:
    """`MatchedMerge.__call__`: weighted means, of the largest norm of their group if asked for."""
    b, t, c = tokens.shape
    tokens = tokens.contiguous()
    merged = tokens.new_empty(b, num_places, c)
    places = 64
    _merge_kernel[b, triton.cdiv(num_places, places)](
        tokens, weight.float().expand(b, t).contiguous(), assignment, merged, t, num_places, c,
        KEEP_NORM=keep_norm, PLACES=places, TOKENS=triton.next_power_of_2(t), CHANNELS=32,
        num_warps=8,
    )  # fmt: skip
    return merged


def importance(qkv: Tensor, size: Tensor | None, *, num_heads: int, scale: float) -> Tensor:
    """Attention received from the class token, from the output of a `qkv` projection."""
    b, t, width = qkv.shape
    d = width // (3 * num_heads)
    found = torch.empty(b, t, device=qkv.device)
    _importance_kernel[(b,)](
        qkv.contiguous(), found if size is None else size.float().expand(b, t).contiguous(),
        found, t, num_heads, d, scale, HAS_SIZE=size is not None,
        TOKENS=triton.next_power_of_2(t), WIDTH=triton.next_power_of_2(d), num_warps=8,
    )  # fmt: skip
    return found

"""Triton kernels: who leaves an image and where to, the merge, attention that knows token sizes.

Each is the plain torch path in one pass over the tokens; distances are kept in float32, so no token
has to be centred first. Imported only where they run: on a GPU, or in Triton's interpreter.

Letters: b images, t tokens with their k prefix tokens, n patch tokens, p tokens that stay (prefix
included), c channels, h heads, d channels of a head.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
SMALLEST_SIZE = tl.constexpr(1e-10)
FEW_IMAGES = 16
"""Batches below this leave most of a GPU idle: smaller programs finish earlier."""


@triton.jit
def _harm_kernel(
    tokens, size, attention, distance, harm, t, k, c, size_stride, protection,
    HAS_SIZE: tl.constexpr, HAS_ATTENTION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Distances between two blocks of patches, and the least harm of merging one into the other."""
    image, n = tl.program_id(0), t - k
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside, there = rows < n, columns < n
    start = tokens + (image * t + k).to(tl.int64) * c
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
    strength = tl.full((ROWS,), 1.0, tl.float32)
    if HAS_ATTENTION:
        seen = tl.load(attention + image * t + k + columns, mask=there, other=0.0)
        own_seen = tl.load(attention + image * t + k + rows, mask=inside, other=0.0)
        same = seen[None] == own_seen[:, None]
        open_ = there[None] & ((seen[None] > own_seen[:, None]) | (same & open_))
        strength = tl.exp(protection * tl.log(tl.maximum(own_seen, 1e-12)))
    if HAS_SIZE:
        sizes = size + image * size_stride + k
        weight = tl.load(sizes + columns, mask=there, other=0.0).to(tl.float32)
        own_weight = tl.load(sizes + rows, mask=inside, other=1.0).to(tl.float32)
        total = tl.maximum(own_weight[:, None] + weight[None], 1e-6)
        apart = apart * (2 * own_weight[:, None] * weight[None] / total)
        open_ = open_ & (weight[None] > 0)
    # Within the choice: infinity times a strength of zero would be no number at all.
    least = tl.min(tl.where(open_, apart * strength[:, None], float("inf")), axis=1)
    if HAS_SIZE:
        least = tl.where(own_weight <= 0, 0.0, least)  # what is not there leaves first
    blocks = tl.num_programs(2)
    tl.store(harm + (image * n + rows) * blocks + tl.program_id(2), least, mask=inside)


@triton.jit
def _assign_kernel(
    distance, harm, size, assignment, stays, leaves, t, k, num_leaving, size_stride, blocks,
    HAS_SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Who leaves an image, in what order, and the place of some of its tokens after the merge."""
    image, n = tl.program_id(0), t - k
    everyone, parts = tl.arange(0, TOKENS), tl.arange(0, BLOCKS)
    inside = everyone < n
    own = tl.load(
        harm + (image * n + everyone[:, None]) * blocks + parts[None],
        mask=inside[:, None] & (parts < blocks)[None], other=float("inf"),
    )  # fmt: skip
    own = tl.min(own, axis=1)
    own = tl.where(own == own, own, float("inf"))  # noqa: PLR0124 - not a number
    before = tl.zeros((TOKENS,), tl.int32)
    for first in range(0, n, ROWS):
        others = first + tl.arange(0, ROWS)
        there = others < n
        theirs = tl.load(
            harm + (image * n + others[:, None]) * blocks + parts[None],
            mask=there[:, None] & (parts < blocks)[None], other=float("inf"),
        )  # fmt: skip
        theirs = tl.min(theirs, axis=1)
        theirs = tl.where(theirs == theirs, theirs, float("inf"))  # noqa: PLR0124
        less = theirs[None] < own[:, None]
        tie = (theirs[None] == own[:, None]) & (others[None] < everyone[:, None])
        before += tl.sum(((less | tie) & there[None]).to(tl.int32), axis=1)
    leave = (before < num_leaving) & inside
    place = k + tl.cumsum((inside & (before >= num_leaving)).to(tl.int32), axis=0) - 1
    closed = leave | ~inside
    if HAS_SIZE:
        sizes = tl.load(size + image * size_stride + k + everyone, mask=inside, other=0.0)
        closed = closed | (sizes <= 0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here = rows < n
    apart = tl.load(
        distance + (image.to(tl.int64) * n + rows[:, None]) * n + everyone[None],
        mask=here[:, None] & inside[None], other=float("inf"),
    )  # fmt: skip
    target = tl.argmin(tl.where(closed[None], float("inf"), apart), axis=1)
    itself = everyone[None] == rows[:, None]
    gone = tl.sum(tl.where(itself, leave.to(tl.int32)[None], 0), axis=1) > 0
    taken = tl.where(gone, target, rows)
    goes = tl.sum(tl.where(everyone[None] == taken[:, None], place[None], 0), axis=1)
    turn = tl.sum(tl.where(itself, before[None], 0), axis=1)
    tl.store(assignment + image * t + k + rows, goes.to(tl.int64), mask=here)
    tl.store(leaves + image * num_leaving + turn, k + rows, mask=here & gone)
    tl.store(stays + image * (t - num_leaving) + goes, k + rows, mask=here & (gone == 0))
    if tl.program_id(1) == 0:
        prefix = everyone < k
        tl.store(assignment + image * t + everyone, everyone.to(tl.int64), mask=prefix)
        tl.store(stays + image * (t - num_leaving) + everyone, everyone, mask=prefix)


@triton.jit
def _merge_kernel(
    tokens, weight, size, assignment, stays, leaves, merged, merged_size, t, p, r, c, size_stride,
    KEEP_NORM: tl.constexpr, HAS_SIZE: tl.constexpr,
    PLACES: tl.constexpr, LEAVING: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some merged tokens and their sizes: of those that leave, only who comes here is read."""
    image = tl.program_id(0)
    places = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    channels, some = tl.arange(0, CHANNELS), tl.arange(0, LEAVING)
    valid, known = places < p, channels < c
    start = tokens + image.to(tl.int64) * t * c
    own = tl.load(stays + image * p + places, mask=valid, other=0)
    share = tl.load(weight + image * t + own, mask=valid, other=0.0)
    counted = tl.full((PLACES,), 1.0, tl.float32)
    if HAS_SIZE:
        counted = tl.load(size + image * size_stride + own, mask=valid, other=0.0).to(tl.float32)
    counted = tl.where(share > 0, counted, 0.0)
    total = share
    for first in range(0, r, LEAVING):
        there = first + some < r
        who = tl.load(leaves + image * r + first + some, mask=there, other=0)
        goes = tl.load(assignment + image * t + who, mask=there, other=-1).to(tl.int32)
        brings = tl.load(weight + image * t + who, mask=there, other=0.0)
        member = (goes[None] == places[:, None]) & (brings[None] > 0)
        total += tl.sum(tl.where(member, brings[None], 0.0), axis=1)
        more = tl.full((LEAVING,), 1.0, tl.float32)
        if HAS_SIZE:
            more = tl.load(size + image * size_stride + who, mask=there, other=0.0).to(tl.float32)
        counted += tl.sum(tl.where(member, more[None], 0.0), axis=1)
    tl.store(merged_size + image * p + places, counted, mask=valid)
    total = tl.maximum(total, 1e-12)
    x = tl.load(
        start + own[:, None] * c + channels[None], mask=valid[:, None] & known[None], other=0.0
    ).to(tl.float32)
    largest = tl.where(share > 0, tl.sum(x * x, axis=1), 0.0)
    mean = x * (share / total)[:, None]
    for first in range(0, r, LEAVING):
        there = first + some < r
        who = tl.load(leaves + image * r + first + some, mask=there, other=0)
        goes = tl.load(assignment + image * t + who, mask=there, other=-1).to(tl.int32)
        brings = tl.load(weight + image * t + who, mask=there, other=0.0)
        member = (goes[None] == places[:, None]) & (brings[None] > 0)
        comes = tl.max(member.to(tl.int32), axis=0) > 0
        y = tl.load(
            start + who[:, None] * c + channels[None], mask=comes[:, None] & known[None], other=0.0
        )
        mask = tl.where(member, brings[None] / total[:, None], 0.0).to(y.dtype)
        mean = tl.dot(mask, y, mean, input_precision="ieee")
        if KEEP_NORM:
            square = tl.sum(y.to(tl.float32) * y.to(tl.float32), axis=1)
            square = tl.max(tl.where(member, square[None], 0.0), axis=1)
            largest = tl.maximum(largest, square)
    if KEEP_NORM:
        length = tl.sqrt(tl.sum(mean * mean, axis=1))
        mean = mean * (tl.sqrt(largest) / tl.maximum(length, 1e-12))[:, None]
    tl.store(
        merged + (image.to(tl.int64) * p + places[:, None]) * c + channels[None],
        mean.to(merged.dtype.element_ty), mask=valid[:, None] & known[None],
    )  # fmt: skip


@triton.jit
def _importance_kernel(
    qkv, size, importance, t, heads, d, size_stride, scale,
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
        scores += tl.log(tl.maximum(found.to(tl.float32), SMALLEST_SIZE))
    scores = tl.where(inside, scores, float("-inf"))
    scores = tl.exp(scores - tl.max(scores, axis=0))
    received = scores / tl.sum(scores, axis=0)
    tl.store(importance + (image * heads + head) * t + everyone, received, mask=inside)


@triton.jit
def _attention_kernel(
    qkv, size, out, t, heads, d, size_stride, scale,
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
        bias = tl.log2(tl.maximum(found.to(tl.float32), SMALLEST_SIZE))
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


@triton.jit
def _pool_kernel(
    tokens, size, pooled, t, k, c, size_stride,
    HAS_SIZE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some channels of the mean patch of an image, by size."""
    image = tl.program_id(0)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channels < c
    total = 0.0
    mean = tl.zeros((CHANNELS,), tl.float32)
    for first in range(k, t, TOKENS):
        some = first + tl.arange(0, TOKENS)
        there = some < t
        weight = tl.where(there, 1.0, 0.0)
        if HAS_SIZE:
            weight = tl.load(size + image * size_stride + some, mask=there, other=0.0)
            weight = weight.to(tl.float32)
        x = tl.load(
            tokens + (image.to(tl.int64) * t + some[:, None]) * c + channels[None],
            mask=there[:, None] & known[None], other=0.0,
        )  # fmt: skip
        mean += tl.sum(x.to(tl.float32) * weight[:, None], axis=0)
        total += tl.sum(weight, axis=0)
    tl.store(pooled + image * c + channels, mean / total, mask=known)


@triton.jit
def _inform_kernel(
    tokens, gradient, size, carry, gain, logits, weight, t, k, c, size_stride, carry_stride, eta,
    HAS_SIZE: tl.constexpr, HAS_CARRY: tl.constexpr, HAS_GAIN: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The logits of an image's patches, one step down the gradient, and what tokens weigh."""
    image = tl.program_id(0)
    everyone = tl.arange(0, TOKENS)
    inside, patch = everyone < t, (everyone >= k) & (everyone < t)
    start = tokens + image.to(tl.int64) * t * c
    found = tl.zeros((TOKENS,), tl.float32)
    for channel in range(0, c, CHANNELS):
        channels = channel + tl.arange(0, CHANNELS)
        known = channels < c
        x = tl.load(
            start + everyone[:, None] * c + channels[None],
            mask=patch[:, None] & known[None], other=0.0,
        )  # fmt: skip
        slope = tl.load(gradient + image * c + channels, mask=known, other=0.0)
        found -= tl.sum(x.to(tl.float32) * slope[None], axis=1)
    if HAS_GAIN:
        number = t - k
        found -= tl.sum(tl.where(patch, found, 0.0), axis=0) / number
        square = tl.sum(tl.where(patch, found * found, 0.0), axis=0) / number
        found = tl.load(gain).to(tl.float32) * found / (tl.sqrt(square) + 1e-6)
    found = found * eta
    if HAS_CARRY:
        found += tl.load(carry + image * carry_stride + everyone - k, mask=patch, other=0.0)
    found = tl.minimum(tl.maximum(found, -8.0), 8.0)
    tl.store(logits + image * (t - k) + everyone - k, found, mask=patch)
    counted = tl.full((TOKENS,), 1.0, tl.float32)
    if HAS_SIZE:
        counted = tl.load(size + image * size_stride + everyone, mask=inside, other=0.0)
        counted = counted.to(tl.float32)
    counted = tl.where(patch, counted * tl.exp(found), counted)
    tl.store(weight + image * t + everyone, counted, mask=inside)


def assign(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    num_leaving: int,
    num_prefix: int,
    protection: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Every token's place after the merge, who stays and who leaves; `match_least_harm`."""
    b, t, c = tokens.shape
    n, device = t - num_prefix, tokens.device
    tokens = tokens.contiguous()
    side = 64
    blocks = triton.cdiv(n, side)
    distance = torch.empty(b, n, n, device=device)
    harm = torch.empty(b, n, blocks, device=device)
    assignment = torch.empty(b, t, device=device, dtype=torch.int64)
    stays = torch.empty(b, t - num_leaving, device=device, dtype=torch.int32)
    leaves = torch.empty(b, num_leaving, device=device, dtype=torch.int32)
    size_, stride = _sizes(size, harm)
    attention_ = harm if attention is None else attention.float().contiguous()
    _harm_kernel[b, blocks, blocks](
        tokens, size_, attention_, distance, harm, t, num_prefix, c, stride, protection,
        HAS_SIZE=size is not None, HAS_ATTENTION=attention is not None,
        ROWS=side, COLUMNS=side, CHANNELS=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    some = 16 if b < FEW_IMAGES else 32
    _assign_kernel[b, triton.cdiv(n, some)](
        distance, harm, size_, assignment, stays, leaves, t, num_prefix, num_leaving, stride,
        blocks, HAS_SIZE=size is not None, TOKENS=triton.next_power_of_2(t),
        BLOCKS=triton.next_power_of_2(blocks), ROWS=some, num_warps=4,
    )  # fmt: skip
    return assignment, stays, leaves


def merge_groups(
    tokens: Tensor,
    weight: Tensor,
    size: Tensor | None,
    assignment: Tensor,
    stays: Tensor,
    leaves: Tensor,
    keep_norm: bool,
) -> tuple[Tensor, Tensor]:
    """Weighted means, of the largest norm of their group if asked for, and how large they are."""
    b, t, c = tokens.shape
    num_places = stays.shape[1]
    tokens = tokens.contiguous()
    merged = tokens.new_empty(b, num_places, c)
    merged_size = torch.empty(b, num_places, device=tokens.device)
    size_, stride = _sizes(size, merged_size)
    _merge_kernel[b, triton.cdiv(num_places, 16)](
        tokens, weight.float().expand(b, t).contiguous(), size_, assignment, stays, leaves,
        merged, merged_size, t, num_places, leaves.shape[1], c, stride,
        KEEP_NORM=keep_norm, HAS_SIZE=size is not None,
        PLACES=16, LEAVING=16, CHANNELS=triton.next_power_of_2(c), num_warps=8,
    )  # fmt: skip
    return merged, merged_size


def importance(qkv: Tensor, size: Tensor | None, num_heads: int, scale: float) -> Tensor:
    """Attention received from the first token, from the output of a `qkv` projection."""
    b, t, width = qkv.shape
    d = width // (3 * num_heads)
    found = torch.empty(b, num_heads, t, device=qkv.device)
    size_, stride = _sizes(size, found)
    _importance_kernel[b, num_heads](
        qkv.contiguous(), size_, found, t, num_heads, d, stride, scale, HAS_SIZE=size is not None,
        TOKENS=triton.next_power_of_2(t), WIDTH=triton.next_power_of_2(d), num_warps=4,
    )  # fmt: skip
    return found.mean(dim=1)


def attention(qkv: Tensor, size: Tensor, num_heads: int, scale: float) -> Tensor:
    """Proportional attention, from the output of a `qkv` projection to the input of `proj`."""
    b, t, width = qkv.shape
    d = width // (3 * num_heads)
    out = qkv.new_empty(b, t, num_heads * d)
    size_, stride = _sizes(size, size)
    rows, columns, stages = (32, 64, 2) if b < FEW_IMAGES else (64, 32, 3)
    _attention_kernel[(triton.cdiv(t, rows) * b * num_heads,)](
        qkv.contiguous(), size_, out, t, num_heads, d, stride, scale,
        ROWS=rows, COLUMNS=columns, WIDTH=max(16, triton.next_power_of_2(d)),
        num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out


def pool(tokens: Tensor, size: Tensor | None, num_prefix: int) -> Tensor:
    """The mean patch of every image, by size."""
    b, t, c = tokens.shape
    pooled = torch.empty(b, c, device=tokens.device)
    size_, stride = _sizes(size, pooled)
    _pool_kernel[b, triton.cdiv(c, 64)](
        tokens.contiguous(), size_, pooled, t, num_prefix, c, stride,
        HAS_SIZE=size is not None, TOKENS=64, CHANNELS=64, num_warps=4,
    )  # fmt: skip
    return pooled


def inform(
    tokens: Tensor,
    gradient: Tensor,
    size: Tensor | None,
    carry: Tensor | None,
    gain: Tensor | None,
    eta: float,
    num_prefix: int,
) -> tuple[Tensor, Tensor]:
    """Logits of patches, one step down the gradient, and the weights of all tokens."""
    b, t, c = tokens.shape
    logits = torch.empty(b, t - num_prefix, device=tokens.device)
    weight = torch.empty(b, t, device=tokens.device)
    size_, stride = _sizes(size, weight)
    carry_, carry_stride = _sizes(None if carry is None else carry.float(), weight)
    _inform_kernel[(b,)](
        tokens.contiguous(), gradient.float().contiguous(), size_, carry_,
        weight if gain is None else gain, logits, weight, t, num_prefix, c, stride, carry_stride,
        eta, HAS_SIZE=size is not None, HAS_CARRY=carry is not None, HAS_GAIN=gain is not None,
        TOKENS=triton.next_power_of_2(t), CHANNELS=64, num_warps=8,
    )  # fmt: skip
    return logits, weight


def _sizes(size: Tensor | None, nothing: Tensor) -> tuple[Tensor, int]:
    """Sizes, and the step from one image to the next: none where all share them."""
    if size is None:
        return nothing, 0
    size = size.contiguous()
    return size, 0 if size.shape[0] == 1 else size.shape[1]

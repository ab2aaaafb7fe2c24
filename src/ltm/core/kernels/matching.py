"""Who leaves an image and where to, and the merge: by such lists, or by a constant matrix.

Distances are kept in float32, so no token has to be centred first.

Letters: b images, t tokens with their k prefix tokens, n patch tokens, p tokens that stay (prefix
included), r tokens that leave, c channels.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltm.core.kernels.launch import FEW_IMAGES, sizes_of


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
def _least_harm(harm, rows, inside, blocks, BLOCKS: tl.constexpr):
    """The least harm of some tokens over all blocks of partners; infinite where it is no number."""
    parts = tl.arange(0, BLOCKS)
    found = tl.load(
        harm + rows[:, None] * blocks + parts[None],
        mask=inside[:, None] & (parts < blocks)[None], other=float("inf"),
    )  # fmt: skip
    least = tl.min(found, axis=1)
    return tl.where(least == least, least, float("inf"))  # noqa: PLR0124


@triton.jit
def _rank_kernel(
    harm, rank, n, blocks, BLOCKS: tl.constexpr, ROWS: tl.constexpr, RIVALS: tl.constexpr
):
    """How many tokens of an image leave before some of them would."""
    image = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    own = _least_harm(harm, image * n + rows, rows < n, blocks, BLOCKS)
    before = tl.zeros((ROWS,), tl.int32)
    for first in range(0, n, RIVALS):
        others = first + tl.arange(0, RIVALS)
        there = others < n
        theirs = _least_harm(harm, image * n + others, there, blocks, BLOCKS)
        less = theirs[None] < own[:, None]
        tie = (theirs[None] == own[:, None]) & (others[None] < rows[:, None])
        before += tl.sum(((less | tie) & there[None]).to(tl.int32), axis=1)
    tl.store(rank + image * n + rows, before, mask=rows < n)


@triton.jit
def _assign_kernel(
    distance, rank, size, assignment, stays, leaves, t, k, num_leaving, size_stride,
    HAS_SIZE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Who leaves an image, in what order, and the place of some of its tokens after the merge."""
    image, n = tl.program_id(0), t - k
    everyone = tl.arange(0, TOKENS)
    inside = everyone < n
    closed = tl.load(rank + image * n + everyone, mask=inside, other=-1) < num_leaving
    place = k + tl.cumsum(1 - closed.to(tl.int32), axis=0) - 1
    if HAS_SIZE:
        sizes = tl.load(size + image * size_stride + k + everyone, mask=inside, other=0.0)
        closed = closed | (sizes <= 0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here = rows < n
    turn = tl.load(rank + image * n + rows, mask=here, other=0)
    gone = turn < num_leaving
    apart = tl.load(
        distance + (image.to(tl.int64) * n + rows[:, None]) * n + everyone[None],
        mask=(here & gone)[:, None] & inside[None], other=float("inf"),
    )  # fmt: skip
    target = tl.argmin(tl.where(closed[None], float("inf"), apart), axis=1)
    taken = tl.where(gone, target, rows)
    goes = tl.sum(tl.where(everyone[None] == taken[:, None], place[None], 0), axis=1)
    tl.store(assignment + image * t + k + rows, goes.to(tl.int64), mask=here)
    tl.store(leaves + image * num_leaving + turn, k + rows, mask=here & gone)
    tl.store(stays + image * (t - num_leaving) + goes, k + rows, mask=here & (gone == 0))
    if tl.program_id(1) == 0:
        prefix = everyone < k
        tl.store(assignment + image * t + everyone, everyone.to(tl.int64), mask=prefix)
        tl.store(stays + image * (t - num_leaving) + everyone, everyone, mask=prefix)


@triton.jit
def _merge_kernel(
    tokens, weight, size, assignment, stays, leaves, merged, merged_size, t, p, r, c,
    weight_stride, size_stride,
    KEEP_NORM: tl.constexpr, HAS_SIZE: tl.constexpr, LEAVING: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One merged token and its size: of those that leave, only who comes here is read."""
    image, place = tl.program_id(0) // p, tl.program_id(0) % p
    weights, sizes = weight + image * weight_stride, size + image * size_stride
    turns, channels = tl.arange(0, LEAVING), tl.arange(0, CHANNELS)
    who = tl.load(leaves + image * r + turns, mask=turns < r, other=0)
    goes = tl.load(assignment + image * t + who, mask=turns < r, other=-1).to(tl.int32)
    brings = tl.load(weights + who, mask=goes == place, other=0.0)
    comes = brings > 0
    own = tl.load(stays + image * p + place)
    share = tl.load(weights + own)
    total = tl.maximum(share + tl.sum(tl.where(comes, brings, 0.0), axis=0), 1e-12)
    if HAS_SIZE:
        more = tl.load(sizes + who, mask=comes, other=0.0).to(tl.float32)
        counted = tl.where(share > 0, tl.load(sizes + own).to(tl.float32), 0.0) + tl.sum(more, 0)
    else:
        counted = tl.where(share > 0, 1.0, 0.0) + tl.sum(comes.to(tl.float32), axis=0)
    tl.store(merged_size + image * p + place, counted)
    start = tokens + image.to(tl.int64) * t * c + channels
    x = tl.load(start + own * c, mask=channels < c, other=0.0).to(tl.float32)
    largest = tl.where(share > 0, tl.sum(x * x, axis=0), 0.0)
    mean = x * (share / total)
    last = -1
    for _ in range(tl.sum(comes.to(tl.int32), axis=0)):
        last = tl.min(tl.where(comes & (turns > last), turns, LEAVING), axis=0)
        token = tl.sum(tl.where(turns == last, who, 0), axis=0)
        part = tl.sum(tl.where(turns == last, brings, 0.0), axis=0) / total
        y = tl.load(start + token * c, mask=channels < c, other=0.0).to(tl.float32)
        mean += part * y
        largest = tl.maximum(largest, tl.sum(y * y, axis=0))
    if KEEP_NORM:
        length = tl.sqrt(tl.sum(mean * mean, axis=0))
        mean = mean * (tl.sqrt(largest) / tl.maximum(length, 1e-12))
    out = merged + (image.to(tl.int64) * p + place) * c + channels
    tl.store(out, mean.to(merged.dtype.element_ty), mask=channels < c)


@triton.jit
def _mix_kernel(
    matrix, tokens, merged, t, p, c,
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
            matrix + places[:, None] * t + some[None],
            mask=valid[:, None] & (some < t)[None], other=0.0,
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
    few = b < FEW_IMAGES
    rows, columns = (64, 32) if few else (64, 128)
    channels, stages = (64, 3) if tokens.element_size() == 2 else (32, 2)  # what memory there is
    blocks = triton.cdiv(n, columns)
    distance = torch.empty(b, n, n, device=device, dtype=torch.float32)
    harm = torch.empty(b, n, blocks, device=device, dtype=torch.float32)
    rank = torch.empty(b, n, device=device, dtype=torch.int32)
    assignment = torch.empty(b, t, device=device, dtype=torch.int64)
    stays = torch.empty(b, t - num_leaving, device=device, dtype=torch.int32)
    leaves = torch.empty(b, num_leaving, device=device, dtype=torch.int32)
    size_, stride = sizes_of(size, harm)
    attention_ = harm if attention is None else attention.float().contiguous()
    _harm_kernel[b, triton.cdiv(n, rows), blocks](
        tokens, size_, attention_, distance, harm, t, num_prefix, c, stride, protection,
        HAS_SIZE=size is not None, HAS_ATTENTION=attention is not None,
        ROWS=rows, COLUMNS=columns, CHANNELS=channels, num_warps=4 if few else 8, num_stages=stages,
    )  # fmt: skip
    rows, rivals = (32, 256) if few else (64, 64)
    _rank_kernel[b, triton.cdiv(n, rows)](
        harm, rank, n, blocks, BLOCKS=triton.next_power_of_2(blocks), ROWS=rows, RIVALS=rivals,
        num_warps=4 if few else 2,
    )  # fmt: skip
    _assign_kernel[b, triton.cdiv(n, 8)](
        distance, rank, size_, assignment, stays, leaves, t, num_prefix, num_leaving, stride,
        HAS_SIZE=size is not None, TOKENS=triton.next_power_of_2(t), ROWS=8, num_warps=2,
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
    merged_size = torch.empty(b, num_places, device=tokens.device, dtype=torch.float32)
    weight_, weight_stride = sizes_of(weight.float(), merged_size)
    size_, stride = sizes_of(size, merged_size)
    num_leaving = leaves.shape[1]
    _merge_kernel[(b * num_places,)](
        tokens, weight_, size_, assignment, stays, leaves, merged, merged_size,
        t, num_places, num_leaving, c, weight_stride, stride,
        KEEP_NORM=keep_norm, HAS_SIZE=size is not None,
        LEAVING=triton.next_power_of_2(max(num_leaving, 1)),
        CHANNELS=triton.next_power_of_2(c), num_warps=1,
    )  # fmt: skip
    return merged, merged_size


def mix(matrix: Tensor, tokens: Tensor) -> Tensor:
    """The same product for every image. No side has to suit tensor cores: 197 tokens are usual."""
    (b, t, c), p = tokens.shape, matrix.shape[0]
    merged = tokens.new_empty(b, p, c)
    _mix_kernel[b, triton.cdiv(p, 64), triton.cdiv(c, 128)](
        matrix.contiguous(), tokens.contiguous(), merged, t, p, c,
        PLACES=64, TOKENS=32, CHANNELS=128, num_warps=4, num_stages=3,
    )  # fmt: skip
    return merged

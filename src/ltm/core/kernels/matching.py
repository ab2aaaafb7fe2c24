"""Who leaves an image and where to, and what every token weighs in the merge.

Distances are kept in float32, so no token has to be centred first.

Letters: b images, t tokens with their k prefix tokens, n patch tokens, p tokens that stay (prefix
included), r tokens that leave, c channels.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltm.core.kernels.launch import FEW_IMAGES, branch, fitting, parts_of, sizes_of
from ltm.core.kernels.weighing import inform


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
    apart = tl.zeros((ROWS, COLUMNS), tl.float32)
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
        # Not accumulated by the product itself: on Hopper Triton (3.6, 3.9) would let that go on
        # while the next tile is loaded into the same memory, as tiles are read for squares too.
        apart -= 2 * tl.dot(own, tl.trans(theirs), input_precision="ieee")
        own_square += tl.sum(own.to(tl.float32) * own.to(tl.float32), axis=1)
        their_square += tl.sum(theirs.to(tl.float32) * theirs.to(tl.float32), axis=1)
    apart = tl.maximum(own_square[:, None] + their_square[None] + apart, 0.0)
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
def _count_before(
    harm, rows, n, blocks, BLOCKS: tl.constexpr, ROWS: tl.constexpr, RIVALS: tl.constexpr
):
    """How many tokens of an image leave before some of them would."""
    own = _least_harm(harm, rows, rows < n, blocks, BLOCKS)
    before = tl.zeros((ROWS,), tl.int32)
    for first in range(0, n, RIVALS):
        others = first + tl.arange(0, RIVALS)
        there = others < n
        theirs = _least_harm(harm, others, there, blocks, BLOCKS)
        less = theirs[None] < own[:, None]
        tie = (theirs[None] == own[:, None]) & (others[None] < rows[:, None])
        before += tl.sum(((less | tie) & there[None]).to(tl.int32), axis=1)
    return before


@triton.jit
def _rank_kernel(
    harm, rank, n, blocks, BLOCKS: tl.constexpr, ROWS: tl.constexpr, RIVALS: tl.constexpr
):
    """When some tokens of an image would leave."""
    image = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    before = _count_before(harm + image * n * blocks, rows, n, blocks, BLOCKS, ROWS, RIVALS)
    tl.store(rank + image * n + rows, before, mask=rows < n)


@triton.jit
def _weight_of(
    weight, size, attention, tokens, there, t, power, least,
    HAS_WEIGHT: tl.constexpr, HAS_SIZE: tl.constexpr, ATTENDED: tl.constexpr,
):  # fmt: skip
    """What tokens of an image weigh, by the attention that each of their patches receives too."""
    counted = tl.full(tokens.shape, 1.0, tl.float32)
    if HAS_SIZE:
        counted = tl.load(size + tokens, mask=there, other=1.0).to(tl.float32)
    found = counted
    if HAS_WEIGHT:
        found = tl.load(weight + tokens, mask=there, other=0.0).to(tl.float32)
    if ATTENDED:
        share = tl.load(attention + tokens, mask=there, other=0.0) * t / tl.maximum(counted, 1.0)
        # What is no number counts least as well.
        found = found * tl.exp(power * tl.log(tl.where(share > least, share, least)))
    return found


@triton.jit
def _assign_kernel(
    distance, harm, rank, size, weight, attention, assignment, stays, leaves, weighed,
    t, k, num_leaving, blocks, size_stride, weight_stride, power, least,
    RANKED: tl.constexpr, HAS_SIZE: tl.constexpr, HAS_WEIGHT: tl.constexpr, ATTENDED: tl.constexpr,
    PRUNE: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    RIVALS: tl.constexpr,
):  # fmt: skip
    """Who leaves an image, in what order, and the place and weight of some of its tokens."""
    image, n = tl.program_id(0), t - k
    everyone = tl.arange(0, TOKENS)
    inside = everyone < n
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here = rows < n
    sizes, weights = size + image * size_stride, weight + image * weight_stride
    if RANKED:
        before = tl.load(rank + image * n + everyone, mask=inside, other=0)
        turn = tl.load(rank + image * n + rows, mask=here, other=0)
    else:
        harms = harm + image * n * blocks
        before = _count_before(harms, everyone, n, blocks, BLOCKS, TOKENS, RIVALS)
        turn = tl.sum(tl.where(everyone[None] == rows[:, None], before[None], 0), axis=1)
    closed = (before < num_leaving) | (inside == 0)
    place = k + tl.cumsum(1 - closed.to(tl.int32), axis=0) - 1
    if HAS_SIZE:
        closed = closed | (tl.load(sizes + k + everyone, mask=inside, other=0.0) <= 0)
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
    share = _weight_of(
        weights, sizes, attention + image * t, k + rows, here, t, power, least,
        HAS_WEIGHT, HAS_SIZE, ATTENDED,
    )  # fmt: skip
    if PRUNE:
        share = tl.where(gone, 0.0, share)
    tl.store(weighed + image * t + k + rows, share, mask=here)
    if tl.program_id(1) == 0:
        prefix = everyone < k
        tl.store(assignment + image * t + everyone, everyone.to(tl.int64), mask=prefix)
        tl.store(stays + image * (t - num_leaving) + everyone, everyone, mask=prefix)
        unchanged = _weight_of(
            weights, sizes, attention, everyone, prefix, t, power, least,
            HAS_WEIGHT, HAS_SIZE, False,
        )  # fmt: skip
        tl.store(weighed + image * t + everyone, unchanged, mask=prefix)


class Pairs(NamedTuple):
    """What is known of all pairs of patches: distances `b n n`, the least harm by blocks, ranks."""

    distance: Tensor
    harm: Tensor
    rank: Tensor | None
    """None: of few images, programs count ranks for themselves, in less time than a launch."""


def compare(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    num_prefix: int,
    protection: float,
) -> Pairs:
    """How far patches are apart, the least harm of merging each, and when each would leave."""
    b, t, c = tokens.shape
    n, device = t - num_prefix, tokens.device
    few = b < FEW_IMAGES
    rows, columns = (64, 32) if few else (64, 128)
    channels, stages = (64, 3) if tokens.element_size() == 2 else (32, 2)  # what memory there is
    blocks = parts_of(n, columns)
    distance = torch.empty(b, n, n, device=device, dtype=torch.float32)
    harm = torch.empty(b, n, blocks, device=device, dtype=torch.float32)
    size_, stride = sizes_of(size, harm)
    _harm_kernel[b, parts_of(n, rows), blocks](
        tokens.contiguous(), size_, harm if attention is None else attention.contiguous(),
        distance, harm, t, num_prefix, c, stride, protection,
        HAS_SIZE=size is not None, HAS_ATTENTION=attention is not None,
        ROWS=rows, COLUMNS=columns, CHANNELS=channels, num_warps=4 if few else 8, num_stages=stages,
    )  # fmt: skip
    if few:
        return Pairs(distance, harm, None)
    rank = torch.empty(b, n, device=device, dtype=torch.int32)
    _rank_kernel[b, parts_of(n, 64)](
        harm, rank, n, blocks, BLOCKS=fitting(blocks), ROWS=64, RIVALS=64,
        num_warps=2,
    )  # fmt: skip
    return Pairs(distance, harm, rank)


def place(
    pairs: Pairs,
    size: Tensor | None,
    attention: Tensor | None,
    weight: Tensor | None,
    num_leaving: int,
    num_prefix: int,
    power: float,
    least: float,
    prune: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every token's place after the merge, who stays and who leaves, and what each weighs."""
    harm, (b, n, blocks), device = pairs.harm, pairs.harm.shape, pairs.harm.device
    t = n + num_prefix
    assignment = torch.empty(b, t, device=device, dtype=torch.int64)
    stays = torch.empty(b, t - num_leaving, device=device, dtype=torch.int32)
    leaves = torch.empty(b, num_leaving, device=device, dtype=torch.int32)
    weighed = torch.empty(b, t, device=device, dtype=torch.float32)
    size_, stride = sizes_of(size, harm)
    weight_, weight_stride = sizes_of(weight, harm)
    rows, warps = (16, 8) if pairs.rank is None else (8, 2)
    _assign_kernel[b, parts_of(n, rows)](
        pairs.distance, harm, stays if pairs.rank is None else pairs.rank, size_, weight_,
        harm if attention is None else attention.contiguous(), assignment, stays, leaves, weighed,
        t, num_prefix, num_leaving, blocks, stride, weight_stride, power, least,
        RANKED=pairs.rank is not None, HAS_SIZE=size is not None, HAS_WEIGHT=weight is not None,
        ATTENDED=attention is not None and power != 0, PRUNE=prune,
        TOKENS=fitting(t), BLOCKS=fitting(blocks), ROWS=rows,
        RIVALS=64, num_warps=warps,
    )  # fmt: skip
    return assignment, stays, leaves, weighed


def assign(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    weight: Tensor | None,
    num_leaving: int,
    num_prefix: int,
    protection: float,
    power: float,
    least: float,
    prune: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`match_least_harm`: every token's place after the merge, who stays, who leaves; weights."""
    attention = None if attention is None else attention.float()
    pairs = compare(tokens, size, attention, num_prefix, protection)
    return place(pairs, size, attention, weight, num_leaving, num_prefix, power, least, prune)


def inform_and_assign(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    carry: Tensor | None,
    gain: Tensor | None,
    centroids: Tensor,
    offsets: Tensor,
    costs: Tensor,
    beta: float,
    eta: float,
    num_leaving: int,
    num_prefix: int,
    protection: float,
    power: float,
    least: float,
    prune: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`assign` with the weights of `inform`, and its logits: pairs are compared meanwhile."""
    tokens = tokens.contiguous()
    attention = None if attention is None else attention.float()
    with branch(tokens) as join:
        logits, weight = inform(
            tokens, size, carry, gain, centroids, offsets, costs, beta, eta, num_prefix
        )
    pairs = compare(tokens, size, attention, num_prefix, protection)
    join()
    placed = place(pairs, size, attention, weight, num_leaving, num_prefix, power, least, prune)
    return *placed, logits

"""Who leaves an image and where to, and what every token weighs in the merge.

Products and distances are in float32, so that no token is centred first; distances lose digits only
where tokens have far more in common than what tells them apart.

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

from ltm.core.kernels.launch import FEW_IMAGES, branch, fitting, has_room, parts_of, sizes_of
from ltm.core.kernels.weighing import Step, prepare, step_of

ROOM = 96 * 1024
"""Bytes of shared memory that the largest tiles of products take."""


@triton.jit
def _product_kernel(
    tokens, products, t, k, c,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The products of two blocks of patches of an image."""
    image, n = tl.program_id(0), t - k
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside, there = rows < n, columns < n
    start = tokens + (image * t + k).to(tl.int64) * c
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for channel in range(0, c, CHANNELS):
        channels = channel + tl.arange(0, CHANNELS)
        known = channels < c
        # These tiles go into the product and nowhere else: on Hopper Triton (3.6, 3.9) lets a
        # product go on while the next tile is loaded, and other readers would not be waited for.
        own = tl.load(
            start + rows[:, None] * c + channels[None],
            mask=inside[:, None] & known[None], other=0.0,
        )  # fmt: skip
        theirs = tl.load(
            start + columns[:, None] * c + channels[None],
            mask=there[:, None] & known[None], other=0.0,
        )  # fmt: skip
        if tokens.dtype.element_ty == tl.float32:  # a sum a tile: one long sum would round more
            found += tl.dot(own, tl.trans(theirs), input_precision="ieee")
        else:
            found = tl.dot(own, tl.trans(theirs), found)
    tl.store(
        products + (image.to(tl.int64) * n + rows[:, None]) * n + columns[None],
        found, mask=inside[:, None] & there[None],
    )  # fmt: skip


@triton.jit
def _distances(products, everyone, inside, rows, here, n):
    """Squared distances of all patches (down) from some (across); the diagonal has their squares.

    What is compared stands below each other, so that threads compare their own numbers.
    """
    theirs = tl.load(products + everyone * (n + 1), mask=inside, other=0.0)
    own = tl.load(products + rows * (n + 1), mask=here, other=0.0)
    both = tl.load(
        products + everyone[:, None] * n + rows[None],
        mask=inside[:, None] & here[None], other=0.0,
    )  # fmt: skip
    return tl.maximum(theirs[:, None] + own[None] - 2 * both, 0.0)


@triton.jit
def _harm_kernel(
    products, size, attention, harm, t, k, size_stride, protection,
    HAS_SIZE: tl.constexpr, HAS_ATTENTION: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The least harm of merging some patches into others."""
    image, n = tl.program_id(0), t - k
    everyone, rows = tl.arange(0, TOKENS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside, here = everyone < n, rows < n
    apart = _distances(products + image.to(tl.int64) * n * n, everyone, inside, rows, here, n)
    open_ = inside[:, None] & (everyone[:, None] > rows[None])
    strength = tl.full((ROWS,), 1.0, tl.float32)
    if HAS_ATTENTION:
        seen = tl.load(attention + image * t + k + everyone, mask=inside, other=0.0)
        own_seen = tl.load(attention + image * t + k + rows, mask=here, other=0.0)
        same = seen[:, None] == own_seen[None]
        open_ = inside[:, None] & ((seen[:, None] > own_seen[None]) | (same & open_))
        strength = tl.exp(protection * tl.log(tl.maximum(own_seen, 1e-12)))
    if HAS_SIZE:
        sizes = size + image * size_stride + k
        weight = tl.load(sizes + everyone, mask=inside, other=0.0).to(tl.float32)
        own_weight = tl.load(sizes + rows, mask=here, other=1.0).to(tl.float32)
        total = tl.maximum(weight[:, None] + own_weight[None], 1e-6)
        apart = apart * (2 * weight[:, None] * own_weight[None] / total)
        open_ = open_ & (weight > 0)[:, None]
    # Within the choice: infinity times a strength of zero would be no number at all.
    least = tl.min(tl.where(open_, apart * strength[None], float("inf")), axis=0)
    if HAS_SIZE:
        least = tl.where(own_weight <= 0, 0.0, least)  # what is not there leaves first
    least = tl.where(least == least, least, float("inf"))  # noqa: PLR0124 - what is no number
    tl.store(harm + image * n + rows, least, mask=here)


@triton.jit
def _rank_kernel(harm, rank, n, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """When some tokens of an image would leave: after how many others."""
    image = tl.program_id(0)
    everyone, rows = tl.arange(0, TOKENS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside, here = everyone < n, rows < n
    theirs = tl.load(harm + image * n + everyone, mask=inside, other=float("inf"))
    own = tl.load(harm + image * n + rows, mask=here, other=float("inf"))
    tie = (theirs[:, None] == own[None]) & (everyone[:, None] < rows[None])
    first = inside[:, None] & ((theirs[:, None] < own[None]) | tie)
    tl.store(rank + image * n + rows, tl.sum(first.to(tl.int32), axis=0), mask=here)


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
    products, rank, size, weight, attention, fall, carry, gain,
    assignment, stays, leaves, weighed, logits,
    t, k, num_leaving, size_stride, weight_stride, carry_stride, power, least, eta,
    HAS_SIZE: tl.constexpr, HAS_WEIGHT: tl.constexpr, ATTENDED: tl.constexpr, PRUNE: tl.constexpr,
    STEPS: tl.constexpr, HAS_CARRY: tl.constexpr, HAS_GAIN: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Who leaves an image, in what order, and the place and weight of some of its tokens."""
    image, n = tl.program_id(0), t - k
    everyone = tl.arange(0, TOKENS)
    inside = everyone < n
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here = rows < n
    sizes, weights = size + image * size_stride, weight + image * weight_stride
    before = tl.load(rank + image * n + everyone, mask=inside, other=0)
    turn = tl.load(rank + image * n + rows, mask=here, other=0)
    closed = (before < num_leaving) | (inside == 0)
    place = k + tl.cumsum(1 - closed.to(tl.int32), axis=0) - 1
    if HAS_SIZE:
        closed = closed | (tl.load(sizes + k + everyone, mask=inside, other=0.0) <= 0)
    gone = turn < num_leaving
    start = products + image.to(tl.int64) * n * n
    apart = _distances(start, everyone, inside, rows, here & gone, n)
    target = tl.argmin(tl.where(closed[:, None], float("inf"), apart), axis=0)
    taken = tl.where(gone, target, rows)
    goes = tl.sum(tl.where(everyone[:, None] == taken[None], place[:, None], 0), axis=0)
    tl.store(assignment + image * t + k + rows, goes.to(tl.int64), mask=here)
    tl.store(leaves + image * num_leaving + turn, k + rows, mask=here & gone)
    tl.store(stays + image * (t - num_leaving) + goes, k + rows, mask=here & (gone == 0))
    share = _weight_of(
        weights, sizes, attention + image * t, k + rows, here, t, power, least,
        HAS_WEIGHT, HAS_SIZE, ATTENDED,
    )  # fmt: skip
    if STEPS:
        found = step_of(
            fall + image * n, carry + image * carry_stride, gain, rows, here, everyone, n, eta,
            HAS_CARRY, HAS_GAIN,
        )  # fmt: skip
        tl.store(logits + image * n + rows, found, mask=here)
        share = share * tl.exp(found)
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
    """What is known of all pairs of patches."""

    products: Tensor
    """`b n n`; distances follow from them."""
    rank: Tensor
    """When each patch would leave, `b n`: those first that do the least harm."""


def compare(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    num_prefix: int,
    protection: float,
) -> Pairs:
    """How far patches are apart, the least harm of merging each, and when each would leave."""
    b, n = tokens.shape[0], tokens.shape[1] - num_prefix
    products = _multiply(tokens.contiguous(), num_prefix)
    harm = products.new_empty(b, n)
    rank = torch.empty(b, n, device=harm.device, dtype=torch.int32)
    size_, stride = sizes_of(size, harm)
    everyone = fitting(n)
    _harm_kernel[b, parts_of(n, 16)](
        products, size_, harm if attention is None else attention.contiguous(), harm,
        n + num_prefix, num_prefix, stride, protection,
        HAS_SIZE=size is not None, HAS_ATTENTION=attention is not None,
        TOKENS=everyone, ROWS=16, num_warps=8,
    )  # fmt: skip
    _rank_kernel[b, parts_of(n, 32)](harm, rank, n, TOKENS=everyone, ROWS=32, num_warps=4)
    return Pairs(products, rank)


def _multiply(tokens: Tensor, num_prefix: int) -> Tensor:
    """The products of all pairs of patches of an image."""
    b, t, c = tokens.shape
    n = t - num_prefix
    products = torch.empty(b, n, n, device=tokens.device, dtype=torch.float32)
    half = tokens.element_size() == 2
    if b < FEW_IMAGES:
        rows, columns, warps = 64, 32, 4
    elif half and has_room(tokens.device, ROOM):
        rows, columns, warps = 128, 128, 8
    else:
        rows, columns, warps = 64, 64, 4
    channels, stages = (64, 3) if half else (32, 2)
    _product_kernel[b, parts_of(n, rows), parts_of(n, columns)](
        tokens, products, t, num_prefix, c,
        ROWS=rows, COLUMNS=columns, CHANNELS=channels, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return products


def place(
    pairs: Pairs,
    size: Tensor | None,
    attention: Tensor | None,
    weight: Tensor | None,
    step: Step | None,
    num_leaving: int,
    num_prefix: int,
    power: float,
    least: float,
    prune: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every token's place after the merge, who stays, who leaves, what each weighs; its logits.

    Those are there after a step only.
    """
    (b, n), device = pairs.rank.shape, pairs.rank.device
    t = n + num_prefix
    assignment = torch.empty(b, t, device=device, dtype=torch.int64)
    stays = torch.empty(b, t - num_leaving, device=device, dtype=torch.int32)
    leaves = torch.empty(b, num_leaving, device=device, dtype=torch.int32)
    weighed = torch.empty(b, t, device=device, dtype=torch.float32)
    logits = weighed if step is None else weighed.new_empty(b, n)
    size_, stride = sizes_of(size, weighed)
    weight_, weight_stride = sizes_of(weight, weighed)
    fall, carry, gain, eta = (weighed, None, None, 0.0) if step is None else step
    carry_, carry_stride = sizes_of(carry, weighed)
    _assign_kernel[b, parts_of(n, 16)](
        *pairs, size_, weight_, weighed if attention is None else attention.contiguous(),
        fall, carry_, weighed if gain is None else gain,
        assignment, stays, leaves, weighed, logits,
        t, num_prefix, num_leaving, stride, weight_stride, carry_stride, power, least, eta,
        HAS_SIZE=size is not None, HAS_WEIGHT=weight is not None,
        ATTENDED=attention is not None and power != 0, PRUNE=prune,
        STEPS=step is not None, HAS_CARRY=carry is not None, HAS_GAIN=gain is not None,
        TOKENS=fitting(t), ROWS=16, num_warps=4,
    )  # fmt: skip
    return assignment, stays, leaves, weighed, logits


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
    assignment, stays, leaves, weighed, _ = place(
        pairs, size, attention, weight, None, num_leaving, num_prefix, power, least, prune
    )
    return assignment, stays, leaves, weighed


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
    """`assign` with the weights that `inform` would give, and its logits.

    Pairs are compared beside the gradient; the step is taken where tokens are placed.
    """
    tokens = tokens.contiguous()
    attention = None if attention is None else attention.float()
    with branch(tokens) as join:
        step = prepare(tokens, size, carry, gain, centroids, offsets, costs, beta, eta, num_prefix)
    pairs = compare(tokens, size, attention, num_prefix, protection)
    join()
    return place(pairs, size, attention, None, step, num_leaving, num_prefix, power, least, prune)

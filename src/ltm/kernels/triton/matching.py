"""Who leaves an image and where to, and what every token weighs in the merge.

Letters: b images, t tokens with their k prefix tokens, n patch tokens, p tokens that stay (prefix
included), r tokens that leave.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltm.kernels.triton.gradient import Classes
from ltm.kernels.triton.launch import branch, fitting, parts_of, sizes_of
from ltm.kernels.triton.pairs import Pairs, compare, distances
from ltm.kernels.triton.weighing import Step, descent, step_of


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
    apart = distances(start, everyone, inside, rows, here & gone, n)
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
        fall = descent(tokens, size, Classes(centroids, offsets, costs, beta), num_prefix)
    pairs = compare(tokens, size, attention, num_prefix, protection)
    join()
    step = Step(fall, None if carry is None else carry.float(), gain, eta)
    return place(pairs, size, attention, None, step, num_leaving, num_prefix, power, least, prune)

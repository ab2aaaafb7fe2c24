"""Which tokens leave and which they join, and the weight of each token in the merge.

Letters: b images, t tokens with their k prefix tokens, n patch tokens, p tokens that stay (prefix
included), r tokens that leave.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from ltm.kernels.dispatch import branch, mark
from ltm.kernels.triton.gradient import Classes
from ltm.kernels.triton.launch import FEW_IMAGES, fitting, parts_of, sizes_of
from ltm.kernels.triton.pairs import compare, distances
from ltm.kernels.triton.tiles import Places, Rule, place_by_tiles
from ltm.kernels.triton.weighing import Step, descent, step_of, weight_of

_MOST_AT_ONCE = 256
"""Up to this many tokens all pairs are kept; longer sequences go tile by tile."""
_MOST_OF_ONE = 640
"""The same for one image, where fewer launches matter more."""


@triton.jit
def _assign_kernel(
    products, rank, size, weight, attention, fall, carry, gain,
    assignment, stays, leaves, goes, weighed, logits,
    t, k, num_leaving, size_stride, weight_stride, carry_stride, power, least, eta,
    HAS_SIZE: tl.constexpr, HAS_WEIGHT: tl.constexpr, ATTENDED: tl.constexpr, PRUNE: tl.constexpr,
    STEPS: tl.constexpr, HAS_CARRY: tl.constexpr, HAS_GAIN: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Which tokens of an image leave, their order, and the places and weights of some tokens."""
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
    into = tl.sum(tl.where(everyone[:, None] == taken[None], place[:, None], 0), axis=0)
    tl.store(assignment + image * t + k + rows, into.to(tl.int64), mask=here)
    tl.store(leaves + image * num_leaving + turn, k + rows, mask=here & gone)
    tl.store(goes + image * num_leaving + turn, into, mask=here & gone)
    tl.store(stays + image * (t - num_leaving) + into, k + rows, mask=here & (gone == 0))
    share = weight_of(
        weights, sizes, attention + image * t, k + rows, here, here, t, power, least,
        HAS_WEIGHT, HAS_SIZE, ATTENDED,
    )  # fmt: skip
    if STEPS:
        found = step_of(
            fall + image * n, carry + image * carry_stride, gain, sizes + k,
            rows, here, everyone, n, eta, HAS_CARRY, HAS_GAIN, HAS_SIZE,
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
        unchanged = weight_of(
            weights, sizes, attention, everyone, prefix, prefix, t, power, least,
            HAS_WEIGHT, HAS_SIZE, False,
        )  # fmt: skip
        tl.store(weighed + image * t + everyone, unchanged, mask=prefix)


def _place_at_once(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    weight: Tensor | None,
    step: Callable[[], Step] | None,
    rule: Rule,
) -> tuple[Places, Tensor]:
    """`place_by_tiles` for a short sequence, with all pairs kept."""
    b, t, k = *tokens.shape[:2], rule.num_prefix
    n = t - k
    pairs = compare(tokens, size, attention, k, rule.protection)
    places = Places.empty(b, t, rule.num_leaving, tokens.device)
    nothing = places.weighed
    logits = nothing if step is None else nothing.new_empty(b, n)
    size_, stride = sizes_of(size, nothing)
    weight_, weight_stride = sizes_of(weight, nothing)
    fall, carry, gain, eta = (nothing, None, None, 0.0) if step is None else step()
    carry_, carry_stride = sizes_of(carry, nothing)
    _assign_kernel[b, parts_of(n, 16)](
        *pairs, size_, weight_, nothing if attention is None else attention.contiguous(),
        fall, carry_, nothing if gain is None else gain,
        *places, logits, t, k, rule.num_leaving, stride, weight_stride, carry_stride,
        rule.power, rule.least, eta,
        HAS_SIZE=size is not None, HAS_WEIGHT=weight is not None,
        ATTENDED=attention is not None and rule.power != 0, PRUNE=rule.prune,
        STEPS=step is not None, HAS_CARRY=carry is not None, HAS_GAIN=gain is not None,
        TOKENS=fitting(t), ROWS=16, num_warps=4,
    )  # fmt: skip
    return places, logits


def _place(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    weight: Tensor | None,
    step: Callable[[], Step] | None,
    rule: Rule,
) -> tuple[Places, Tensor]:
    """The place of each token after the merge, and the logits, which only a step fills."""
    rule = rule._replace(
        alternate=rule.alternate and rule.num_leaving <= (tokens.shape[1] - rule.num_prefix) // 2
    )
    most = _MOST_OF_ONE if tokens.shape[0] == 1 else _MOST_AT_ONCE
    short = tokens.shape[1] <= most and not rule.alternate
    place = _place_at_once if short else place_by_tiles
    attention = None if attention is None else attention.float()
    return place(tokens.contiguous(), size, attention, weight, step, rule)


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
    alternate: bool = False,
) -> Places:
    """`match_least_harm` with weights: the place of each token, which stay and which leave."""
    rule = Rule(num_leaving, num_prefix, protection, power, least, prune, alternate)
    return _place(tokens, size, attention, weight, None, rule)[0]


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
    alternate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`assign` with the weights and logits of `inform`.

    Comparing pairs runs in parallel to the gradient; placing tokens takes the step.
    """
    tokens = tokens.contiguous()
    few = tokens.shape[0] < FEW_IMAGES  # many fill a GPU
    with branch(mark(tokens) if few else None) as join:
        fall = descent(tokens, size, Classes(centroids, offsets, costs, beta), num_prefix)

    def step() -> Step:
        join()
        return Step(fall, None if carry is None else carry.float(), gain, eta)

    rule = Rule(num_leaving, num_prefix, protection, power, least, prune, alternate)
    places, logits = _place(tokens, size, attention, None, step, rule)
    return *places, logits  # pyright: ignore[reportReturnType]

"""The informative step: the mean patch of an image, and the weights that a gradient gives.

Letters: b images, t tokens with their k prefix tokens, c channels.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltm.core.kernels.launch import sizes_of


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


@triton.jit
def _by_attention_kernel(
    weight, size, attention, weighed, t, k, weight_stride, size_stride, power, least,
    HAS_SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """What the tokens of an image weigh, by the attention that each of their patches receives."""
    image, everyone = tl.program_id(0), tl.arange(0, TOKENS)
    inside = everyone < t
    share = tl.load(attention + image * t + everyone, mask=inside, other=0.0).to(tl.float32) * t
    if HAS_SIZE:
        found = tl.load(size + image * size_stride + everyone, mask=inside, other=1.0)
        share = share / tl.maximum(found.to(tl.float32), 1.0)
    before = tl.load(weight + image * weight_stride + everyone, mask=inside, other=0.0)
    after = before * tl.exp(power * tl.log(tl.where(share > least, share, least)))
    tl.store(weighed + image * t + everyone, tl.where(everyone < k, before, after), mask=inside)


def by_attention(
    weight: Tensor,
    size: Tensor | None,
    attention: Tensor,
    power: float,
    least: float,
    num_prefix: int,
) -> Tensor:
    """Weights times the attention per patch, against an even share of it, to a power."""
    b, t = attention.shape
    weighed = torch.empty(b, t, device=attention.device)
    weight_, weight_stride = sizes_of(weight.float(), weighed)
    size_, stride = sizes_of(size, weighed)
    _by_attention_kernel[(b,)](
        weight_, size_, attention.contiguous(), weighed, t, num_prefix, weight_stride, stride,
        power, least, HAS_SIZE=size is not None, TOKENS=triton.next_power_of_2(t), num_warps=4,
    )  # fmt: skip
    return weighed


def pool(tokens: Tensor, size: Tensor | None, num_prefix: int) -> Tensor:
    """The mean patch of every image, by size."""
    b, t, c = tokens.shape
    pooled = torch.empty(b, c, device=tokens.device)
    size_, stride = sizes_of(size, pooled)
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
    size_, stride = sizes_of(size, weight)
    carry_, carry_stride = sizes_of(None if carry is None else carry.float(), weight)
    _inform_kernel[(b,)](
        tokens.contiguous(), gradient.float().contiguous(), size_, carry_,
        weight if gain is None else gain, logits, weight, t, num_prefix, c, stride, carry_stride,
        eta, HAS_SIZE=size is not None, HAS_CARRY=carry is not None, HAS_GAIN=gain is not None,
        TOKENS=triton.next_power_of_2(t), CHANNELS=64, num_warps=8,
    )  # fmt: skip
    return logits, weight

"""What tokens weigh by the informative step.

Letters: b images, t tokens with their k prefix tokens, n patch tokens, c channels, y classes.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltm.core.clustering import ZERO_LENGTH
from ltm.core.kernels.gradient import unit_gradient
from ltm.core.kernels.launch import FEW_IMAGES, fitting, parts_of, sizes_of

MOST_AT_ONCE = 512
"""Tokens of an image that one program can read in whole rows."""


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
def _descend(
    tokens, pooled, slope, some, patch, c, zero,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """How far the bound falls as some tokens of an image gain weight: their part in its slope."""
    width = tl.arange(0, WIDTH)
    whole = tl.load(pooled + width, mask=width < c, other=0.0)
    slopes = tl.load(slope + width, mask=width < c, other=0.0).to(tl.float32)
    square, along = tl.sum(whole * whole, axis=0), tl.sum(whole * slopes, axis=0)
    length = tl.sqrt(square)
    # Only what turns the mean patch counts: its length does not.
    along = tl.where(length > zero, along / tl.maximum(square, zero * zero), 0.0)
    scale = tl.where(length > zero, 1 / tl.maximum(length, zero), 0.0)
    parts = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for channel in range(0, c, CHANNELS):
        channels = channel + tl.arange(0, CHANNELS)
        known = channels < c
        x = tl.load(
            tokens + some[:, None] * c + channels[None],
            mask=patch[:, None] & known[None], other=0.0,
        )  # fmt: skip
        mean = tl.load(pooled + channels, mask=known, other=0.0)
        down = tl.load(slope + channels, mask=known, other=0.0).to(tl.float32)
        parts -= x.to(tl.float32) * (down - along * mean)[None]
    return tl.sum(parts, axis=1) * scale


@triton.jit
def _descend_kernel(
    tokens, pooled, slope, found, t, k, c, zero,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`_descend` of some of many tokens."""
    image = tl.program_id(0)
    some = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    patch = (some >= k) & (some < t)
    fall = _descend(
        tokens + image.to(tl.int64) * t * c, pooled + image * c, slope + image * c,
        some, patch, c, zero, TOKENS, CHANNELS, WIDTH,
    )  # fmt: skip
    tl.store(found + image * (t - k) + some - k, fall, mask=patch)


@triton.jit
def _step_kernel(
    tokens, pooled, slope, size, carry, gain, logits, weight, t, k, c, size_stride, carry_stride,
    eta, zero,
    DESCENDED: tl.constexpr, HAS_SIZE: tl.constexpr, HAS_CARRY: tl.constexpr,
    HAS_GAIN: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The logits of an image's patches, one step down the gradient, and what tokens weigh."""
    image = tl.program_id(0)
    everyone = tl.arange(0, TOKENS)
    inside, patch = everyone < t, (everyone >= k) & (everyone < t)
    if DESCENDED:
        found = tl.load(logits + image * (t - k) + everyone - k, mask=patch, other=0.0)
    else:
        found = _descend(
            tokens + image.to(tl.int64) * t * c, pooled + image * c, slope + image * c,
            everyone, patch, c, zero, TOKENS, CHANNELS, WIDTH,
        )  # fmt: skip
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


def _pool(tokens: Tensor, size: Tensor | None, num_prefix: int) -> Tensor:
    """The mean patch of every image, by size."""
    b, t, c = tokens.shape
    pooled = torch.empty(b, c, device=tokens.device, dtype=torch.float32)
    size_, stride = sizes_of(size, pooled)
    channels, warps = (32, 4) if b < FEW_IMAGES else (64, 2 if tokens.element_size() == 2 else 4)
    _pool_kernel[b, parts_of(c, channels)](
        tokens, size_, pooled, t, num_prefix, c, stride,
        HAS_SIZE=size is not None, TOKENS=256, CHANNELS=channels, num_warps=warps,
    )  # fmt: skip
    return pooled


def inform(
    tokens: Tensor,
    size: Tensor | None,
    carry: Tensor | None,
    gain: Tensor | None,
    centroids: Tensor,
    offsets: Tensor,
    costs: Tensor,
    beta: float,
    eta: float,
    num_prefix: int,
) -> tuple[Tensor, Tensor]:
    """Logits of patches, one step down the gradient of the bound, and the weights of all tokens."""
    b, t, c = tokens.shape
    tokens = tokens.contiguous()
    pooled = _pool(tokens, size, num_prefix)
    slope = unit_gradient(pooled, centroids, offsets, costs, beta, ZERO_LENGTH)
    logits = torch.empty(b, t - num_prefix, device=tokens.device, dtype=torch.float32)
    weight = torch.empty(b, t, device=tokens.device, dtype=torch.float32)
    size_, stride = sizes_of(size, weight)
    carry_, carry_stride = sizes_of(None if carry is None else carry.float(), weight)
    everyone, width, many = fitting(t), fitting(c), t > MOST_AT_ONCE
    if many:
        _descend_kernel[b, parts_of(t, 256)](
            tokens, pooled, slope, logits, t, num_prefix, c, ZERO_LENGTH,
            TOKENS=256, CHANNELS=64, WIDTH=width, num_warps=8,
        )  # fmt: skip
    _step_kernel[(b,)](
        tokens, pooled, slope, size_, carry_, weight if gain is None else gain, logits, weight,
        t, num_prefix, c, stride, carry_stride, eta, ZERO_LENGTH, DESCENDED=many,
        HAS_SIZE=size is not None, HAS_CARRY=carry is not None, HAS_GAIN=gain is not None,
        TOKENS=everyone, CHANNELS=min(64, max(1, 16384 // everyone)), WIDTH=width,
        num_warps=4 if everyone <= 128 else 8,
    )  # fmt: skip
    return logits, weight

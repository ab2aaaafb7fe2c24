"""The weights of tokens by the informative step.

Letters: b images, t tokens with their k prefix tokens, n patch tokens, c channels, y classes.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltm.kernels.dispatch import ZERO_LENGTH
from ltm.kernels.triton.gradient import Classes, unit_gradient
from ltm.kernels.triton.launch import FEW_IMAGES, fitting, parts_of, sizes_of, warps_for

_LARGE_MAP = 1024
"""For many images with more tokens than this, several warps add up tokens."""


class Step(NamedTuple):
    """One step down the gradient of the bound, before it is taken."""

    fall: Tensor
    """Minus the gradient of the bound with respect to each patch's weight, `b n`."""
    carry: Tensor | None
    """The logits before the step, `_ n`."""
    gain: Tensor | None
    """The scale of the standardised step; None uses the raw gradient."""
    eta: float


@triton.jit
def _pool_kernel(
    tokens, size, pooled, t, k, c, size_stride,
    HAS_SIZE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some channels of the mean patch of an image, weighted by size."""
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
def _descend_kernel(
    tokens, pooled, slope, fall, t, k, c, zero, TOKENS: tl.constexpr, WIDTH: tl.constexpr
):
    """Minus the gradient of the bound with respect to the weights of some patches."""
    image, n = tl.program_id(0), t - k
    patches, channels = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    there, known = patches < n, channels < c
    x = tl.load(
        tokens + (image.to(tl.int64) * t + k + patches[:, None]) * c + channels[None],
        mask=there[:, None] & known[None], other=0.0,
    )  # fmt: skip
    mean = tl.load(pooled + image * c + channels, mask=known, other=0.0)
    down = tl.load(slope + image * c + channels, mask=known, other=0.0).to(tl.float32)
    square, along = tl.sum(mean * mean, axis=0), tl.sum(mean * down, axis=0)
    length = tl.sqrt(square)
    # Only the direction of the mean patch matters, so the part along it is removed.
    down -= tl.where(length > zero, along / tl.maximum(square, zero * zero), 0.0) * mean
    scale = tl.where(length > zero, 1 / tl.maximum(length, zero), 0.0)
    found = -scale * tl.sum(x.to(tl.float32) * down[None], axis=1)
    tl.store(fall + image * n + patches, found, mask=there)


@triton.jit
def step_of(
    fall, carry, gain, size, patches, there, everyone, n, eta,
    HAS_CARRY: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_SIZE: tl.constexpr,
):  # fmt: skip
    """The logits of some patches of an image after the step; `everyone` gives mean and spread.

    `size` is that of the first patch. Patches of size zero are padding, which does not count.
    """
    found = tl.load(fall + patches, mask=there, other=0.0)
    if HAS_GAIN:
        counts = (everyone >= 0) & (everyone < n)
        if HAS_SIZE:
            counts = counts & (tl.load(size + everyone, mask=counts, other=0.0) > 0)
        number = tl.maximum(tl.sum(counts.to(tl.float32), axis=0), 1.0)
        all_ = tl.load(fall + everyone, mask=counts, other=0.0)
        mean = tl.sum(all_, axis=0) / number
        apart = tl.where(counts, all_ - mean, 0.0)
        spread = tl.sqrt(tl.sum(apart * apart, axis=0) / number)
        found = tl.load(gain).to(tl.float32) * (found - mean) / (spread + 1e-6)
    found = found * eta
    if HAS_CARRY:
        found += tl.load(carry + patches, mask=there, other=0.0)
    return tl.minimum(tl.maximum(found, -8.0), 8.0)


@triton.jit
def weight_of(
    weight, size, attention, tokens, there, patch, t, power, least,
    HAS_WEIGHT: tl.constexpr, HAS_SIZE: tl.constexpr, ATTENDED: tl.constexpr,
):  # fmt: skip
    """The weights of tokens of an image; those of patches include the attention they receive."""
    counted = tl.full(tokens.shape, 1.0, tl.float32)
    if HAS_SIZE:
        counted = tl.load(size + tokens, mask=there, other=1.0).to(tl.float32)
    found = counted
    if HAS_WEIGHT:
        found = tl.load(weight + tokens, mask=there, other=0.0).to(tl.float32)
    if ATTENDED:
        share = tl.load(attention + tokens, mask=patch, other=0.0) * t / tl.maximum(counted, 1.0)
        # NaN also counts as the least share.
        factor = tl.exp(power * tl.log(tl.where(share > least, share, least)))
        found = tl.where(patch, found * factor, found)
    return found


@triton.jit
def _step_kernel(
    fall, carry, gain, size, logits, weight, t, k, size_stride, carry_stride, eta,
    HAS_CARRY: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The logits of an image's patches after the step, and the weights of its tokens."""
    image, n = tl.program_id(0), t - k
    everyone = tl.arange(0, TOKENS)
    inside, patches = everyone < t, everyone - k
    there = inside & (patches >= 0)
    found = step_of(
        fall + image * n, carry + image * carry_stride, gain, size + image * size_stride + k,
        patches, there, patches, n, eta, HAS_CARRY, HAS_GAIN, HAS_SIZE,
    )  # fmt: skip
    tl.store(logits + image * n + patches, found, mask=there)
    counted = tl.full((TOKENS,), 1.0, tl.float32)
    if HAS_SIZE:
        counted = tl.load(size + image * size_stride + everyone, mask=inside, other=0.0)
        counted = counted.to(tl.float32)
    counted = tl.where(there, counted * tl.exp(found), counted)
    tl.store(weight + image * t + everyone, counted, mask=inside)


def _pool(tokens: Tensor, size: Tensor | None, num_prefix: int) -> Tensor:
    """The mean patch of each image, weighted by size."""
    b, t, c = tokens.shape
    pooled = torch.empty(b, c, device=tokens.device, dtype=torch.float32)
    size_, stride = sizes_of(size, pooled)
    if b < FEW_IMAGES:
        some, channels, warps = 256, 32, 4
    elif t > _LARGE_MAP:
        some, channels, warps = 512, 32, 8
    else:
        some, channels, warps = 32, 64, 1
    _pool_kernel[b, parts_of(c, channels)](
        tokens, size_, pooled, t, num_prefix, c, stride,
        HAS_SIZE=size is not None, TOKENS=some, CHANNELS=channels, num_warps=warps,
    )  # fmt: skip
    return pooled


def descent(tokens: Tensor, size: Tensor | None, classes: Classes, num_prefix: int) -> Tensor:
    """Minus the gradient of the bound with respect to each patch's weight, `b n`."""
    b, t, c = tokens.shape
    tokens = tokens.contiguous()
    pooled = _pool(tokens, size, num_prefix)
    slope = unit_gradient(pooled, classes, ZERO_LENGTH)
    fall = pooled.new_empty(b, t - num_prefix)
    width = fitting(c)
    some = max(1, 8192 // width)
    _descend_kernel[b, parts_of(t - num_prefix, some)](
        tokens, pooled, slope, fall, t, num_prefix, c, ZERO_LENGTH,
        TOKENS=some, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return fall


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
    """The logits of patches after one step down the bound, and the weights of all tokens."""
    fall = descent(tokens, size, Classes(centroids, offsets, costs, beta), num_prefix)
    (b, t), logits = tokens.shape[:2], torch.empty_like(fall)
    weight = logits.new_empty(b, t)
    size_, stride = sizes_of(size, weight)
    carry_, carry_stride = sizes_of(None if carry is None else carry.float(), weight)
    _step_kernel[(b,)](
        fall, carry_, weight if gain is None else gain, size_, logits, weight,
        t, num_prefix, stride, carry_stride, eta,
        HAS_CARRY=carry is not None, HAS_GAIN=gain is not None, HAS_SIZE=size is not None,
        TOKENS=fitting(t), num_warps=2 if t <= 512 else max(8, warps_for(t)),
    )  # fmt: skip
    return logits, weight

"""The gradient of the bound with respect to the mean patch: three products with the classes.

`prepared_gradient` in few launches; what lies between the products is done where they are read.

Letters: b images, c channels, y classes; u the mean patch over its length, phi the membership of
an image in the classes, psi what each class costs it.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

IMAGES, CLASSES, CHANNELS = 16, 64, 64
"""What one program has of each at a time; 16 is the least that tensor cores take."""


@triton.jit
def _logits_kernel(
    pooled, centroids, offsets, logits, b, y, c, sharpness, zero,
    IMAGES: tl.constexpr, CLASSES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """How near some images are to some classes: `offsets + sharpness u c`."""
    images = tl.program_id(0) * IMAGES + tl.arange(0, IMAGES)
    classes = tl.program_id(1) * CLASSES + tl.arange(0, CLASSES)
    here, known = images < b, classes < y
    found = tl.zeros((IMAGES, CLASSES), tl.float32)
    square = tl.zeros((IMAGES,), tl.float32)
    for first in range(0, c, CHANNELS):
        channels = first + tl.arange(0, CHANNELS)
        x = tl.load(
            pooled + images[:, None] * c + channels[None],
            mask=here[:, None] & (channels < c)[None], other=0.0,
        )  # fmt: skip
        centre = tl.load(
            centroids + classes[:, None] * c + channels[None],
            mask=known[:, None] & (channels < c)[None], other=0.0,
        )  # fmt: skip
        square += tl.sum(x * x, axis=1)
        found = tl.dot(x.to(centre.dtype), tl.trans(centre), found, input_precision="ieee")
    found = found * (sharpness / tl.maximum(tl.sqrt(square), zero))[:, None]
    found += tl.load(offsets + classes, mask=known, other=0.0).to(tl.float32)[None]
    tl.store(logits + images[:, None] * y + classes[None], found, mask=here[:, None] & known[None])


@triton.jit
def _largest(logits, images, here, y, IMAGES: tl.constexpr, CLASSES: tl.constexpr):
    """The largest logit of some images."""
    largest = tl.full((IMAGES,), float("-inf"), tl.float32)
    for first in range(0, y, CLASSES):
        classes = first + tl.arange(0, CLASSES)
        found = tl.load(
            logits + images[:, None] * y + classes[None],
            mask=here[:, None] & (classes < y)[None], other=float("-inf"),
        )  # fmt: skip
        largest = tl.maximum(largest, tl.max(found, axis=1))
    return tl.where(here, largest, 0.0)


@triton.jit
def _cost_kernel(
    logits, costs, psi, b, y, IMAGES: tl.constexpr, CLASSES: tl.constexpr, SOME: tl.constexpr
):
    """What some classes cost some images: `phi costs`."""
    images = tl.program_id(0) * IMAGES + tl.arange(0, IMAGES)
    columns = tl.program_id(1) * CLASSES + tl.arange(0, CLASSES)
    here = images < b
    largest = _largest(logits, images, here, y, IMAGES, SOME)
    total = tl.zeros((IMAGES,), tl.float32)
    found = tl.zeros((IMAGES, CLASSES), tl.float32)
    for first in range(0, y, SOME):
        classes = first + tl.arange(0, SOME)
        near = tl.load(
            logits + images[:, None] * y + classes[None],
            mask=here[:, None] & (classes < y)[None], other=float("-inf"),
        )  # fmt: skip
        share = tl.exp(near - largest[:, None])
        cost = tl.load(
            costs + classes[:, None] * y + columns[None],
            mask=(classes < y)[:, None] & (columns < y)[None], other=0.0,
        )  # fmt: skip
        total += tl.sum(share, axis=1)
        found = tl.dot(share.to(cost.dtype), cost, found, input_precision="ieee")
    found = found / tl.where(here, total, 1.0)[:, None]
    tl.store(
        psi + images[:, None] * y + columns[None], found, mask=here[:, None] & (columns < y)[None]
    )


@triton.jit
def _slope_kernel(
    logits, psi, centroids, slope, b, y, c, sharpness,
    IMAGES: tl.constexpr, SOME: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some channels of the gradient with respect to u: `sharpness phi (psi - sum(phi psi)) c`."""
    images = tl.program_id(0) * IMAGES + tl.arange(0, IMAGES)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here = images < b
    largest = _largest(logits, images, here, y, IMAGES, SOME)
    total = tl.zeros((IMAGES,), tl.float32)
    mean = tl.zeros((IMAGES,), tl.float32)
    for first in range(0, y, SOME):
        classes = first + tl.arange(0, SOME)
        there = here[:, None] & (classes < y)[None]
        places = images[:, None] * y + classes[None]
        share = tl.exp(tl.load(logits + places, mask=there, other=float("-inf")) - largest[:, None])
        total += tl.sum(share, axis=1)
        mean += tl.sum(share * tl.load(psi + places, mask=there, other=0.0), axis=1)
    total = tl.where(here, total, 1.0)
    mean = mean / total
    found = tl.zeros((IMAGES, CHANNELS), tl.float32)
    for first in range(0, y, SOME):
        classes = first + tl.arange(0, SOME)
        there = here[:, None] & (classes < y)[None]
        places = images[:, None] * y + classes[None]
        share = tl.exp(tl.load(logits + places, mask=there, other=float("-inf")) - largest[:, None])
        apart = tl.load(psi + places, mask=there, other=0.0) - mean[:, None]
        weight = sharpness * (share / total[:, None]) * apart
        centre = tl.load(
            centroids + classes[:, None] * c + channels[None],
            mask=(classes < y)[:, None] & (channels < c)[None], other=0.0,
        )  # fmt: skip
        found = tl.dot(weight.to(centre.dtype), centre, found, input_precision="ieee")
    tl.store(
        slope + images[:, None] * c + channels[None], found,
        mask=here[:, None] & (channels < c)[None],
    )  # fmt: skip


def unit_gradient(
    pooled: Tensor, centroids: Tensor, offsets: Tensor, costs: Tensor, beta: float, zero: float
) -> Tensor:
    """The gradient of the bound with respect to the mean patch over its length, `b c`."""
    (b, c), y = pooled.shape, centroids.shape[0]
    logits = torch.empty(b, y, device=pooled.device)
    psi = torch.empty_like(logits)
    slope = torch.empty_like(pooled)
    images, classes, channels = (
        triton.cdiv(number, some) for number, some in ((b, IMAGES), (y, CLASSES), (c, CHANNELS))
    )
    centroids, costs = centroids.contiguous(), costs.contiguous()
    _logits_kernel[images, classes](
        pooled, centroids, offsets, logits, b, y, c, 2 * beta, zero,
        IMAGES=IMAGES, CLASSES=CLASSES, CHANNELS=CHANNELS, num_warps=4, num_stages=3,
    )  # fmt: skip
    _cost_kernel[images, classes](
        logits, costs, psi, b, y, IMAGES=IMAGES, CLASSES=CLASSES, SOME=CLASSES,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _slope_kernel[images, channels](
        logits, psi, centroids, slope, b, y, c, 2 * beta,
        IMAGES=IMAGES, SOME=CLASSES, CHANNELS=CHANNELS, num_warps=4, num_stages=3,
    )  # fmt: skip
    return slope

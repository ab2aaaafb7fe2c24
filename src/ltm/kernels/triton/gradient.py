"""The gradient of the bound with respect to the mean patch: three products with the classes.

`bound_gradient` in few launches: the steps between products are one kernel each, and for few images
they are part of the products.

Letters: b images, c channels, y classes; u the mean patch over its length, phi the membership of
an image in the classes, psi the cost of each class for it.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltm.kernels.dispatch import full_precision
from ltm.kernels.triton.launch import fitting, parts_of

_MOST_IMAGES, _MOST_CLASSES = 8, 1024
"""Up to these numbers each image reads the classes by itself, in float32; beyond them products read
them once for all images, in the precision of the classes."""


class Classes(NamedTuple):
    """The statistics of the classes."""

    centroids: Tensor
    """`y c`."""
    offsets: Tensor
    """The part of the class logits that depends on the classes only, `y`."""
    costs: Tensor
    """The cost of a class for an image of another, `y y`."""
    beta: float


@triton.jit
def _logits_kernel(
    pooled, centroids, offsets, logits, b, y, c, sharpness, zero,
    IMAGES: tl.constexpr, CLASSES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The logits of some images for some classes: `offsets + sharpness u c`."""
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
def _membership(logits, image, y, CLASSES: tl.constexpr):
    """The membership of an image in all classes."""
    classes = tl.arange(0, CLASSES)
    near = tl.load(logits + image * y + classes, mask=classes < y, other=float("-inf"))
    share = tl.exp(near - tl.max(near, axis=0))
    return share / tl.sum(share, axis=0)


@triton.jit
def _pull(share, psi, image, y, sharpness, CLASSES: tl.constexpr):
    """The weight of each class in an image's gradient, `sharpness phi (psi - sum(phi psi))`."""
    classes = tl.arange(0, CLASSES)
    cost = tl.load(psi + image * y + classes, mask=classes < y, other=0.0).to(tl.float32)
    return sharpness * share * (cost - tl.sum(share * cost, axis=0))


@triton.jit
def _share_kernel(logits, phi, y, CLASSES: tl.constexpr):
    """The membership of an image, in the precision of the products."""
    image, classes = tl.program_id(0), tl.arange(0, CLASSES)
    share = _membership(logits, image, y, CLASSES)
    tl.store(phi + image * y + classes, share.to(phi.dtype.element_ty), mask=classes < y)


@triton.jit
def _weight_kernel(logits, psi, weight, y, sharpness, CLASSES: tl.constexpr):
    """The weight of each class in the gradient of an image, in the precision of the products."""
    image, classes = tl.program_id(0), tl.arange(0, CLASSES)
    pull = _pull(_membership(logits, image, y, CLASSES), psi, image, y, sharpness, CLASSES)
    tl.store(weight + image * y + classes, pull.to(weight.dtype.element_ty), mask=classes < y)


@triton.jit
def _near_kernel(
    pooled, centroids, offsets, logits, y, c, sharpness, zero,
    CLASSES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`_logits_kernel` for one image, which reads full rows of the centroids."""
    image = tl.program_id(0)
    classes = tl.program_id(1) * CLASSES + tl.arange(0, CLASSES)
    channels = tl.arange(0, WIDTH)
    known = classes < y
    x = tl.load(pooled + image * c + channels, mask=channels < c, other=0.0)
    centre = tl.load(
        centroids + classes[:, None] * c + channels[None],
        mask=known[:, None] & (channels < c)[None], other=0.0,
    )  # fmt: skip
    length = tl.sqrt(tl.sum(x * x, axis=0))
    found = tl.sum(centre.to(tl.float32) * x[None], axis=1) * (sharpness / tl.maximum(length, zero))
    found += tl.load(offsets + classes, mask=known, other=0.0).to(tl.float32)
    tl.store(logits + image * y + classes, found, mask=known)


@triton.jit
def _sum_kernel(
    logits, psi, matrix, sums, y, m, sharpness,
    PULLS: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of a matrix, summed over classes by membership or by gradient weight."""
    image, classes = tl.program_id(0), tl.arange(0, CLASSES)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = classes < y
    x = tl.load(  # first, so that it comes while the membership is found
        matrix + classes[:, None] * m + columns[None],
        mask=known[:, None] & (columns < m)[None], other=0.0,
    )  # fmt: skip
    part = _membership(logits, image, y, CLASSES)
    if PULLS:
        part = _pull(part, psi, image, y, sharpness, CLASSES)
    found = tl.sum(x.to(tl.float32) * part[:, None], axis=0)
    tl.store(sums + image * m + columns, found, mask=columns < m)


def _one_by_one(pooled: Tensor, classes: Classes, zero: float) -> Tensor:
    """`unit_gradient` image by image, with rows and columns of the classes spread over the GPU."""
    centroids, offsets, costs, beta = classes
    (b, c), y = pooled.shape, centroids.shape[0]
    logits, psi, slope = pooled.new_empty(b, y), pooled.new_empty(b, y), torch.empty_like(pooled)
    width, everyone, columns = fitting(c), fitting(y), 8 if b == 1 else 16
    some = max(1, 8192 // width)
    _near_kernel[b, parts_of(y, some)](
        pooled, centroids, offsets, logits, y, c, 2 * beta, zero,
        CLASSES=some, WIDTH=width, num_warps=4,
    )  # fmt: skip
    for matrix, sums, pulls in ((costs, psi, False), (centroids, slope, True)):
        _sum_kernel[b, parts_of(matrix.shape[1], columns)](
            logits, psi, matrix, sums, y, matrix.shape[1], 2 * beta,
            PULLS=pulls, CLASSES=everyone, COLUMNS=columns, num_warps=columns // 2,
        )  # fmt: skip
    return slope


def unit_gradient(pooled: Tensor, classes: Classes, zero: float) -> Tensor:
    """The gradient of the bound with respect to the mean patch over its length, `b c`."""
    centroids, offsets, costs, beta = classes
    centroids, costs = centroids.contiguous(), costs.contiguous()
    (b, c), y = pooled.shape, centroids.shape[0]
    if b <= _MOST_IMAGES and y <= _MOST_CLASSES:
        return _one_by_one(pooled, Classes(centroids, offsets, costs, beta), zero)
    logits = pooled.new_empty(b, y)
    phi = centroids.new_empty(b, y)
    warps, stages = (2, 4) if centroids.element_size() == 2 else (4, 3)
    _logits_kernel[parts_of(b, 16), parts_of(y, 64)](
        pooled, centroids, offsets, logits, b, y, c, 2 * beta, zero,
        IMAGES=16, CLASSES=64, CHANNELS=64, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    everyone = fitting(y)
    _share_kernel[(b,)](logits, phi, y, CLASSES=everyone, num_warps=4)
    with full_precision(pooled):
        psi = phi @ costs
        _weight_kernel[(b,)](logits, psi, phi, y, 2 * beta, CLASSES=everyone, num_warps=4)
        return phi @ centroids

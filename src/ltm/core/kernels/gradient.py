"""The gradient of the bound with respect to the mean patch: three products with the classes.

`prepared_gradient` in few launches: what lies between the products is one kernel each time.

Letters: b images, c channels, y classes; u the mean patch over its length, phi the membership of
an image in the classes, psi what each class costs it.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ltm.core.kernels.launch import fitting, parts_of
from ltm.core.precision import full_precision


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
def _membership(logits, image, y, CLASSES: tl.constexpr):
    """The membership of an image in all classes."""
    classes = tl.arange(0, CLASSES)
    near = tl.load(logits + image * y + classes, mask=classes < y, other=float("-inf"))
    share = tl.exp(near - tl.max(near, axis=0))
    return share / tl.sum(share, axis=0)


@triton.jit
def _share_kernel(logits, phi, y, CLASSES: tl.constexpr):
    """The membership of an image, in the precision of the products."""
    image, classes = tl.program_id(0), tl.arange(0, CLASSES)
    share = _membership(logits, image, y, CLASSES)
    tl.store(phi + image * y + classes, share.to(phi.dtype.element_ty), mask=classes < y)


@triton.jit
def _weight_kernel(logits, psi, weight, y, sharpness, CLASSES: tl.constexpr):
    """How much each class pulls on an image: `sharpness phi (psi - sum(phi psi))`."""
    image, classes = tl.program_id(0), tl.arange(0, CLASSES)
    cost = tl.load(psi + image * y + classes, mask=classes < y, other=0.0).to(tl.float32)
    share = _membership(logits, image, y, CLASSES)
    pull = sharpness * share * (cost - tl.sum(share * cost, axis=0))
    tl.store(weight + image * y + classes, pull.to(weight.dtype.element_ty), mask=classes < y)


def unit_gradient(
    pooled: Tensor, centroids: Tensor, offsets: Tensor, costs: Tensor, beta: float, zero: float
) -> Tensor:
    """The gradient of the bound with respect to the mean patch over its length, `b c`."""
    (b, c), y = pooled.shape, centroids.shape[0]
    logits = pooled.new_empty(b, y)
    phi = centroids.new_empty(b, y)
    _logits_kernel[parts_of(b, 16), parts_of(y, 64)](
        pooled, centroids.contiguous(), offsets, logits, b, y, c, 2 * beta, zero,
        IMAGES=16, CLASSES=64, CHANNELS=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    everyone = fitting(y)
    _share_kernel[(b,)](logits, phi, y, CLASSES=everyone, num_warps=4)
    with full_precision(pooled):
        psi = phi @ costs
        _weight_kernel[(b,)](logits, psi, phi, y, 2 * beta, CLASSES=everyone, num_warps=4)
        return phi @ centroids

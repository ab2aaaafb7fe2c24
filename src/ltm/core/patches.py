"""Embed patches by a matrix product.

A convolution whose stride equals its kernel size is a product with the patches. For three channels
the GPU's convolutions do not use tensor cores, and can take a sixth of a small ViT's forward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ltm.kernels.dispatch import is_recorded

_MAX_CHANNELS = 4
"""With more input channels than images have, convolutions are as fast."""


class PatchProduct(nn.Conv2d):
    """A convolution over patches that do not overlap; on a GPU a matrix product."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of the overridden one
        if not input.is_cuda or not _is_half(input) or is_recorded():
            return super().forward(input)
        return embed_patches(input, self.weight, self.bias)


def embed_patches(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The output of the convolution, `b c h w`; pixels beyond the last full patch are left out."""
    channels, patch = weight.shape[0], weight.shape[2:]
    rows, columns = (side // step for side, step in zip(images.shape[2:], patch, strict=True))
    if not rows or not columns:
        raise ValueError(
            f"images are {images.shape[2]}x{images.shape[3]}, smaller than a patch of "
            f"{patch[0]}x{patch[1]}"
        )
    images = images[:, :, : rows * patch[0], : columns * patch[1]]
    patches = images.reshape(*images.shape[:2], rows, patch[0], columns, patch[1])
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)
    embedded = nn.functional.linear(patches, weight.reshape(channels, -1), bias)
    return embedded.permute(0, 3, 1, 2)


def _is_half(images: Tensor) -> bool:
    """Whether precision is half; in single precision torch's convolution is fast enough."""
    return images.element_size() == 2 or torch.is_autocast_enabled(images.device.type)


def embed_by_product_(model: nn.Module) -> int:
    """Turn all patch embeddings of a network into products; returns how many there are."""
    found = [module for module in model.modules() if type(module) is nn.Conv2d and _is_one(module)]
    for module in found:
        module.__class__ = PatchProduct
    return len(found)


def embed_by_convolution_(model: nn.Module) -> None:
    """Undo `embed_by_product_`."""
    found: list[nn.Module] = [m for m in model.modules() if type(m) is PatchProduct]
    for module in found:
        module.__class__ = nn.Conv2d


def _is_one(conv: nn.Conv2d) -> bool:
    steps = conv.kernel_size == conv.stride and min(conv.kernel_size) > 1
    plain = conv.padding in ((0, 0), "valid") and conv.dilation == (1, 1) and conv.groups == 1
    return steps and plain and conv.in_channels <= _MAX_CHANNELS

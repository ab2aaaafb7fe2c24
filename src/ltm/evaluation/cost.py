"""Multiply-adds as they happen on given images: for methods whose token counts depend on them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ltm.core.cost import evaluating


@torch.no_grad()
def measured_gmacs(model: nn.Module, images: Tensor) -> float:
    """Billions of multiply-adds per image, the mean over `images` seen one by one.

    On models with fixed token counts this equals `ltm.gmacs`, which needs no images, but for
    informative weights without class statistics: they rest, and `ltm.gmacs` counts them at work.
    """
    # On the CPU, where merging adds tokens up: a GPU multiplies by zeros and ones, which is faster
    # there but counts as products. Attention in plain products: not every fused kernel is known.
    model = copy.deepcopy(model).cpu()
    images = images.to("cpu", next(model.parameters()).dtype)
    with (
        evaluating(model),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        for image in images:
            model(image[None])
    return counter.get_total_flops() / 2e9 / len(images)


def num_parameters(model: nn.Module) -> int:
    """Parameters of a model, those of its mask modules included."""
    return sum(parameter.numel() for parameter in model.parameters())

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

    For fixed token counts this equals `ltm.gmacs`, which needs no images. The exception:
    informative weights without class statistics do not run, but `ltm.gmacs` counts them.
    """
    # On the CPU merging adds tokens; a GPU multiplies by zeros and ones, which is faster there but
    # would count as multiply-adds. The counter does not know every fused attention kernel.
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

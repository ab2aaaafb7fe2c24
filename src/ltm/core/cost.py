"""Count multiply-adds (MACs) on a copy of the model on `meta`, where nothing is computed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

_REPLACING = threading.RLock()


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of the model with its tensors on `meta`: no weight is read or copied.

    It has single precision, like the images that it is run on. No parameter requires a gradient:
    torch's counter cannot handle views of parameters that do.
    """
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_shape(parameter), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = _shape(buffer)
    return copy.deepcopy(model, memo)


def _shape(x: Tensor) -> Tensor:
    dtype = torch.float32 if x.is_floating_point() else x.dtype
    return torch.empty_like(x, device="meta", dtype=dtype)


def count_macs(meta_model: nn.Module, images: Tensor) -> int:
    """MACs of one forward of a model on `meta`, in evaluation mode.

    On `meta` the counter sees fused attention; on several CPU builds it does not.
    """
    with FlopCounterMode(display=False) as counter:
        run_on_meta(meta_model, images)
    return counter.get_total_flops() // 2


@torch.no_grad()
def measured_gmacs(model: nn.Module, images: Tensor) -> float:
    """Billions of multiply-adds per image, measured on images one by one and averaged.

    If token counts are fixed this equals `ltm.gmacs`, which needs no images, except that
    `ltm.gmacs` also counts informative weights before their class statistics are collected.
    """
    # On a GPU merging multiplies by zeros and ones, which would count as multiply-adds; on the CPU
    # it adds tokens. The counter does not know all fused attention kernels.
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
    """Parameters of a model, mergers included."""
    return sum(parameter.numel() for parameter in model.parameters())


def run_on_meta(meta_model: nn.Module, inputs: Any) -> Any:
    """Run a forward on `meta`, in evaluation mode."""
    with running_on_meta(meta_model):
        return meta_model(inputs)


@contextmanager
def running_on_meta(meta_model: nn.Module) -> Generator[None, None, None]:
    """Run parts of a model on `meta` inside, in evaluation mode."""
    with _without_autocast_on_meta(), evaluating(meta_model), torch.no_grad():
        yield


@contextmanager
def _without_autocast_on_meta() -> Generator[None, None, None]:
    """Before 1.0.30, timm enters autocast on the device of its tensors; `meta` has none."""

    def autocast(device_type: str, *args: Any, **options: Any) -> AbstractContextManager[object]:
        if device_type == "meta":
            return nullcontext()
        return torch.amp.autocast(device_type, *args, **options)

    with _REPLACING:
        module: Any = torch
        before = module.autocast
        module.autocast = autocast
        try:
            yield
        finally:
            module.autocast = before


def meta_images(model: nn.Module, image_size: tuple[int, int]) -> Tensor:
    """One image for the model, on `meta`."""
    return torch.empty(1, channels_of(model), *image_size, device="meta")


def channels_of(model: nn.Module) -> int:
    """The channels of a network's images: the input channels of its first convolution."""
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    return next((conv.in_channels for conv in convolutions), 3)


@contextmanager
def evaluating(model: nn.Module) -> Generator[None, None, None]:
    """Put the model in evaluation mode; afterwards each module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode

"""Counting multiply-adds (MACs): without running anything, on a copy of the model on `meta`."""

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
    """A structural copy of the model whose tensors live on `meta`: no weight is read or copied.

    It is of single precision, as its images are, whatever the model's own. Nothing has a gradient:
    torch's counter cannot take views of parameters that do.
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

    The counter knows fused attention on `meta`; on several CPU builds it misses it.
    """
    with FlopCounterMode(display=False) as counter:
        run_on_meta(meta_model, images)
    return counter.get_total_flops() // 2


@torch.no_grad()
def measured_gmacs(model: nn.Module, images: Tensor) -> float:
    """Billions of multiply-adds per image as they happen, the mean over images seen one by one.

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


def run_on_meta(meta_model: nn.Module, inputs: Any) -> Any:
    """A forward for its shapes alone, in evaluation mode."""
    with running_on_meta(meta_model):
        return meta_model(inputs)


@contextmanager
def running_on_meta(meta_model: nn.Module) -> Generator[None, None, None]:
    """Whatever is called of the model inside is called for its shapes alone."""
    with _without_autocast_on_meta(), evaluating(meta_model), torch.no_grad():
        yield


@contextmanager
def _without_autocast_on_meta() -> Generator[None, None, None]:
    """Before 1.0.30 timm enters autocast on the device of its tensors, and `meta` has none."""

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
    """The shape of one image that a model takes, on `meta`."""
    return torch.empty(1, channels_of(model), *image_size, device="meta")


def channels_of(model: nn.Module) -> int:
    """The channels of the images that a network takes: those of its first convolution."""
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    return next((conv.in_channels for conv in convolutions), 3)


@contextmanager
def evaluating(model: nn.Module) -> Generator[None, None, None]:
    """The model in evaluation mode, every module's own mode given back afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode

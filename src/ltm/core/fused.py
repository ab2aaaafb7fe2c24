"""When Triton kernels take over from the plain torch path.

They are for inference on a GPU, and off unless asked for, by `LTM_KERNELS=1` in the environment or
`fused.enable()`: results are those of the plain path.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

MAX_TOKENS = 256
"""Longer sequences do not fit into one program; they take the plain path."""

_enabled = os.environ.get("LTM_KERNELS", "0") == "1" and find_spec("triton") is not None


def enable(on: bool = True) -> None:
    """Use the kernels wherever they can be used, or nowhere."""
    if on and find_spec("triton") is None:
        raise ValueError("enable: Triton is not installed; it comes with torch on Linux.")
    global _enabled  # noqa: PLW0603 - one switch for the process
    _enabled = on


def takes(x: Tensor, weight: Tensor | None = None) -> bool:
    """Whether the kernels do the work on these tokens, `b t c`, and their weights."""
    if not _enabled or x.shape[1] > MAX_TOKENS or torch.compiler.is_exporting():
        return False
    learns = x.requires_grad or (weight is not None and weight.requires_grad)
    return not (torch.is_grad_enabled() and learns) and _runs_on(x)


def kernels() -> Any:
    """The kernels, imported when first used: they need Triton."""
    return import_module("ltm.core.kernels")


def _runs_on(x: Tensor) -> bool:
    return x.is_cuda

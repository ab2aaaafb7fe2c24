"""The precision in which formulas are computed: at least float32, whatever the network runs in."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """Return `x` as it is in float32 and float64, in float32 from anything narrower."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Suspend autocast on the device of `x`: it would turn float32 products into half precision.

    Where autocast is off nothing is entered, so that exported graphs stay free of it.
    """
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


ZERO_LENGTH = 1e-12
"""A feature no longer than this has no direction."""

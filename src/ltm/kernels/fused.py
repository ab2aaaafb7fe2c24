"""When Triton kernels do the work of the plain torch path.

They are for inference: wherever there is an NVIDIA GPU and Triton, unless `LTM_KERNELS=0` is in the
environment. Their results are those of the plain path, which does the work everywhere else.

Letters: b images, t tokens with their prefix, c channels, h heads, d channels of a head.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ltm.kernels import operators
from ltm.kernels.recording import is_recorded

MAX_TOKENS, MAX_CHANNELS = 256, 1024
"""What does not fit into one program of a match takes the plain path."""
MAX_INFORMED = 4096
"""More tokens than this are not weighed in one program."""
MAX_SIDE = 64
"""Wider grids are not merged row by row."""
MAX_HEAD = 64
"""Wider heads would need more shared memory than many GPUs have."""
OLDEST = (7, 5)
"""Compute capability of the oldest GPU that Triton builds for."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_enabled = os.environ.get("LTM_KERNELS", "1") != "0"
_installed = find_spec("triton") is not None


def enable(on: bool = True) -> bool:
    """Use the kernels wherever they can be used, or nowhere; returns what held before."""
    global _enabled
    before, _enabled = _enabled, on
    return before


def takes(x: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels do the work on these tensors."""
    if not (_enabled and _installed and _runs_on(x)) or is_recorded():
        return False
    return not torch.is_grad_enabled() or not any(
        y is not None and y.requires_grad for y in (x, *others)
    )


def takes_match(x: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels match and merge these tokens, `b t c`."""
    fits = x.shape[1] <= MAX_TOKENS and x.shape[2] <= MAX_CHANNELS
    return fits and takes(x, *others)


def takes_attention(x: Tensor, head_dim: int, *others: Tensor | None) -> bool:
    """Whether a kernel attends, in heads of this width."""
    return head_dim <= MAX_HEAD and takes(x, *others)


def takes_importance(qkv: Tensor, head_dim: int) -> bool:
    """Whether a kernel finds the attention that these tokens receive, `b t (3 h d)`."""
    return qkv.shape[1] <= MAX_TOKENS and takes_attention(qkv, head_dim)


def takes_inform(x: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels weigh these tokens, `b t c`, by the informative step."""
    return x.shape[1] <= MAX_INFORMED and takes(x, *others)


def takes_mix(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel multiplies these; where torch may choose the precision, it does."""
    return takes(x, *others) and not torch.is_autocast_enabled(x.device.type)


def takes_grid(x: Tensor, rows: Tensor, columns: Tensor, weight: Tensor | None) -> bool:
    """Whether a kernel merges this grid."""
    return columns.shape[0] <= MAX_SIDE and takes_mix(x, rows, columns, weight)


def _runs_on(x: Tensor) -> bool:
    if not x.is_cuda or x.dtype not in _DTYPES or torch.version.cuda is None:
        return False
    # Compiled graphs need Triton themselves, and cannot be told to try.
    return torch.compiler.is_compiling() or _works_on(x.device.index)


@cache
def _works_on(device: int) -> bool:
    """Whether a kernel can be built and launched: that takes a C compiler, and no old GPU."""
    if torch.cuda.get_device_capability(device) < OLDEST:
        return False
    try:
        one = torch.zeros(1, 1, dtype=torch.int32, device=f"cuda:{device}")
        token, weight = one.float()[..., None], one.float()
        operators.merge_groups(token, weight, None, None, one.long(), one, one, False)
    except Exception as error:  # noqa: BLE001 - whatever it is, the plain path works
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"Triton's kernels do not run on cuda:{device} ({reason}); the plain torch path does "
            "their work. LTM_KERNELS=0 chooses it without this warning.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True

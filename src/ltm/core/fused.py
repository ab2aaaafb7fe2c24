"""Operators of the matching path that Triton kernels do on a GPU, and when they do.

They are for inference: wherever there is an NVIDIA GPU and Triton, unless `LTM_KERNELS=0` is in the
environment. Their results are those of the plain torch path, which does the work everywhere else.
As operators they can be captured by CUDA graphs and compiled with the network around them.

Letters: b images, t tokens with their prefix, p tokens that stay, r tokens that leave, c channels,
h heads, d channels of a head.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# ruff: noqa: PLR0917 - operators take their arguments in order
from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ltm.core.recording import is_recorded

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
        pair = torch.zeros(1, 2, device=f"cuda:{device}")
        group_means(pair, pair, pair.long(), 1)
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


def _kernels() -> Any:
    """Imported when first used: they need Triton."""
    return import_module("ltm.core.kernels")


@torch.library.custom_op(
    "ltm::assign",
    mutates_args=(),
    schema="(Tensor tokens, Tensor? size, Tensor? attention, int num_leaving, int num_prefix, "
    "float protection) -> (Tensor, Tensor, Tensor)",
)
def assign(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    num_leaving: int,
    num_prefix: int,
    protection: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The place of each token after the merge, `b t`; who stays, `b p`; who leaves, `b r`."""
    with torch.cuda.device_of(tokens):
        return _kernels().assign(tokens, size, attention, num_leaving, num_prefix, protection)


@assign.register_fake
def _(
    tokens: Tensor, _size: Any, _attention: Any, num_leaving: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    b, t = tokens.shape[:2]
    return (
        tokens.new_empty(b, t, dtype=torch.int64),
        tokens.new_empty(b, t - num_leaving, dtype=torch.int32),
        tokens.new_empty(b, num_leaving, dtype=torch.int32),
    )


@torch.library.custom_op(
    "ltm::merge_groups",
    mutates_args=(),
    schema="(Tensor tokens, Tensor weight, Tensor? size, Tensor assignment, Tensor stays, "
    "Tensor leaves, bool keep_norm) -> (Tensor, Tensor)",
)
def merge_groups(
    tokens: Tensor,
    weight: Tensor,
    size: Tensor | None,
    assignment: Tensor,
    stays: Tensor,
    leaves: Tensor,
    keep_norm: bool,
) -> tuple[Tensor, Tensor]:
    """Weighted means of groups, `b p c`, and the sums of their sizes, `b p`."""
    with torch.cuda.device_of(tokens):
        return _kernels().merge_groups(tokens, weight, size, assignment, stays, leaves, keep_norm)


@merge_groups.register_fake
def _(
    tokens: Tensor, _weight: Any, _size: Any, _assignment: Any, stays: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    merged = tokens.new_empty(*stays.shape, tokens.shape[2])
    return merged, tokens.new_empty(stays.shape, dtype=torch.float32)


@torch.library.custom_op(
    "ltm::mix", mutates_args=(), schema="(Tensor matrix, Tensor tokens) -> Tensor"
)
def mix(matrix: Tensor, tokens: Tensor) -> Tensor:
    """The same product for every image, `p t` times `b t c`."""
    with torch.cuda.device_of(tokens):
        return _kernels().mix(matrix, tokens)


@mix.register_fake
def _(matrix: Tensor, tokens: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], matrix.shape[0], tokens.shape[2])


@torch.library.custom_op(
    "ltm::merge_grid",
    mutates_args=(),
    schema="(Tensor tokens, Tensor? weight, Tensor rows, Tensor columns) -> Tensor",
)
def merge_grid(tokens: Tensor, weight: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
    """Means by weight over rows and columns of a grid, or its plain product with both."""
    with torch.cuda.device_of(tokens):
        return _kernels().merge_grid(tokens, weight, rows, columns)


@merge_grid.register_fake
def _(tokens: Tensor, _weight: Any, rows: Tensor, columns: Tensor) -> Tensor:
    b, _, c = tokens.shape
    return tokens.new_empty(b, rows.shape[1] * columns.shape[1], c)


@torch.library.custom_op(
    "ltm::importance",
    mutates_args=(),
    schema="(Tensor qkv, Tensor? size, int num_heads, float scale, float power) -> Tensor",
)
def importance(
    qkv: Tensor, size: Tensor | None, num_heads: int, scale: float, power: float
) -> Tensor:
    """Attention received from the first token, a mean over heads, `b t (3 h d) -> b t`."""
    with torch.cuda.device_of(qkv):
        return _kernels().importance(qkv, size, num_heads, scale, power)


@importance.register_fake
def _(qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape[:2], dtype=torch.float32)


@torch.library.custom_op(
    "ltm::attention",
    mutates_args=(),
    schema="(Tensor qkv, Tensor size, int num_heads, float scale, float power) -> Tensor",
)
def attention(qkv: Tensor, size: Tensor, num_heads: int, scale: float, power: float) -> Tensor:
    """Attention to keys that count as often as their size says, `b t (3 h d) -> b t (h d)`."""
    with torch.cuda.device_of(qkv):
        return _kernels().attention(qkv, size, num_heads, scale, power)


@attention.register_fake
def _(qkv: Tensor, *_: Any) -> Tensor:
    b, t, width = qkv.shape
    return qkv.new_empty(b, t, width // 3)


@torch.library.custom_op(
    "ltm::by_attention",
    mutates_args=(),
    schema="(Tensor weight, Tensor? size, Tensor attention, float power, float least, "
    "int num_prefix) -> Tensor",
)
def by_attention(
    weight: Tensor,
    size: Tensor | None,
    attention: Tensor,
    power: float,
    least: float,
    num_prefix: int,
) -> Tensor:
    """Weights times the attention per patch, against an even share, to a power, `b t`."""
    with torch.cuda.device_of(attention):
        return _kernels().by_attention(weight, size, attention, power, least, num_prefix)


@by_attention.register_fake
def _(_weight: Any, _size: Any, attention: Tensor, *_: Any) -> Tensor:
    return attention.new_empty(attention.shape, dtype=torch.float32)


@torch.library.custom_op(
    "ltm::inform",
    mutates_args=(),
    schema="(Tensor tokens, Tensor? size, Tensor? carry, Tensor? gain, Tensor centroids, "
    "Tensor offsets, Tensor costs, float beta, float eta, int num_prefix) -> (Tensor, Tensor)",
)
def inform(
    tokens: Tensor,
    size: Tensor | None,
    carry: Tensor | None,
    gain: Tensor | None,
    centroids: Tensor,
    offsets: Tensor,
    costs: Tensor,
    beta: float,
    eta: float,
    num_prefix: int,
) -> tuple[Tensor, Tensor]:
    """Logits of patches, one step down the gradient, `b n`; weights of all tokens, `b t`."""
    with torch.cuda.device_of(tokens):
        return _kernels().inform(
            tokens, size, carry, gain, centroids, offsets, costs, beta, eta, num_prefix
        )


@inform.register_fake
def _(tokens: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    b, t = tokens.shape[:2]
    logits = tokens.new_empty(b, t - arguments[-1], dtype=torch.float32)
    return logits, tokens.new_empty(b, t, dtype=torch.float32)


@torch.library.custom_op(
    "ltm::group_means",
    mutates_args=(),
    schema="(Tensor values, Tensor weight, Tensor assignment, int num_places) -> Tensor",
)
def group_means(values: Tensor, weight: Tensor, assignment: Tensor, num_places: int) -> Tensor:
    """What the patches that go to a place have on average, by weight, `b n -> b p`."""
    with torch.cuda.device_of(values):
        return _kernels().group_means(values, weight, assignment, num_places)


@group_means.register_fake
def _(values: Tensor, _weight: Any, assignment: Tensor, num_places: int) -> Tensor:
    num_prefix = assignment.shape[1] - values.shape[1]
    shape = (assignment.shape[0], num_places - num_prefix)
    return values.new_empty(shape, dtype=torch.float32)


@register_flop_formula(torch.ops.ltm.assign)
def _(tokens: list[int], *arguments: Any, **_: Any) -> int:
    (b, t, c), num_prefix = tokens, arguments[3]
    return 2 * b * (t - num_prefix) ** 2 * c


@register_flop_formula(torch.ops.ltm.mix)
def _(matrix: list[int], tokens: list[int], **_: Any) -> int:
    (p, t), (b, _t, c) = matrix, tokens
    return 2 * b * p * t * c


@register_flop_formula(torch.ops.ltm.merge_grid)
def _(tokens: list[int], weight: Any, rows: list[int], columns: list[int], **_: Any) -> int:
    (b, _t, c), (h, h2), (w, w2) = tokens, rows, columns
    return 2 * b * (h * h2 * w + h2 * w * w2) * (c + (weight is not None))


@register_flop_formula(torch.ops.ltm.importance)
def _(qkv: list[int], *_: Any, **__: Any) -> int:
    b, t, width = qkv
    return 2 * b * t * (width // 3)


@register_flop_formula(torch.ops.ltm.attention)
def _(qkv: list[int], *_: Any, **__: Any) -> int:
    b, t, width = qkv
    return 4 * b * t * t * (width // 3)


@register_flop_formula(torch.ops.ltm.inform)
def _(tokens: list[int], *arguments: Any, **_: Any) -> int:
    (b, t, c), num_prefix, num_classes = tokens, arguments[-1], arguments[3][0]
    return 4 * b * (t - num_prefix) * c + 2 * b * num_classes * (2 * c + num_classes)

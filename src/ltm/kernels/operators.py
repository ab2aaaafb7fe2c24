"""What Triton kernels do, as operators of torch.

As such they can be captured by CUDA graphs, compiled with the network around them, and counted.
`fused` says where they may run. A function here says what comes out, without values; the function
of the same name in `kernels` does the work.

Letters: b images, t tokens with their prefix, p tokens that stay, r tokens that leave, c channels,
h heads, d channels of a head.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# ruff: noqa: ARG001, PLR0917 - operators take their arguments in order, and their shapes need few
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import unwrap
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_LIBRARY = torch.library.Library("ltm", "DEF")
_P = ParamSpec("_P")
_R = TypeVar("_R")


@cache
def _kernel(name: str) -> Callable[..., Any]:
    """Imported when first used: kernels need Triton."""
    return getattr(import_module("ltm.kernels.triton"), name)


def _operator(shapes: Callable[_P, _R]) -> Callable[_P, _R]:
    """An operator from what is known of its output.

    `torch.library.custom_op` would do, and take three times as long to be called: it cares for
    gradients, which `fused` keeps away.
    """
    shapes = unwrap(shapes)  # a type checker around it would refuse symbolic numbers
    name = shapes.__name__

    def run(x: Tensor, *others: Any) -> Any:
        with torch.cuda.device_of(x):
            return _kernel(name)(x, *others)

    schema = torch.library.infer_schema(shapes, mutates_args=(), op_name=name)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ltm::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.ltm, name).default


@_operator
def assign(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    weight: Tensor | None,
    num_leaving: int,
    num_prefix: int,
    protection: float,
    power: float,
    least: float,
    prune: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The place of each token after the merge, `b t`; who stays, `b p`; who leaves, `b r`; weights.

    Those are the given ones, `b t`, or else the sizes, times the attention per patch, against an
    even share of it but not below `least`, to a power. With `prune`, who leaves weighs nothing.
    """
    return _places(tokens, num_leaving)


def _places(tokens: Tensor, num_leaving: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, t = tokens.shape[:2]
    return (
        tokens.new_empty(b, t, dtype=torch.int64),
        tokens.new_empty(b, t - num_leaving, dtype=torch.int32),
        tokens.new_empty(b, num_leaving, dtype=torch.int32),
        tokens.new_empty(b, t, dtype=torch.float32),
    )


@_operator
def inform_and_assign(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    carry: Tensor | None,
    gain: Tensor | None,
    centroids: Tensor,
    offsets: Tensor,
    costs: Tensor,
    beta: float,
    eta: float,
    num_leaving: int,
    num_prefix: int,
    protection: float,
    power: float,
    least: float,
    prune: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`assign` with the weights that `inform` would give, and its logits.

    In a CUDA graph for few images the gradient is found while pairs are compared.
    """
    return *_places(tokens, num_leaving), _logits(tokens, num_prefix)


def _logits(tokens: Tensor, num_prefix: int) -> Tensor:
    return tokens.new_empty(tokens.shape[0], tokens.shape[1] - num_prefix, dtype=torch.float32)


@_operator
def merge_groups(
    tokens: Tensor,
    weight: Tensor,
    size: Tensor | None,
    values: Tensor | None,
    assignment: Tensor,
    stays: Tensor,
    leaves: Tensor,
    keep_norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted means of groups, `b p c`, and the sums of their sizes, `b p`.

    With values of the patches, `b n`, their means by weight too, prefix left out; else nothing.
    """
    (b, t, c), p = tokens.shape, stays.shape[1]
    sizes = tokens.new_empty(b, p, dtype=torch.float32)
    if values is None:
        return tokens.new_empty(b, p, c), sizes, sizes.new_empty(0)
    return tokens.new_empty(b, p, c), sizes, sizes.new_empty(b, p - (t - values.shape[1]))


@_operator
def mix(matrix: Tensor, tokens: Tensor) -> Tensor:
    """The same product for every image, `p t` times `b t c`; further columns meet no token."""
    return tokens.new_empty(tokens.shape[0], matrix.shape[0], tokens.shape[2])


def widened(matrix: Tensor) -> Tensor:
    """A matrix for `mix` with columns of zeros: GPUs read rows of a multiple of 16 at once."""
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % 16))


@_operator
def merge_grid(tokens: Tensor, weight: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
    """Means by weight over rows and columns of a grid, or its plain product with both."""
    return tokens.new_empty(tokens.shape[0], rows.shape[1] * columns.shape[1], tokens.shape[2])


@_operator
def importance(
    qkv: Tensor, size: Tensor | None, num_heads: int, scale: float, power: float
) -> Tensor:
    """Attention received from the first token, a mean over heads, `b t (3 h d) -> b t`."""
    return qkv.new_empty(qkv.shape[:2], dtype=torch.float32)


@_operator
def attention(qkv: Tensor, size: Tensor, num_heads: int, scale: float, power: float) -> Tensor:
    """Attention to keys that count as often as their size says, `b t (3 h d) -> b t (h d)`."""
    b, t, width = qkv.shape
    return qkv.new_empty(b, t, width // 3)


@_operator
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
    return _logits(tokens, num_prefix), _logits(tokens, 0)


def _compared(tokens: list[int], num_prefix: int) -> int:
    b, t, c = tokens
    return 2 * b * (t - num_prefix) ** 2 * c


def _informed(tokens: list[int], num_prefix: int, num_classes: int) -> int:
    b, t, c = tokens
    return 4 * b * (t - num_prefix) * c + 2 * b * num_classes * (2 * c + num_classes)


@register_flop_formula(torch.ops.ltm.assign)
def _(tokens: list[int], *arguments: Any, **_: Any) -> int:
    return _compared(tokens, arguments[4])


@register_flop_formula(torch.ops.ltm.inform_and_assign)
def _(tokens: list[int], *arguments: Any, **_: Any) -> int:
    num_classes, num_prefix = arguments[4][0], arguments[10]
    return _compared(tokens, num_prefix) + _informed(tokens, num_prefix, num_classes)


@register_flop_formula(torch.ops.ltm.mix)
def _(matrix: list[int], tokens: list[int], **_: Any) -> int:
    (p, _wide), (b, t, c) = matrix, tokens
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
    return _informed(tokens, arguments[-1], arguments[3][0])

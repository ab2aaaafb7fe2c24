"""What Triton kernels do, as operators of torch.

As such they can be captured by CUDA graphs, compiled with the network around them, and counted.
`fused` says where they may run.

Letters: b images, t tokens with their prefix, p tokens that stay, r tokens that leave, c channels,
h heads, d channels of a head.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# ruff: noqa: PLR0917 - operators take their arguments in order
from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def _kernels() -> Any:
    """Imported when first used: they need Triton."""
    return import_module("ltm.core.kernels")


@torch.library.custom_op(
    "ltm::assign",
    mutates_args=(),
    schema="(Tensor tokens, Tensor? size, Tensor? attention, Tensor? weight, int num_leaving, "
    "int num_prefix, float protection, float power, float least, bool prune) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
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
    with torch.cuda.device_of(tokens):
        return _kernels().assign(
            tokens, size, attention, weight, num_leaving, num_prefix, protection, power, least,
            prune,
        )  # fmt: skip


@assign.register_fake
def _(
    tokens: Tensor, _size: Any, _attention: Any, _weight: Any, num_leaving: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _no_places(tokens, num_leaving)


def _no_places(tokens: Tensor, num_leaving: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `assign` gives, without values."""
    b, t = tokens.shape[:2]
    return (
        tokens.new_empty(b, t, dtype=torch.int64),
        tokens.new_empty(b, t - num_leaving, dtype=torch.int32),
        tokens.new_empty(b, num_leaving, dtype=torch.int32),
        tokens.new_empty(b, t, dtype=torch.float32),
    )


@torch.library.custom_op(
    "ltm::inform_and_assign",
    mutates_args=(),
    schema="(Tensor tokens, Tensor? size, Tensor? attention, Tensor? carry, Tensor? gain, "
    "Tensor centroids, Tensor offsets, Tensor costs, float beta, float eta, int num_leaving, "
    "int num_prefix, float protection, float power, float least, bool prune) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
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
    """`assign` with the weights of `inform`, and its logits.

    Neither waits for the other in a CUDA graph for few images.
    """
    with torch.cuda.device_of(tokens):
        return _kernels().inform_and_assign(
            tokens, size, attention, carry, gain, centroids, offsets, costs, beta, eta,
            num_leaving, num_prefix, protection, power, least, prune,
        )  # fmt: skip


@inform_and_assign.register_fake
def _(tokens: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_leaving, num_prefix = arguments[9:11]
    assigned = _no_places(tokens, num_leaving)
    logits = tokens.new_empty(tokens.shape[0], tokens.shape[1] - num_prefix, dtype=torch.float32)
    return *assigned, logits


@torch.library.custom_op(
    "ltm::merge_groups",
    mutates_args=(),
    schema="(Tensor tokens, Tensor weight, Tensor? size, Tensor? values, Tensor assignment, "
    "Tensor stays, Tensor leaves, bool keep_norm) -> (Tensor, Tensor, Tensor)",
)
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
    with torch.cuda.device_of(tokens):
        return _kernels().merge_groups(
            tokens, weight, size, values, assignment, stays, leaves, keep_norm
        )


@merge_groups.register_fake
def _(
    tokens: Tensor,
    _weight: Any,
    _size: Any,
    values: Tensor | None,
    _assignment: Any,
    stays: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    (b, t, c), p = tokens.shape, stays.shape[1]
    size = tokens.new_empty(b, p, dtype=torch.float32)
    if values is None:
        return tokens.new_empty(b, p, c), size, size.new_empty(0)
    return tokens.new_empty(b, p, c), size, size.new_empty(b, p - (t - values.shape[1]))


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
    return _informed(tokens, arguments[-1], arguments[3][0])

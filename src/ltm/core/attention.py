"""Proportional attention, in which a token counts by its size, and the attention tokens receive.

Letters: b images, t tokens with their prefix, h heads, d channels of a head, w = 3 h d the width of
queries, keys and values together.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# ruff: noqa: ARG001, PLR0917 - operators take their arguments in order, and shapes need few
from __future__ import annotations

import math
from collections.abc import Callable, Set as AbstractSet
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from ltm.kernels.dispatch import operator, uses_triton

_MAX_HEAD = 128
"""Kernels for wider heads would need more shared memory than GPUs have."""


@runtime_checkable
class SelfAttention(Protocol):
    """A layer of multi-head attention with one projection for queries, keys and values."""

    num_heads: int
    scale: float
    qkv: nn.Module
    proj: nn.Module
    proj_drop: nn.Module
    training: bool
    __call__: Callable[..., Tensor]


def attend(
    layer: SelfAttention,
    x: Float[Tensor, "b t c"],
    size: Float[Tensor, "_ t"] | None,
    power: float = 1.0,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "b t c"]:
    """The layer's output with tokens weighted by their size to a power.

    `mask` and `is_causal` are used if `size` is None.
    """
    if size is None:
        return layer(x, attn_mask=mask, is_causal=is_causal)
    learned = layer.qkv.parameters() if torch.is_grad_enabled() else ()
    narrow = cast("Any", layer).head_dim <= _MAX_HEAD
    if not (narrow and _is_softmax(layer) and uses_triton(x, *learned)):
        return layer(x, attn_mask=size_bias(size, x.dtype, power))
    attended = proportional(layer, layer.qkv(x), size, power)
    return layer.proj_drop(layer.proj(attended))


def has_kernel(layer: Any, x: Float[Tensor, "b t c"], head_dim: int) -> bool:
    """Whether `attend_sized` can replace a layer with heads this wide; hooks on it prevent that."""
    learned = layer.parameters() if torch.is_grad_enabled() else ()
    hooked = layer._forward_hooks or layer._forward_pre_hooks  # noqa: SLF001
    return head_dim <= _MAX_HEAD and not hooked and uses_triton(x, *learned)


def attend_sized(
    query: Float[Tensor, "b t h d"],
    key: Float[Tensor, "b t h d"],
    value: Float[Tensor, "b t h d"],
    size: Float[Tensor, "_ t"],
    scale: float,
    power: float = 1.0,
    rotation: Rotation | None = None,
) -> Float[Tensor, "b t c"]:
    """The output of the heads, by a kernel, with tokens weighted by size; turned if rotary."""
    if rotation is not None:
        query, key = turn(query, rotation), turn(key, rotation)
    return _attention_of(query.to(value.dtype), key.to(value.dtype), value, size, scale, power)


class Rotation(NamedTuple):
    """Rotary positions: the angles of each place, by which pairs of channels are turned."""

    sines: Float[Tensor, "i g n d"]
    """Per image, head and place; images and heads may share them."""
    cosines: Float[Tensor, "i g n d"]
    num_prefix: int
    """Tokens without a place, which come first and are not turned."""
    halves: bool
    """Channel c is paired with channel c + d / 2 instead of its neighbour."""
    positions: Int[Tensor, "b t"] | None = None
    """The place of each token, prefix included; None means all places in order."""

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Sines and cosines at the places of the tokens, `b g p d`."""
        if self.positions is None:
            return self.sines, self.cosines
        places = self.positions[:, None, self.num_prefix :, None] - self.num_prefix

        def at(angles: Tensor) -> Tensor:
            angles = angles.expand(places.shape[0], -1, -1, -1)
            return angles.gather(2, places.expand(-1, angles.shape[1], -1, angles.shape[3]))

        return at(self.sines), at(self.cosines)


def turn(x: Float[Tensor, "b t h d"], rotation: Rotation) -> Float[Tensor, "b t h d"]:
    """Turn queries or keys by the angles at the places of their tokens."""
    sines, cosines, num_prefix, halves, positions = rotation
    if uses_triton(x, sines):
        return _turned(x, sines, cosines, positions, num_prefix, halves)
    sines, cosines = (angles.transpose(1, 2) for angles in rotation.gathered())
    patches = x[:, num_prefix:]
    if halves:
        first, second = patches.chunk(2, dim=-1)
        across = torch.cat([-second, first], dim=-1)
    else:
        across = torch.stack([-patches[..., 1::2], patches[..., ::2]], dim=-1).flatten(-2)
    found = (patches * cosines + across * sines).to(x.dtype)
    return torch.cat([x[:, :num_prefix], found], dim=1)


def proportional(
    layer: SelfAttention, qkv: Float[Tensor, "b t w"], size: Float[Tensor, "_ t"], power: float
) -> Float[Tensor, "b t c"]:
    """The output of the layer's heads, by a kernel, from the output of its projection."""
    if _is_plain(layer):
        return _attention(qkv, size, layer.num_heads, layer.scale, power)
    query, key = queries_and_keys(layer, qkv)
    value = cast("Tensor", qkv.unflatten(-1, (3, layer.num_heads, -1)).unbind(2)[2])
    query, key = query.to(qkv.dtype), key.to(qkv.dtype)
    return _attention_of(query, key, value, size, layer.scale, power)


def attention_hints(
    layer: SelfAttention,
    qkv: Float[Tensor, "b t w"],
    size: Float[Tensor, "_ t"] | None,
    needs: AbstractSet[str],
    power: float = 1.0,
    *,
    class_token: bool,
) -> dict[str, Tensor]:
    """The hints that a merger needs, from the output of a layer's projection.

    keys: their mean over heads. importance: attention received from the class token, or from the
    mean query if there is none. attention: attention received from all tokens on average.
    """
    found: dict[str, Tensor] = {}
    if "importance" in needs:
        found["importance"] = importance(layer, qkv, size, power, class_token=class_token)
    if needs <= {"importance"}:
        return found
    query, key = queries_and_keys(layer, qkv)
    others = needs - {"importance"}
    return found | hints_of(query, key, layer.scale, size, others, power, class_token=class_token)


def hints_of(
    query: Float[Tensor, "b t h d"],
    key: Float[Tensor, "b t h d"],
    scale: float,
    size: Float[Tensor, "_ t"] | None,
    needs: AbstractSet[str],
    power: float = 1.0,
    *,
    class_token: bool,
    bias: Float[Tensor, "_ h t t"] | None = None,
    rotation: Rotation | None = None,
) -> dict[str, Tensor]:
    """The hints that a merger needs, from queries, keys and the bias on the scores.

    Hints hold the keys before they are turned.
    """
    found: dict[str, Tensor] = {}
    if "keys" in needs:
        found["keys"] = key.mean(dim=2)
    if rotation is not None and needs - {"keys"}:
        # The class token has no place, so its query is never turned.
        only_first = class_token and "attention" not in needs
        query, key = query if only_first else turn(query, rotation), turn(key, rotation)
    if "importance" in needs:
        asking = query[:, :1] if class_token else query.mean(dim=1, keepdim=True)
        offset = bias
        if bias is not None:
            offset = bias[:, :, :1] if class_token else bias.mean(dim=2, keepdim=True)
        found["importance"] = _received(asking, key, scale, size, power, offset)[:, 0]
    if "attention" in needs:
        received = _received(query, key, scale, size, power, bias)
        # Queries of tokens that are masked out do not count.
        asks = received.new_ones(1, received.shape[1]) if size is None else (size > 0).float()
        found["attention"] = ((asks / asks.sum(1, keepdim=True))[:, None] @ received)[:, 0]
    return found


def importance(
    layer: SelfAttention,
    qkv: Float[Tensor, "b t w"],
    size: Float[Tensor, "_ t"] | None,
    power: float = 1.0,
    *,
    class_token: bool,
) -> Float[Tensor, "b t"]:
    """Attention received from the class token, or from the mean query if there is none."""
    narrow = qkv.shape[2] <= 3 * layer.num_heads * _MAX_HEAD
    if narrow and _is_plain(layer) and uses_triton(qkv):
        return _importance(qkv, size, layer.num_heads, layer.scale, power, class_token)
    query, key = queries_and_keys(layer, qkv)
    only = {"importance"}
    return hints_of(query, key, layer.scale, size, only, power, class_token=class_token)[
        "importance"
    ]


def queries_and_keys(
    layer: Any, qkv: Float[Tensor, "b t w"]
) -> tuple[Float[Tensor, "b t h d"], Float[Tensor, "b t h d"]]:
    """Queries and keys with their norms, from the output of a layer's projection.

    Differential attention has two maps per head; each counts as a head here.
    """
    width = getattr(layer, "head_dim", qkv.shape[-1] // (3 * layer.num_heads))
    # In timm's order of dimensions, so that an exported graph has them only once.
    query, key, _ = qkv.unflatten(-1, (3, -1, width)).permute(2, 0, 3, 1, 4).unbind(0)
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    return (layer.q_norm(query), layer.k_norm(key)) if hasattr(layer, "k_norm") else (query, key)


def _received(
    query: Float[Tensor, "b q h d"],
    key: Float[Tensor, "b t h d"],
    scale: float,
    size: Float[Tensor, "_ t"] | None,
    power: float = 1.0,
    bias: Float[Tensor, "_ h q t"] | None = None,
) -> Float[Tensor, "b q t"]:
    """The attention that each token receives from each query, averaged over heads."""
    narrow = query.shape[1] == 1 and key.shape[3] <= _MAX_HEAD
    if narrow and bias is None and uses_triton(query, key):
        return _importance_of(query, key, size, scale, power)[:, None]
    scores = query.transpose(1, 2) @ key.permute(0, 2, 3, 1) * scale
    scores = scores if bias is None else scores + bias
    scores = scores if size is None else scores + size_bias(size, scores.dtype, power)
    return scores.float().softmax(dim=-1).mean(dim=1)


def size_bias(
    size: Float[Tensor, "_ t"], dtype: torch.dtype, power: float = 1.0
) -> Float[Tensor, "_ 1 1 t"]:
    """The bias of proportional attention: the log of the token sizes to a power.

    A token of size zero is masked out, whatever the power.
    """
    least = max(1e-10 ** (1 / power), 1e-35) if power > 0 else 1e-10
    bias = size.float().clamp_min(least).log()
    return (bias if power == 1 else power * bias).to(dtype)[:, None, None, :]


def _is_softmax(layer: Any) -> bool:
    """Whether nothing but the last projection follows the softmax, and the layer has no hooks."""
    drops = layer.training and layer.attn_drop.p > 0
    hooked = layer._forward_hooks or layer._forward_pre_hooks  # noqa: SLF001
    return not (drops or hooked) and _lacks(layer, "norm", "gate")


def _is_plain(layer: Any) -> bool:
    """Whether queries and keys are used as the projection gives them."""
    return _is_softmax(layer) and _lacks(layer, "q_norm", "k_norm")


def _lacks(layer: Any, *names: str) -> bool:
    layers = map(layer._modules.get, names)  # noqa: SLF001
    return all(y is None or isinstance(y, nn.Identity) for y in layers)


@operator
def _attention(qkv: Tensor, size: Tensor, num_heads: int, scale: float, power: float) -> Tensor:
    b, t, width = qkv.shape
    return qkv.new_empty(b, t, width // 3)


@operator
def _attention_of(
    query: Tensor, key: Tensor, value: Tensor, size: Tensor, scale: float, power: float
) -> Tensor:
    b, t, h, d = query.shape
    return query.new_empty(b, t, h * d)


@operator
def _turned(
    x: Tensor,
    sines: Tensor,
    cosines: Tensor,
    positions: Tensor | None,
    num_prefix: int,
    halves: bool,
) -> Tensor:
    return x.new_empty(x.shape)


@operator
def _importance_of(
    asking: Tensor, key: Tensor, size: Tensor | None, scale: float, power: float
) -> Tensor:
    return key.new_empty(key.shape[:2], dtype=torch.float32)


@operator
def _importance(
    qkv: Tensor,
    size: Tensor | None,
    num_heads: int,
    scale: float,
    power: float,
    class_token: bool,
) -> Tensor:
    return qkv.new_empty(qkv.shape[:2], dtype=torch.float32)


@register_flop_formula(torch.ops.ltm.attention)
def _(qkv: list[int], *_: Any, **__: Any) -> int:
    b, t, width = qkv
    return 4 * b * t * t * (width // 3)


@register_flop_formula(torch.ops.ltm.importance)
def _(qkv: list[int], *_: Any, **__: Any) -> int:
    b, t, width = qkv
    return 2 * b * t * (width // 3)


@register_flop_formula(torch.ops.ltm.attention_of)
def _(query: list[int], *_: Any, **__: Any) -> int:
    b, t, h, d = query
    return 4 * b * t * t * h * d


@register_flop_formula(torch.ops.ltm.importance_of)
def _(asking: list[int], key: list[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(key)

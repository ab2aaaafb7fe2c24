"""Eva: EVA-02, DINOv3, Perception Encoder and other ViTs with rotary positions.

Rotary positions turn queries and keys by angles, so a merged token needs a position. It takes that
of the token that stayed; `ANGLES` has other choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from timm.layers.attention import AttentionRope
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from torch import Tensor, nn

from ltm.adapters.base import register
from ltm.adapters.blocks import GammaMixin, HalvesMixin, PostNormMixin, SizedMixin, Tokens
from ltm.adapters.sequences import MergingSequenceModel, SequenceAdapter
from ltm.core.attention import Rotation, attend_sized, has_kernel, hints_of, size_bias


def _kept_angles(rope: Rotation, tokens: Tokens) -> Rotation:
    """The angles of the tokens that stayed."""
    return rope._replace(positions=tokens.positions)


def _mean_sines(rope: Rotation, tokens: Tokens) -> Rotation:
    """The mean sines and cosines of a group: its score is the mean of its members' scores."""
    assert tokens.positions is not None
    angles = torch.cat([rope.sines, rope.cosines], -1).expand(tokens.positions.shape[0], -1, -1, -1)
    flat = nn.functional.pad(angles.transpose(1, 2).flatten(2), (0, 0, rope.num_prefix, 0))
    for merge in tokens.merges:
        flat = merge.average(flat)
    flat = flat[:, rope.num_prefix :].unflatten(2, (angles.shape[1], -1)).transpose(1, 2)
    sines, cosines = flat.chunk(2, dim=-1)
    return rope._replace(sines=sines, cosines=cosines)


def _mean_angles(rope: Rotation, tokens: Tokens) -> Rotation:
    """The mean angles of a group, weighted as in the merge."""
    mean = _mean_sines(rope, tokens)
    length = torch.hypot(mean.sines, mean.cosines).clamp_min(1e-6)
    return mean._replace(sines=mean.sines / length, cosines=mean.cosines / length)


ANGLES: dict[str, Callable[[Rotation, Tokens], Rotation]] = {
    "kept": _kept_angles,
    "mean": _mean_angles,
    "mean_sines": _mean_sines,
}
"""The position that a merged token can take."""


class RotaryMixin(SizedMixin, HalvesMixin):
    """A block whose attention turns queries and keys by the positions of their tokens."""

    attn: Any
    needs_positions: ClassVar[bool] = True
    angles: ClassVar[str] = "kept"
    """One of `ANGLES`."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        tokens = self.entering(x)
        rotation = self.rotation(rope, tokens)

        def attend(y: Tensor) -> Tensor:
            masks = {"attn_mask": attn_mask, "is_causal": is_causal}
            return self.attend(y, rope, rotation, tokens, **masks)

        z = x + self.attended(x, attend)
        z, *_ = self.merge(z, tokens, rotation=rotation)
        return z + self.transformed(z)

    def rotation(self, rope: Tensor | None, tokens: Tokens) -> Rotation | None:
        """The angles of the tokens, at the positions that they take."""
        if rope is None:
            return None
        while rope.ndim < 4:  # timm has `n d`, or `heads n d`; dropping patches adds the batch
            rope = rope[None]
        layer = self.attn
        sines, cosines = rope.chunk(2, dim=-1)
        halves = getattr(layer, "rotate_half", False)
        whole = Rotation(sines, cosines, layer.num_prefix_tokens, halves)
        return ANGLES[self.angles](whole, tokens) if tokens.merges else whole

    def attend(
        self,
        x: Tensor,
        rope: Tensor | None,
        rotation: Rotation | None,
        tokens: Tokens,
        **masks: Any,
    ) -> Tensor:
        """The output of the attention, with tokens weighted by size."""
        layer, power = self.attn, self.slot.counting
        size = self.sizes(tokens, masks["attn_mask"], masks["is_causal"])
        if size is not None and _is_plain(layer) and has_kernel(layer, x, layer.head_dim):
            attended = attend_sized(*_projected(layer, x), size, layer.scale, power, rotation)
            return layer.proj_drop(layer.proj(layer.norm(attended)))
        if size is not None:
            masks["attn_mask"] = size_bias(size, x.dtype, power)
        if rotation is not None and tokens.merges:
            rope = torch.cat(rotation.gathered(), dim=-1)
        return layer(x, rope=rope, **masks)

    def look(
        self,
        query: Tensor,
        key: Tensor,
        size: Tensor | None,
        needs: frozenset[str],
        rotation: Rotation | None = None,
    ) -> dict[str, Tensor]:
        """The hints of a merger, from queries and keys `b heads t d`."""
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return hints_of(
            query.transpose(1, 2),
            key.transpose(1, 2),
            self.attn.scale,
            size,
            needs,
            self.slot.counting,
            class_token=self.class_token,
            rotation=rotation,
        )


def _is_plain(layer: Any) -> bool:
    """Whether the layer has only projections, norms and a softmax."""
    drops = layer.training and layer.attn_drop.p > 0
    groups = getattr(layer, "num_kv_groups", 1)
    return not drops and groups == 1 and getattr(layer, "gate", None) is None


def _projected(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, `b t heads d`."""
    if layer.qkv is None:
        parts = [projection(x) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)]
    elif getattr(layer, "q_bias", None) is None:
        parts = layer.qkv(x).chunk(3, dim=-1)
    else:
        bias = torch.cat([layer.q_bias, layer.k_bias, layer.v_bias])
        parts = nn.functional.linear(x, layer.qkv.weight, bias).chunk(3, dim=-1)
    query, key, value = (part.unflatten(-1, (layer.num_heads, -1)) for part in parts)
    # The norms may be recorded, so they are called with the layout that the layer uses.
    query, key = layer.q_norm(query.transpose(1, 2)), layer.k_norm(key.transpose(1, 2))
    return query.transpose(1, 2), key.transpose(1, 2), value


class MergingEvaBlock(GammaMixin, RotaryMixin, EvaBlock):
    """An `EvaBlock` that merges its attention output."""


class MergingEvaBlockPostNorm(PostNormMixin, RotaryMixin, EvaBlockPostNorm):
    """An `EvaBlockPostNorm` that merges its attention output."""


class MergingEva(MergingSequenceModel, Eva):
    """A converted `Eva`."""

    def _num_unpooled(self) -> int:
        return super()._num_unpooled() if self.attn_pool is None else 0


@register
class EvaAdapter(SequenceAdapter):
    """timm's `Eva`."""

    family: ClassVar[str] = "eva"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (Eva,)
    covers: ClassVar[str] = "EVA, EVA-02, DINOv3, Perception Encoder, rotary ViTs (timm Eva)"
    models: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {Eva: MergingEva}
    merging: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {
        EvaBlock: MergingEvaBlock,
        EvaBlockPostNorm: MergingEvaBlockPostNorm,
    }
    attention: ClassVar[tuple[type[nn.Module], ...]] = (EvaAttention, AttentionRope)

    def projections(self, block: Any) -> tuple[nn.Module, ...]:
        """The norms of queries and keys, which exist for every kind of projection."""
        return block.attn.q_norm, block.attn.k_norm

"""Eva: EVA-02, DINOv3, Perception Encoder and other ViTs with rotary positions.

Rotary positions are angles by which queries and keys are turned, so a merged token has to stand
somewhere. It stands where the token stood that stayed; `ANGLES` has the other choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from timm.layers.attention import AttentionRope
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from torch import Tensor, nn

from ltm.adapters.base import register
from ltm.adapters.blocks import SizedMixin, Tokens
from ltm.adapters.sequences import MergingSequenceModel, SequenceAdapter
from ltm.core.attention import Rotation, attend_sized, has_kernel, hints_of, size_bias, turn


def kept_angles(rope: Rotation, tokens: Tokens) -> Rotation:
    """Of the tokens that stayed."""
    return rope._replace(positions=tokens.positions)


def mean_sines(rope: Rotation, tokens: Tokens) -> Rotation:
    """The mean sines and cosines of a group: its score is the mean of its members' scores."""
    angles = torch.cat([rope.sines, rope.cosines], dim=-1).expand(len(_at(tokens)), -1, -1, -1)
    flat = nn.functional.pad(angles.transpose(1, 2).flatten(2), (0, 0, rope.num_prefix, 0))
    for merge in tokens.merges:
        flat = merge.average(flat)
    flat = flat[:, rope.num_prefix :].unflatten(2, (angles.shape[1], -1)).transpose(1, 2)
    sines, cosines = flat.chunk(2, dim=-1)
    return rope._replace(sines=sines, cosines=cosines)


def mean_angles(rope: Rotation, tokens: Tokens) -> Rotation:
    """The mean angles of a group, its members weighing as in the merge."""
    mean = mean_sines(rope, tokens)
    length = torch.hypot(mean.sines, mean.cosines).clamp_min(1e-6)
    return mean._replace(sines=mean.sines / length, cosines=mean.cosines / length)


def _at(tokens: Tokens) -> Tensor:
    assert tokens.positions is not None
    return tokens.positions


ANGLES: dict[str, Callable[[Rotation, Tokens], Rotation]] = {
    "kept": kept_angles,
    "mean": mean_angles,
    "mean_sines": mean_sines,
}
"""Where a merged token can stand."""


class RotaryMixin(SizedMixin):
    """A block whose attention turns queries and keys by the places of their tokens."""

    attn: Any
    needs_positions: ClassVar[bool] = True
    angles: ClassVar[str] = "kept"
    """One of `ANGLES`."""

    def turned(self, rope: Tensor | None, tokens: Tokens) -> Rotation | None:
        """The angles of the tokens that there are."""
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
        self, x: Tensor, rope: Tensor | None, tokens: Tokens, **masks: Any
    ) -> tuple[Tensor, Rotation | None]:
        """What the attention gives, and the angles that it used."""
        layer, power = self.attn, self.slot.counting
        size = self.sizes(tokens, masks["attn_mask"], masks["is_causal"])
        turned = self.turned(rope, tokens)
        if size is not None and _is_plain(layer) and has_kernel(layer, x, layer.head_dim):
            query, key, value = _projected(layer, x)
            if turned is not None:
                query, key = turn(query, turned), turn(key, turned)
            attended = attend_sized(query, key, value, size, layer.scale, power)
            return layer.proj_drop(layer.proj(layer.norm(attended))), turned
        if size is not None:
            masks["attn_mask"] = size_bias(size, x.dtype, power)
        if turned is not None and tokens.merges:
            rope = torch.cat(turned.gathered(), dim=-1)
        return layer(x, rope=rope, **masks), turned

    def look(
        self,
        query: Tensor,
        key: Tensor,
        size: Tensor | None,
        needs: frozenset[str],
        rope: Rotation | None = None,
    ) -> dict[str, Tensor]:
        """From queries and keys, `b heads t d`; keys are compared before they are turned."""
        content = key.mean(dim=1)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        needs_scores = needs - {"keys"}
        if rope is not None and needs_scores:
            # The class token has no place.
            only_first = self.class_token and needs_scores == {"importance"}
            query, key = query if only_first else turn(query, rope), turn(key, rope)
        found = hints_of(
            query,
            key,
            self.attn.scale,
            size,
            needs_scores,
            self.slot.counting,
            class_token=self.class_token,
        )
        return found | ({"keys": content} if "keys" in needs else {})


def _is_plain(layer: Any) -> bool:
    """Whether the layer is nothing but projections, norms and a softmax."""
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
    # The norms are recorded, in the layout in which the layer calls them.
    query, key = layer.q_norm(query.transpose(1, 2)), layer.k_norm(key.transpose(1, 2))
    return query.transpose(1, 2), key.transpose(1, 2), value


class MergingEvaBlock(RotaryMixin, EvaBlock):
    """An `EvaBlock` that merges its attention output."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        tokens = self.entering(x)
        masks = {"attn_mask": attn_mask, "is_causal": is_causal}
        attended, turned = self.attend(self.norm1(x), rope, tokens, **masks)
        z = x + self.drop_path1(_scaled(attended, self.gamma_1))
        z, *_ = self.merge(z, tokens, rope=turned)
        return z + self.drop_path2(_scaled(self.mlp(self.norm2(z)), self.gamma_2))


class MergingEvaBlockPostNorm(RotaryMixin, EvaBlockPostNorm):
    """An `EvaBlockPostNorm` that merges its attention output."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        tokens = self.entering(x)
        masks = {"attn_mask": attn_mask, "is_causal": is_causal}
        attended, turned = self.attend(x, rope, tokens, **masks)
        z = x + self.drop_path1(self.norm1(attended))
        z, *_ = self.merge(z, tokens, rope=turned)
        return z + self.drop_path2(self.norm2(self.mlp(z)))


def _scaled(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else gamma * x


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
        """The norms of queries and keys: all that every kind of projection passes through."""
        return block.attn.q_norm, block.attn.k_norm

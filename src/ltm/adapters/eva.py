"""Eva: EVA-02, DINOv3, Perception Encoder and other ViTs with rotary positions.

Rotary positions are angles by which queries and keys are turned, so a merged token has to stand
somewhere. It stands where the token stood that stayed; `ANGLES` has the other choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from timm.layers.attention import AttentionRope
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from torch import Tensor, nn

from ltm.adapters.base import register
from ltm.adapters.blocks import SizedMixin, Tokens
from ltm.adapters.sequences import MergingSequenceModel, SequenceAdapter
from ltm.core.attention import attend, hints_of


def kept_angles(rope: Tensor, tokens: Tokens, num_prefix: int) -> Tensor:
    """The sines and cosines of the tokens that stayed, `b heads p d`; heads may be one."""
    assert tokens.positions is not None
    places = tokens.positions[:, None, num_prefix:, None] - num_prefix
    rope = _per_image(rope, len(places))
    return rope.gather(2, places.expand(-1, rope.shape[1], -1, rope.shape[3]))


def mean_sines(rope: Tensor, tokens: Tokens, num_prefix: int) -> Tensor:
    """The mean sines and cosines of a group: its score is the mean of its members' scores."""
    assert tokens.positions is not None
    rope = _per_image(rope, len(tokens.positions))
    flat = nn.functional.pad(rope.transpose(1, 2).flatten(2), (0, 0, num_prefix, 0))
    for merge in tokens.merges:
        flat = merge.average(flat)
    return flat[:, num_prefix:].unflatten(2, (rope.shape[1], -1)).transpose(1, 2)


def mean_angles(rope: Tensor, tokens: Tokens, num_prefix: int) -> Tensor:
    """The mean angles of a group, its members weighing as in the merge."""
    sines, cosines = mean_sines(rope, tokens, num_prefix).chunk(2, dim=-1)
    length = torch.hypot(sines, cosines).clamp_min(1e-6)
    return torch.cat([sines / length, cosines / length], dim=-1)


def _per_image(rope: Tensor, batch: int) -> Tensor:
    """Angles as `b heads n d`. timm has `n d`, or `heads n d`; dropping patches adds the batch."""
    while rope.ndim < 4:
        rope = rope[None]
    return rope.expand(batch, -1, -1, -1)


ANGLES: dict[str, Callable[[Tensor, Tokens, int], Tensor]] = {
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

    def turned(self, rope: Tensor | None, tokens: Tokens) -> Tensor | None:
        """The angles of the tokens that there are."""
        if rope is None or not tokens.merges:
            return rope
        return ANGLES[self.angles](rope, tokens, self.attn.num_prefix_tokens)

    def attend(
        self, x: Tensor, rope: Tensor | None, tokens: Tokens, **masks: Any
    ) -> tuple[Tensor, Tensor | None]:
        """What the attention gives, and the angles that it used."""
        size = self.sizes(tokens, masks["attn_mask"], masks["is_causal"])
        rope = self.turned(rope, tokens)
        options = {"mask": masks["attn_mask"], "is_causal": masks["is_causal"], "rope": rope}
        return attend(self.attn, x, size, self.slot.counting, **options), rope

    def look(
        self,
        query: Tensor,
        key: Tensor,
        size: Tensor | None,
        needs: frozenset[str],
        rope: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """From queries and keys, `b heads t d`; keys are compared before they are turned."""
        layer = self.attn
        content = key.mean(dim=1)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        if rope is not None and needs != {"keys"}:
            query, key = (_turn(layer, x, rope) for x in (query, key))
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        found = hints_of(
            query,
            key,
            layer.scale,
            size,
            needs - {"keys"},
            self.slot.counting,
            class_token=self.class_token,
        )
        return found | ({"keys": content} if "keys" in needs else {})


def _turn(layer: Any, x: Tensor, rope: Tensor) -> Tensor:
    k, half = layer.num_prefix_tokens, getattr(layer, "rotate_half", False)
    turned = apply_rot_embed_cat(x[:, :, k:], rope, half=half)
    return torch.cat([x[:, :, :k], turned], dim=2).type_as(x)


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
        attended, rope = self.attend(self.norm1(x), rope, tokens, **masks)
        z = x + self.drop_path1(_scaled(attended, self.gamma_1))
        z, *_ = self.merge(z, tokens, rope=rope)
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
        attended, rope = self.attend(x, rope, tokens, **masks)
        z = x + self.drop_path1(self.norm1(attended))
        z, *_ = self.merge(z, tokens, rope=rope)
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

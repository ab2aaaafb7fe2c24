"""ViT, DeiT and DeiT-III: merge between attention and MLP, prefix tokens untouched.

Blocks with attention and MLP in parallel merge their output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from timm.layers.attention import Attention
from timm.layers.diff_attention import DiffAttention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import (
    Block as HostBlock,
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch import Tensor, nn

from ltm.adapters.base import register
from ltm.adapters.blocks import HalvesMixin, PostNormMixin, PreNormMixin, SizedMixin
from ltm.adapters.sequences import MergingSequenceModel, SequenceAdapter
from ltm.core.attention import attend, attention_hints, hints_of, size_bias


class SequentialMixin(SizedMixin, HalvesMixin):
    """A block that runs attention, then the MLP."""

    looks_aside: ClassVar[bool] = True

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        tokens = self.entering(x)
        size, power = self.sizes(tokens, attn_mask, is_causal), self.slot.counting

        def attend_by(y: Tensor, layer: Any = None) -> Tensor:
            layer = self.layers()[0] if layer is None else layer
            return attend(layer, y, size, power, mask=attn_mask, is_causal=is_causal)

        z = x + self.attended(x, attend_by)
        z, *_ = self.merge(z, tokens)
        return z + self.transformed(z)

    def layers(self) -> tuple[Any, ...]:
        """The layers of attention, in the order of their projections."""
        return (cast("Any", self).attn,)

    def look(self, *given: Any, **context: Any) -> dict[str, Tensor]:
        """The hints of a merger; those of several layers of attention are averaged."""
        *projected, size, needs = given
        power, first = self.slot.counting, self.class_token
        found = [
            attention_hints(layer, qkv, size, needs, power, class_token=first)
            for layer, qkv in zip(self.layers(), projected, strict=True)
        ]
        if len(found) == 1:
            return found[0]
        return {name: torch.stack([hints[name] for hints in found]).mean(0) for name in found[0]}


class MergingBlock(PreNormMixin, SequentialMixin, HostBlock):
    """A ViT block that merges its attention output: the paper's block for regular transformers."""


class MergingResPostBlock(PostNormMixin, SequentialMixin, ResPostBlock):
    """A block with post-normalisation."""


class MergingParallelThingsBlock(SequentialMixin, ParallelThingsBlock):
    """A block of several parallel layers of attention, then several parallel MLPs."""

    def layers(self) -> tuple[Any, ...]:
        return tuple(cast("Any", half).attn for half in self.attns)

    def attended(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        halves = cast("list[Any]", list(self.attns))
        outs = [half.drop_path(half.ls(attend(half.norm(x), half.attn))) for half in halves]
        return torch.stack(outs).sum(dim=0)

    def transformed(self, z: Tensor) -> Tensor:
        return torch.stack([half(z) for half in self.ffns]).sum(dim=0)


class ParallelMixin(SizedMixin):
    """A block with attention and MLP in parallel: it merges the sum of their outputs."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        tokens = self.entering(x)
        size = self.sizes(tokens, attn_mask, is_causal)
        mask = attn_mask if size is None else size_bias(size, x.dtype, self.slot.counting)
        z, *_ = self.merge(super().forward(x, mask, is_causal), tokens)  # pyright: ignore[reportAttributeAccessIssue]
        return z

    def look(
        self, projected: Tensor, size: Tensor | None, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        host, power, first = cast("Any", self), self.slot.counting, self.class_token
        _, query, key, _ = projected.split(host.in_split, dim=-1)
        query = host.q_norm(query.unflatten(-1, (-1, host.head_dim)))
        key = host.k_norm(key.unflatten(-1, (-1, host.head_dim)))
        return hints_of(query, key, host.scale, size, needs, power, class_token=first)


class MergingParallelScalingBlock(ParallelMixin, ParallelScalingBlock):
    """A block of ViT-22B."""


class MergingDiffParallelScalingBlock(ParallelMixin, DiffParallelScalingBlock):
    """A block of ViT-22B with differential attention."""


class MergingVisionTransformer(MergingSequenceModel, VisionTransformer):
    """A converted `VisionTransformer`."""


class MergingVisionTransformerDistilled(MergingSequenceModel, VisionTransformerDistilled):
    """A converted distilled DeiT."""


@register
class ViTAdapter(SequenceAdapter):
    """timm's `VisionTransformer`."""

    family: ClassVar[str] = "vit"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (VisionTransformer,)
    covers: ClassVar[str] = "ViT, DeiT, DeiT-III (timm VisionTransformer)"
    models: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {
        VisionTransformer: MergingVisionTransformer,
        VisionTransformerDistilled: MergingVisionTransformerDistilled,
    }
    merging: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {
        HostBlock: MergingBlock,
        ResPostBlock: MergingResPostBlock,
        ParallelThingsBlock: MergingParallelThingsBlock,
        ParallelScalingBlock: MergingParallelScalingBlock,
        DiffParallelScalingBlock: MergingDiffParallelScalingBlock,
    }
    attention: ClassVar[tuple[type[nn.Module], ...]] = (Attention, DiffAttention)

    def attentions(self, block: Any) -> tuple[nn.Module, ...]:
        if isinstance(block, ParallelThingsBlock):
            return tuple(cast("Any", half).attn for half in block.attns)
        return () if isinstance(block, _PARALLEL) else (block.attn,)

    def projections(self, block: Any) -> tuple[nn.Module, ...]:
        return (block.in_proj,) if isinstance(block, _PARALLEL) else super().projections(block)


_PARALLEL = (ParallelScalingBlock, DiffParallelScalingBlock)

"""ViT, DeiT and DeiT-III: merge between attention and MLP, prefix tokens untouched."""

from __future__ import annotations

from typing import Any, ClassVar

from timm.layers.attention import Attention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block as HostBlock, VisionTransformer
from torch import Tensor, nn

from ltm.adapters.base import register
from ltm.adapters.blocks import MergingMixin
from ltm.adapters.sequences import MergingSequenceModel, SequenceAdapter
from ltm.core.attention import attend, attention_hints


class MergingBlock(MergingMixin, HostBlock):
    """A ViT block that merges its attention output: the paper's block for regular transformers."""

    attn: Any
    class_token: bool
    """Whether the first token is one; there may be registers without it."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        tokens = self.entering(x)
        if (attn_mask is not None or is_causal) and tokens.merges:
            raise ValueError("attn_mask: masks of the original tokens do not fit merged ones.")
        size = tokens.size if self.slot.proportional else None
        attended = attend(
            self.attn, self.norm1(x), size, self.slot.counting, mask=attn_mask, is_causal=is_causal
        )
        z = x + self.drop_path1(self.ls1(attended))
        z, *_ = self.merge(z, tokens)
        return z + self.drop_path2(self.ls2(self.mlp(self.norm2(z))))

    def look(self, qkv: Tensor, size: Tensor | None, needs: frozenset[str]) -> dict[str, Tensor]:
        return attention_hints(
            self.attn, qkv, size, needs, self.slot.counting, class_token=self.class_token
        )


class MergingVisionTransformer(MergingSequenceModel, VisionTransformer):
    """A converted `VisionTransformer`."""


class MergingVisionTransformerDistilled(MergingSequenceModel, VisionTransformerDistilled):
    """A converted distilled DeiT."""


@register
class ViTAdapter(SequenceAdapter):
    """timm's `VisionTransformer` with plain pre-norm blocks."""

    family: ClassVar[str] = "vit"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (VisionTransformer,)
    covers: ClassVar[str] = "ViT, DeiT, DeiT-III (timm VisionTransformer with plain blocks)"
    models: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {
        VisionTransformer: MergingVisionTransformer,
        VisionTransformerDistilled: MergingVisionTransformerDistilled,
    }
    merging: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {HostBlock: MergingBlock}
    attention: ClassVar[tuple[type[nn.Module], ...]] = (Attention,)

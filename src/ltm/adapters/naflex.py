"""NaFlexVit: images of different sizes and aspect ratios in one batch, padded to the longest.

A budget holds at the default size. Padding has size zero: it leaves first, and no token merges with
it. Until the first merge timm's own mask covers it, after that the token sizes do.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block as HostBlock
from torch import Tensor, nn

from ltm.adapters.base import register
from ltm.adapters.blocks import SizedMixin, Tokens
from ltm.adapters.eva import MergingEvaBlock
from ltm.adapters.sequences import MergingSequenceModel, SequenceAdapter
from ltm.adapters.vit import MergingBlock
from ltm.core.schedule import Grid


class PaddedMixin(SizedMixin):
    """A block whose tokens may be padding."""

    def sizes(self, tokens: Tokens, mask: Tensor | None, is_causal: bool) -> Tensor | None:
        if not tokens.merges or tokens.size is None:
            return None
        return tokens.size if self.slot.proportional else (tokens.size > 0).float()

    def merge(self, z: Tensor, tokens: Tokens, **context: Any) -> Any:
        """Set padding to zero first, because methods that keep norms would use its norm."""
        padded = tokens.size is not None and tokens.patches is None
        if padded and self.merger is not None:
            z = z.masked_fill((cast("Tensor", tokens.size) <= 0)[..., None], 0.0)
        return super().merge(z, tokens, padded=padded, **context)

    def look(self, *given: Any, padded: bool = False, **context: Any) -> dict[str, Tensor]:
        found, size = super().look(*given, **context), given[-2]
        if padded and "keys" in found:
            found["keys"] = _apart(found["keys"], size)
        return found


def _apart(keys: Tensor, size: Tensor) -> Tensor:
    """Keys with padding set apart, so that its cosine with any token is the smallest.

    The cosines between tokens keep their order. An extra channel is 1 for padding, which is zero
    elsewhere, and -1 for tokens.
    """
    padding = (size <= 0).expand(keys.shape[0], -1)[..., None]
    keys = nn.functional.normalize(keys, dim=-1).masked_fill(padding, 0.0)
    return torch.cat([keys, padding.to(keys.dtype) * 2 - 1], dim=-1)


class MergingNaFlexBlock(PaddedMixin, MergingBlock):
    """A plain block of a `NaFlexVit`."""


class MergingNaFlexRotaryBlock(PaddedMixin, MergingEvaBlock):
    """A block of a `NaFlexVit` with rotary positions."""


class MergingNaFlexVit(MergingSequenceModel, NaFlexVit):
    """A converted `NaFlexVit`."""

    def _patches(self, images: Any) -> Grid | None:
        if isinstance(images, dict) or images.ndim != 4:
            return None
        return cast("Any", self.embeds).dynamic_feat_size(images.shape[-2:])

    def _forward_embeds(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Timm's own; padding gets size zero."""
        given = options.get("attn_mask")
        merging = any(getattr(block, "merger", None) is not None for block in self.blocks)
        if given is not None and merging and self._last_slot().state.merging:
            raise ValueError("attn_mask: masks of the original tokens do not fit merged ones.")
        embeds = super()._forward_embeds(*args, **options)
        valid = embeds["patch_valid"]
        if valid is not None:
            size = nn.functional.pad(valid.float(), (self.num_prefix_tokens, 0), value=1.0)
            self._last_slot().state.frame.size = size
        return embeds

    def _tokens_in(self, features: Any) -> Tensor:
        return features["patches"] if isinstance(features, dict) else features

    def forward_features(self, patches: Tensor, *args: Any, **options: Any) -> Any:
        """Timm's own; `patch_valid` says which of the merged tokens are not padding."""
        features = super().forward_features(patches, *args, **options)
        slot = self._last_slot()
        tokens = slot.state.left_by(slot.index)
        if isinstance(features, dict) and tokens.merges and tokens.size is not None:
            size = tokens.size.expand(features["patches"].shape[0], -1)
            features["patch_valid"] = size[:, self.num_prefix_tokens :] > 0
        return features

    def _pool(
        self, x: Tensor, pool_type: str | None = None, patch_valid: Tensor | None = None
    ) -> Tensor:
        pooled = self._pooled(x, pool_type)
        return super()._pool(x, pool_type, patch_valid) if pooled is None else pooled


@register
class NaFlexAdapter(SequenceAdapter):
    """timm's `NaFlexVit`."""

    family: ClassVar[str] = "naflexvit"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (NaFlexVit,)
    covers: ClassVar[str] = "NaFlexVit (timm naflexvit_*)"
    models: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {NaFlexVit: MergingNaFlexVit}
    merging: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {
        HostBlock: MergingNaFlexBlock,
        EvaBlock: MergingNaFlexRotaryBlock,
    }
    attention: ClassVar[tuple[type[nn.Module], ...]] = (Attention, EvaAttention, AttentionRope)

    def embedding(self, host: Any) -> Any:
        return host.embeds

    def has_class_token(self, host: Any) -> bool:
        return host.embeds.cls_token is not None

    def projections(self, block: Any) -> tuple[nn.Module, ...]:
        if isinstance(block, EvaBlock):
            return block.attn.q_norm, block.attn.k_norm
        return (block.attn.qkv,)

"""DINOv3 of transformers: its positions are angles by which queries and keys are turned.

A merged token stands where the token stood that stayed.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3

from ltm.adapters.base import register
from ltm.adapters.blocks import Tokens
from ltm.adapters.transformers.dinov2 import MergingDinoLayer
from ltm.adapters.transformers.towers import MergingLayer, TowerAdapter

_Angles = tuple[Tensor, Tensor]
"""Cosines and sines."""


class MergingRotaryLayer(MergingDinoLayer):
    """A layer of DINOv3."""

    needs_positions: ClassVar[bool] = True

    def context(self, tokens: Tokens, options: dict[str, Any]) -> dict[str, Any]:
        angles: _Angles = options["position_embeddings"]
        if tokens.positions is not None:
            before = tokens.positions.shape[1] - tokens.merges[-1].num_out
            places = tokens.positions[:, before:] - before
            angles = (angles[0][places][:, None], angles[1][places][:, None])
        return {"position_embeddings": angles}

    def compared(
        self, query: Tensor, key: Tensor, *, position_embeddings: _Angles, **context: Any
    ) -> tuple[Tensor, Tensor]:
        turned = dinov3.apply_rotary_pos_emb(
            query.transpose(1, 2), key.transpose(1, 2), *position_embeddings
        )
        return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


@register
class DINOv3TowerAdapter(TowerAdapter):
    """It comes without a classifier."""

    family: ClassVar[str] = "transformers-dinov3"
    covers: ClassVar[str] = "DINOv3 ViT (transformers)"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (dinov3.DINOv3ViTModel,)
    layers: ClassVar[tuple[type[nn.Module], ...]] = (dinov3.DINOv3ViTLayer,)
    layer: ClassVar[type[MergingLayer]] = MergingRotaryLayer

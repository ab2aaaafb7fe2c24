"""DINOv3 of transformers: its positions are angles by which queries and keys are turned.

A merged token stands where the token stood that stayed.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3

from ltm.adapters.base import register
from ltm.adapters.blocks import Tokens
from ltm.adapters.transformers.dinov2 import MergingDinoLayer
from ltm.adapters.transformers.towers import MergingLayer, TowerAdapter
from ltm.core.attention import Rotation


class MergingRotaryLayer(MergingDinoLayer):
    """A layer of DINOv3."""

    needs_positions: ClassVar[bool] = True

    def rotation(self, tokens: Tokens, options: dict[str, Any]) -> Rotation:
        cosines, sines = options["position_embeddings"]
        angles = sines[None, None], cosines[None, None]
        return Rotation(*angles, self.num_prefix, halves=True, positions=tokens.positions)


@register
class DINOv3TowerAdapter(TowerAdapter):
    """It comes without a classifier."""

    family: ClassVar[str] = "transformers-dinov3"
    covers: ClassVar[str] = "DINOv3 ViT (transformers)"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (dinov3.DINOv3ViTModel,)
    layers: ClassVar[tuple[type[nn.Module], ...]] = (dinov3.DINOv3ViTLayer,)
    layer: ClassVar[type[MergingLayer]] = MergingRotaryLayer

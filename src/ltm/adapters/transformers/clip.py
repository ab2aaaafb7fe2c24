"""The vision tower of CLIP in transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from transformers.models.clip import modeling_clip as clip

from ltm.adapters.base import register
from ltm.adapters.transformers.towers import MergingLayer, TowerAdapter


class MergingEncoderLayer(MergingLayer):
    """A layer of CLIP or SigLIP."""

    def self_attention(self) -> Any:
        return cast("Any", self).self_attn

    def attended(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        host = cast("Any", self)
        return attend(host.layer_norm1(x))

    def transformed(self, z: Tensor) -> Tensor:
        host = cast("Any", self)
        return host.mlp(host.layer_norm2(z))


@register
class CLIPTowerAdapter(TowerAdapter):
    """Alone, with its projection, or with a classifier on the mean of its patch tokens."""

    family: ClassVar[str] = "transformers-clip"
    covers: ClassVar[str] = "CLIP's vision tower (transformers)"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (clip.CLIPVisionModel,)
    layers: ClassVar[tuple[type[nn.Module], ...]] = (clip.CLIPEncoderLayer,)
    layer: ClassVar[type[MergingLayer]] = MergingEncoderLayer
    heads: ClassVar[tuple[type[nn.Module], ...]] = (clip.CLIPVisionModelWithProjection,)
    mean_pooled: ClassVar[tuple[type[nn.Module], ...]] = (clip.CLIPForImageClassification,)

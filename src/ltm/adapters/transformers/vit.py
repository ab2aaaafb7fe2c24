"""ViT and DeiT of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from transformers.models.deit import modeling_deit as deit
from transformers.models.vit import modeling_vit as vit

from ltm.adapters.base import register
from ltm.adapters.transformers.towers import MergingLayer, TowerAdapter


class MergingViTLayer(MergingLayer):
    """A layer of ViT or DeiT."""

    def attended(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        host = cast("Any", self)
        return host.dropout(attend(host.layernorm_before(x)))

    def transformed(self, z: Tensor) -> Tensor:
        host = cast("Any", self)
        return host.dropout(host.mlp(host.layernorm_after(z)))


@register
class ViTTowerAdapter(TowerAdapter):
    """Their heads read the class token."""

    family: ClassVar[str] = "transformers-vit"
    covers: ClassVar[str] = "ViT and DeiT (transformers)"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (vit.ViTModel, deit.DeiTModel)
    layers: ClassVar[tuple[type[nn.Module], ...]] = (vit.ViTLayer, deit.DeiTLayer)
    layer: ClassVar[type[MergingLayer]] = MergingViTLayer
    heads: ClassVar[tuple[type[nn.Module], ...]] = (
        vit.ViTForImageClassification,
        deit.DeiTForImageClassification,
        deit.DeiTForImageClassificationWithTeacher,
    )

"""DINOv2 of transformers, with registers or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from transformers.models.dinov2 import modeling_dinov2 as dinov2
from transformers.models.dinov2_with_registers import (
    modeling_dinov2_with_registers as with_registers,
)

from ltm.adapters.base import register
from ltm.adapters.transformers.towers import MergingLayer, TowerAdapter


class MergingDinoLayer(MergingLayer):
    """A layer of DINOv2 or DINOv3."""

    def attended(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        host = cast("Any", self)
        return host.drop_path(host.layer_scale1(attend(host.norm1(x))))

    def transformed(self, z: Tensor) -> Tensor:
        host = cast("Any", self)
        return host.drop_path(host.layer_scale2(host.mlp(host.norm2(z))))


@register
class Dinov2TowerAdapter(TowerAdapter):
    """Its classifiers read the class token and the mean of the patch tokens."""

    family: ClassVar[str] = "transformers-dinov2"
    covers: ClassVar[str] = "DINOv2, with registers or without (transformers)"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (
        dinov2.Dinov2Model,
        with_registers.Dinov2WithRegistersModel,
    )
    layers: ClassVar[tuple[type[nn.Module], ...]] = (
        dinov2.Dinov2Layer,
        with_registers.Dinov2WithRegistersLayer,
    )
    layer: ClassVar[type[MergingLayer]] = MergingDinoLayer
    mean_pooled: ClassVar[tuple[type[nn.Module], ...]] = (
        dinov2.Dinov2ForImageClassification,
        with_registers.Dinov2WithRegistersForImageClassification,
    )
    reads_class_token: ClassVar[bool] = True

"""The vision tower of SigLIP in transformers, whose head pools by attention."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from transformers.models.siglip import modeling_siglip as siglip

from ltm.adapters.base import register
from ltm.adapters.transformers.clip import MergingEncoderLayer
from ltm.adapters.transformers.towers import MergingLayer, TowerAdapter


@register
class SiglipTowerAdapter(TowerAdapter):
    """Alone, or with a classifier on the mean of its tokens."""

    family: ClassVar[str] = "transformers-siglip"
    covers: ClassVar[str] = "SigLIP's vision tower (transformers)"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (siglip.SiglipVisionModel,)
    layers: ClassVar[tuple[type[nn.Module], ...]] = (siglip.SiglipEncoderLayer,)
    layer: ClassVar[type[MergingLayer]] = MergingEncoderLayer
    mean_pooled: ClassVar[tuple[type[nn.Module], ...]] = (siglip.SiglipForImageClassification,)

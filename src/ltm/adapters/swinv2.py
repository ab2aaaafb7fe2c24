"""Swin V2, Microsoft's and Christoph Reich's: cosine attention, an MLP for positions, post-norm."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Block
from timm.models.swin_transformer_v2_cr import SwinTransformerV2Cr, SwinTransformerV2CrBlock
from torch import Tensor, nn

from ltm.adapters.base import register
from ltm.adapters.blocks import PostNormMixin, Slot, run_projection_
from ltm.adapters.grids import MergingGridModel
from ltm.adapters.swin import WindowAdapter, WindowedMixin, relative_index
from ltm.core.attention import hints_of, queries_and_keys
from ltm.core.schedule import Grid
from ltm.methods.base import MethodConfig


class CosineMixin(PostNormMixin, WindowedMixin):
    """A block with cosine attention and post-normalisation."""

    def window_hints(
        self, qkv: Tensor, real: Tensor | None, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        query, key = queries_and_keys(self.attn, qkv)
        scale = self.attn.logit_scale.clamp(max=math.log(100.0)).exp().reshape(-1, 1)
        found = {"keys": key.mean(dim=2)} if "keys" in needs else {}
        query, key = F.normalize(query, dim=-1) * scale, F.normalize(key, dim=-1)
        return found | hints_of(query, key, 1.0, real, needs - {"keys"}, class_token=False)


class MergingSwinV2Block(CosineMixin, SwinTransformerV2Block):
    """A block of Swin V2."""


class MergingSwinV2CrBlock(CosineMixin, SwinTransformerV2CrBlock):
    """A block of Christoph Reich's Swin V2; some end with an extra norm."""

    def host_attention(self, x: Tensor) -> Tensor:
        return self._shifted_window_attn(x)

    def ended(self, out: Tensor) -> Tensor:
        return self.norm3(out)


class MergingSwinV2(MergingGridModel, SwinTransformerV2):
    """A converted `SwinTransformerV2`."""


class MergingSwinV2Cr(MergingGridModel, SwinTransformerV2Cr):
    """A converted `SwinTransformerV2Cr`."""


@register
class SwinV2Adapter(WindowAdapter):
    """timm's `SwinTransformerV2`."""

    family: ClassVar[str] = "swinv2"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (SwinTransformerV2Block,)
    covers: ClassVar[str] = "Swin V2 (timm SwinTransformerV2)"
    models: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {SwinTransformerV2: MergingSwinV2}
    merging: ClassVar[type[nn.Module]] = MergingSwinV2Block

    def fitted(self, window: Grid, host: Grid) -> dict[str, Any]:
        return {"window_size": window, "relative_position_index": relative_index(window, host)}

    def _convert_block_(
        self, block: Any, config: MethodConfig, slot: Slot, grid: Grid | None
    ) -> None:
        super()._convert_block_(block, config, slot, grid)
        if block.merger is not None and block.merger.needs:
            run_projection_(slot, block.attn)


@register
class SwinV2CrAdapter(WindowAdapter):
    """timm's `SwinTransformerV2Cr`."""

    family: ClassVar[str] = "swinv2-cr"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (SwinTransformerV2CrBlock,)
    covers: ClassVar[str] = "Swin V2 by Christoph Reich (timm SwinTransformerV2Cr)"
    models: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {
        SwinTransformerV2Cr: MergingSwinV2Cr
    }
    merging: ClassVar[type[nn.Module]] = MergingSwinV2CrBlock

    def fitted(self, window: Grid, host: Grid) -> dict[str, Any]:
        return {"window_size": window, "relative_coordinates_log": _log_distances(window)}


def _log_distances(window: Grid) -> Tensor:
    """The inputs of the MLP that makes the bias of each pair: log distances in patches."""
    sides = (torch.arange(side, dtype=torch.float32) for side in window)
    places = torch.cartesian_prod(*sides)
    apart = (places[:, None] - places[None]).reshape(-1, 2)
    return apart.sign() * (1 + apart.abs()).log()

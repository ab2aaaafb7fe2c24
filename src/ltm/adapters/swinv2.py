"""Swin V2, Microsoft's and Christoph Reich's: cosine attention, positions by an MLP, post norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Block
from timm.models.swin_transformer_v2_cr import SwinTransformerV2Cr, SwinTransformerV2CrBlock
from torch import Tensor, nn

from ltm.adapters.base import register
from ltm.adapters.blocks import Slot
from ltm.adapters.grids import MergingGridModel
from ltm.adapters.swin import WindowAdapter, WindowedMixin, relative_index
from ltm.core.attention import hints_of, queries_and_keys
from ltm.core.schedule import Grid
from ltm.methods.base import MethodConfig


class CosineMixin(WindowedMixin):
    """A block whose attention compares directions, and which normalises what its halves give."""

    norm1: Any
    norm2: Any
    mlp: Any
    drop_path1: Any
    drop_path2: Any

    def attended(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        return self.drop_path1(self.norm1(attend(x)))

    def transformed(self, z: Tensor) -> Tensor:
        return z + self.drop_path2(self.norm2(self.mlp(z)))

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
    """A block of Christoph Reich's Swin V2; some end with a norm more."""

    def host_attention(self, x: Tensor) -> Tensor:
        return self._shifted_window_attn(x)

    def transformed(self, z: Tensor) -> Tensor:
        return self.norm3(super().transformed(z))


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
            # Otherwise timm reads the weights of the projection and never runs it. It adds the bias
            # in place, so what is recorded has it.
            slot.original["qkv_bias_separate"] = block.attn.qkv_bias_separate
            block.attn.qkv_bias_separate = True


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
    """From which the MLP makes the bias of each pair: they do not depend on the window's size."""
    sides = (torch.arange(side, dtype=torch.float32) for side in window)
    places = torch.cartesian_prod(*sides)
    apart = (places[:, None] - places[None]).reshape(-1, 2)
    return apart.sign() * (1 + apart.abs()).log()

"""MobileViT: transformer layers merge patches, and the block's shortcut is merged alike.

A token is a patch of a few pixels, which share one mask: a merge treats them as one wide token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from timm.models.byobnet import ByobNet
from timm.models.mobilevit import MobileVitBlock
from timm.models.vision_transformer import Block as HostBlock
from torch import Tensor, nn

from ltm.adapters.base import Block, Layout, Run, observed_shapes, register
from ltm.adapters.blocks import (
    PreNormMixin,
    Tokens,
    TokenState,
    become_,
    convert_block_,
    make_slots,
    revert_block_,
)
from ltm.adapters.grids import GridAdapter, MergingGridModel, stretch
from ltm.core.attention import attend, attention_hints
from ltm.core.merge import restore_through
from ltm.core.schedule import Grid
from ltm.methods.base import MethodConfig, Site

_EVEN = 2
"""Sides of merged grids are multiples of this, since the next stage halves them."""


def _pixels_to_patches(x: Tensor, area: int) -> Tensor:
    """`(b a) n c -> b n (a c)`: the pixels of a patch side by side."""
    return x.unflatten(0, (-1, area)).transpose(1, 2).flatten(2)


def _patches_to_pixels(x: Tensor, area: int) -> Tensor:
    """`b n (a c) -> (b a) n c`, the inverse of `_pixels_to_patches`."""
    return x.unflatten(2, (area, -1)).transpose(1, 2).flatten(0, 1)


def _unfold(x: Tensor, patch: Grid) -> Tensor:
    """`b c h w -> (b a) n c`: one sequence per pixel of a patch, patches in raster order."""
    b, c, h, w = x.shape
    x = x.reshape(b, c, h // patch[0], patch[0], w // patch[1], patch[1])
    return x.permute(0, 3, 5, 2, 4, 1).reshape(b * patch[0] * patch[1], -1, c)


def _fold(x: Tensor, patch: Grid, grid: Grid) -> Tensor:
    """`(b a) n c -> b c h w`, the inverse of `_unfold` for a grid of patches."""
    c = x.shape[2]
    x = x.reshape(-1, patch[0], patch[1], grid[0], grid[1], c)
    return x.permute(0, 5, 3, 1, 4, 2).reshape(-1, c, grid[0] * patch[0], grid[1] * patch[1])


class MergingLayer(PreNormMixin, HostBlock):
    """A transformer layer inside a MobileViT block."""

    attn: Any
    area: int

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        tokens = self.entering(x)
        size = self.of_pixels(tokens.size) if self.slot.proportional else None

        def attend_by_size(y: Tensor) -> Tensor:
            return attend(self.attn, y, size, mask=attn_mask, is_causal=is_causal)

        z = x + self.attended(x, attend_by_size)
        patches, _, merge = self.merge(_pixels_to_patches(z, self.area), tokens, grid=tokens.grid)
        z = z if merge is None else _patches_to_pixels(patches, self.area)
        return z + self.transformed(z)

    def of_pixels(self, size: Tensor | None) -> Tensor | None:
        """The sizes of the patches, repeated for their pixels."""
        if size is None or size.shape[0] == 1:
            return size
        return size.repeat_interleave(self.area, dim=0)

    def look(self, qkv: Tensor, size: Tensor | None, needs: frozenset[str]) -> dict[str, Tensor]:
        per_pixel = attention_hints(self.attn, qkv, self.of_pixels(size), needs, class_token=False)
        return {
            name: _pixels_to_patches(value, self.area)
            if name == "keys"
            else value.unflatten(0, (-1, self.area)).mean(dim=1)
            for name, value in per_pixel.items()
        }


class MergingMobileVitBlock(MobileVitBlock):
    """The paper's block for efficient transformers: the shortcut X and Z share one mask."""

    slots: tuple[TokenState, int, int]
    """The state, the index of the first layer, and the index after the last."""
    conv_kxk: Any
    conv_1x1: Any
    transformer: Any
    norm: Any
    conv_proj: Any
    conv_fusion: Any
    patch_size: Any
    patch_area: Any

    def forward(self, x: Tensor) -> Tensor:
        state, first, end = self.slots
        if first == 0:
            state.open()
        shortcut = x
        x = self.conv_1x1(self.conv_kxk(x))
        height, width = x.shape[2:]
        patch = cast("Grid", tuple(self.patch_size))
        grid = (-(-height // patch[0]), -(-width // patch[1]))
        whole = (grid[0] * patch[0], grid[1] * patch[1])
        stretched = whole != (height, width)
        if stretched:
            x = stretch(x, whole)
        state.leave(first - 1, state.fresh(grid))
        x = self.norm(self.transformer(_unfold(x, patch)))
        tokens = state.left_by(end - 1)
        out_grid = cast("Grid", tokens.grid)
        if out_grid != grid:
            shortcut = self.follow(shortcut, whole, tokens, out_grid)
        elif tokens.merges:
            patches = _pixels_to_patches(x, self.patch_area)
            x = _patches_to_pixels(restore_through(tokens.merges, patches), self.patch_area)
        x = _fold(x, patch, out_grid)
        if stretched and out_grid == grid:
            x = stretch(x, (height, width))
        x = self.conv_proj(x)
        if self.conv_fusion is not None:
            x = self.conv_fusion(torch.cat((shortcut, x), dim=1))
        return x

    def follow(self, shortcut: Tensor, whole: Grid, tokens: Tokens, grid: Grid) -> Tensor:
        """Merge the shortcut by the same masks; if it has to be stretched, it stays so."""
        patch = cast("Grid", tuple(self.patch_size))
        if tuple(shortcut.shape[2:]) != whole:
            shortcut = stretch(shortcut, whole)
        patches = _pixels_to_patches(_unfold(shortcut, patch), self.patch_area)
        for merge in tokens.merges:
            patches = merge.average(patches)
        state, *_ = self.slots
        if self.transformer[-1].slot.last and tokens.size is not None:
            size = tokens.size.reshape(-1, *grid)
            for dim, side in enumerate(patch, start=1):
                size = size.repeat_interleave(side, dim=dim)
            state.frame.pool = size
        return _fold(_patches_to_pixels(patches, self.patch_area), patch, grid)


class MergingMobileVit(MergingGridModel, ByobNet):
    """A converted MobileViT."""


@register
class MobileViTAdapter(GridAdapter):
    """timm's MobileViT (version 1), whole or as a feature extractor."""

    family: ClassVar[str] = "mobilevit"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (MobileVitBlock,)
    shrinks_maps: ClassVar[bool] = True
    covers: ClassVar[str] = "MobileViT (timm mobilevit_xxs, mobilevit_xs, mobilevit_s)"
    models: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {ByobNet: MergingMobileVit}
    merging: ClassVar[type[nn.Module]] = MergingMobileVitBlock

    def refusal(self, model: nn.Module) -> str | None:
        for block in self.units(model):
            if any(type(layer) not in (HostBlock, MergingLayer) for layer in block.transformer):
                return "its transformer layers are of a kind that is not known here."
        return None

    def layout(self, model: nn.Module, image_size: tuple[int, int]) -> Layout:
        found = self.units(model)
        shapes = observed_shapes(model, found, image_size)
        paths = {module: path for path, module in model.named_modules()}
        blocks: list[Block] = []
        runs: list[Run] = []
        for stage, (host, shape) in enumerate(zip(found, shapes, strict=True)):
            patch = cast("Grid", tuple(host.patch_size))
            grid = (-(-shape[2] // patch[0]), -(-shape[3] // patch[1]))
            first = len(blocks)
            width = host.conv_1x1.out_channels * host.patch_area
            blocks += [Block(paths[layer], width, stage) for layer in host.transformer]
            runs.append(Run(grid[0] * grid[1], grid, tuple(range(first, len(blocks)))))
        classes = self.num_classes(model)
        # As on Swin: merge at the start of stages. Even grids give the next stage whole patches.
        sites = tuple(run.blocks[0] for run in runs[:-1])
        return Layout(tuple(blocks), 0, classes, tuple(runs), runs[0].grid, _EVEN, sites)

    def convert_units_(
        self, units: list[Any], config: MethodConfig, sites: Sequence[Site], state: TokenState
    ) -> None:
        starts = [index == 0 for host in units for index in range(len(host.transformer))]
        slots = make_slots(config, sites, state, starts)
        end = 0
        for host in units:
            first, end = end, end + len(host.transformer)
            for layer, slot in zip(host.transformer, slots[first:end], strict=True):
                # The MobileViT block opens the forward, and says what enters its first layer.
                slot.opens = slot.starts = False
                convert_block_(layer, config, slot, MergingLayer, layer.attn.qkv)
                layer.area = host.patch_area
            host.slots = (state, first, end)
            become_(host, MergingMobileVitBlock)

    def revert_unit_(self, unit: Any) -> None:
        for layer in unit.transformer:
            revert_block_(layer, HostBlock, layer.attn.qkv)
            del layer.area
        del unit.slots
        become_(unit, MobileVitBlock)

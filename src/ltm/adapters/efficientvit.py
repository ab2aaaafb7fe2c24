"""EfficientViT (MIT): merge the map after the linear attention, before the local convolutions.

Merging is linear, so merging `X + attention(X)` is the same as merging both with one mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from timm.models.efficientvit_mit import (
    EfficientVit,
    EfficientVitBlock,
    EfficientVitLarge,
    LiteMLA,
    MBConv,
)
from torch import Tensor, nn

from ltm.adapters.base import Layout, Run, observed_shapes, register
from ltm.adapters.blocks import (
    MergingMixin,
    Slot,
    TokenState,
    convert_block_,
    make_slots,
    revert_block_,
)
from ltm.adapters.grids import (
    GridAdapter,
    MergingGridModel,
    blocks_by_width,
    map_to_tokens,
    starts_of,
    tokens_to_map,
)
from ltm.core.merge import Merge
from ltm.core.schedule import Grid
from ltm.methods.base import MethodConfig, Site


class SizedKernel(nn.Module):
    """The kernel function of linear attention times the token sizes: proportional attention.

    It is applied to queries, too, where the scale cancels.
    """

    def __init__(self, kernel: nn.Module, slot: Slot) -> None:
        super().__init__()
        self.kernel, self.slot = kernel, slot

    def forward(self, x: Tensor) -> Tensor:
        out, slot = self.kernel(x), self.slot
        size = slot.state.frame.tokens[slot.index].size if slot.proportional else None
        return out if size is None else out * size[:, None, :, None].to(out.dtype)


class MergingEfficientVitBlock(MergingMixin, EfficientVitBlock):
    """The paper's block for efficient transformers, on EfficientViT."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.entering(x)
        z = self.context_module(x)
        grid = (z.shape[2], z.shape[3])
        merged, tokens, merge = self.merge(map_to_tokens(z), tokens, grid=grid)
        if merge is not None and not self.keeps_grid:
            return self.local_on_merged(merged, merge, grid)
        if merge is not None:
            grid = cast("Grid", tokens.grid)
            z = tokens_to_map(merged, grid)
        if self.slot.last and tokens.size is not None:
            self.slot.state.frame.pool = tokens.size.reshape(-1, *grid)
        return self.local_module(z)

    def look(self, qkv: Tensor, size: Tensor | None, needs: frozenset[str]) -> dict[str, Tensor]:
        return linear_attention_hints(cast("LiteMLA", self.context_module.main), qkv, needs)

    def local_on_merged(self, merged: Tensor, merge: Merge, grid: Grid) -> Tensor:
        """The local module with its 1 x 1 convolutions on merged tokens.

        The spatial convolution runs on the restored grid, and the output is a full grid.
        """
        local = cast("MBConv", self.local_module.main)
        line = (merged.shape[1], 1)
        wide = map_to_tokens(local.inverted_conv(tokens_to_map(merged, line)))
        spatial = local.depth_conv(tokens_to_map(merge.restore(wide), grid))
        narrow = local.point_conv(tokens_to_map(merge(map_to_tokens(spatial)), line))
        return tokens_to_map(merge.restore(merged + map_to_tokens(narrow)), grid)


def linear_attention_hints(
    attention: LiteMLA, qkv: Tensor, needs: frozenset[str]
) -> dict[str, Tensor]:
    """The mean keys of linear attention, and the attention that each token receives."""
    heads = qkv.flatten(2).unflatten(1, (-1, 3, attention.dim))
    query, key = attention.kernel_func(heads[:, :, 0]), attention.kernel_func(heads[:, :, 1])
    found: dict[str, Tensor] = {}
    if "keys" in needs:
        found["keys"] = heads[:, :, 1].mean(dim=1).transpose(1, 2)
    if needs & {"importance", "attention"}:
        # The attention of each query sums to one, so its mean over queries is that of one query.
        total = (query * key.sum(dim=-1, keepdim=True)).sum(dim=2, keepdim=True) + attention.eps
        asking = (query / total).mean(dim=-1, keepdim=True)
        received: Tensor = (asking * key).sum(dim=2).mean(dim=1)
        found |= dict.fromkeys(needs & {"importance", "attention"}, received)
    return found


class MergingEfficientVit(MergingGridModel, EfficientVit):
    """A converted `EfficientVit`."""


class MergingEfficientVitLarge(MergingGridModel, EfficientVitLarge):
    """A converted `EfficientVitLarge`."""


@register
class EfficientViTAdapter(GridAdapter):
    """timm's `EfficientVit` and `EfficientVitLarge`, also as feature extractors."""

    family: ClassVar[str] = "efficientvit"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (EfficientVitBlock,)
    covers: ClassVar[str] = "EfficientViT (timm efficientvit_b*, efficientvit_l*)"
    models: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {
        EfficientVit: MergingEfficientVit,
        EfficientVitLarge: MergingEfficientVitLarge,
    }
    merging: ClassVar[type[nn.Module]] = MergingEfficientVitBlock

    def layout(self, model: nn.Module, image_size: tuple[int, int]) -> Layout:
        found = self.units(model)
        blocks = blocks_by_width(model, found, [_width(block) for block in found])
        grids = [(shape[2], shape[3]) for shape in observed_shapes(model, found, image_size)]
        runs = tuple(Run(h * w, (h, w), (index,)) for index, (h, w) in enumerate(grids))
        return Layout(blocks, 0, self.num_classes(model), runs, grids[0])

    def convert_units_(
        self, units: list[Any], config: MethodConfig, sites: Sequence[Site], state: TokenState
    ) -> None:
        starts = starts_of([_width(block) for block in units], config)
        for block, slot in zip(units, make_slots(config, sites, state, starts), strict=True):
            attention = cast("LiteMLA", block.context_module.main)
            attention.kernel_func = SizedKernel(attention.kernel_func, slot)
            convert_block_(block, config, slot, MergingEfficientVitBlock, attention.qkv.conv)

    def revert_unit_(self, unit: Any) -> None:
        attention = cast("LiteMLA", unit.context_module.main)
        attention.kernel_func = cast("SizedKernel", attention.kernel_func).kernel
        revert_block_(unit, EfficientVitBlock, attention.qkv.conv)


def _width(block: Any) -> int:
    projection = block.context_module.main.proj.conv
    return getattr(projection, "base_layer", projection).out_channels  # LoRA wraps it

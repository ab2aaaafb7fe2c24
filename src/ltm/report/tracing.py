"""Follow the tokens of a converted model: where each patch went.

Letters: b images, n patches at the start of a block's stage, p tokens after the block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from ltm.api import conversion_of, merge_maps
from ltm.core.schedule import Grid

DROPPED = -1
"""The group of a patch that went into no token."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SiteMap:
    """The tokens after one block, as weights over the patches."""

    block: int
    grid: Grid
    weights: Float[Tensor, "b n p"]
    """Columns sum to one, or to zero for the padding of images with fewer tokens."""

    def num_tokens(self, image: int) -> int:
        """Tokens that one image has left."""
        return int((self.weights[image].sum(0) > 0).sum())

    def groups(self) -> Int[Tensor, "b n"]:
        """The token that each patch went into; of several, the one with most of it."""
        strongest, place = self.weights.max(dim=-1)
        return place.masked_fill(strongest <= 0, DROPPED)

    def group_grid(self, image: int) -> NDArray[np.int64]:
        """One image's groups, on the grid of patches."""
        return self.groups()[image].reshape(self.grid).cpu().numpy()

    def of_target(self, image: int, patch: Grid) -> NDArray[np.float32]:
        """The weights of the token that holds a patch; all zero if the patch was dropped."""
        index = _patch_index(patch, self.grid)
        place = int(self.groups()[image, index])
        if place == DROPPED:
            return np.zeros(self.grid, dtype=np.float32)
        return self.weights[image, :, place].float().reshape(self.grid).cpu().numpy()


Traces = Mapping[str, Sequence[SiteMap]]
"""The maps of each method, by its title."""


def trace(model: nn.Module, images: Tensor) -> list[SiteMap]:
    """Run images through a converted model; one map per block that merges, in order."""
    grids = {site.block: site.grid for site in conversion_of(model).sites}
    maps = merge_maps(model, images)
    size = (images.shape[-2], images.shape[-1])
    return [
        SiteMap(block=block, grid=_grid(weights.shape[1], grids[block], size), weights=weights)
        for block, weights in sorted(maps.items())
    ]


@torch.no_grad()
def trace_models(models: Mapping[str, nn.Module], images: Tensor) -> Traces:
    """Trace the same images through every network."""
    return {
        name: trace(model, images.to(next(model.parameters()).device))
        for name, model in models.items()
    }


def last_attended_block(model: nn.Module) -> int | None:
    """The last merging block whose tokens a later block attends to; None if nothing merges.

    No block attends to the tokens of the network's last block, which may leave almost none.
    """
    sites = [site for site in conversion_of(model).sites if site.merges]
    attended = [site.block for site in sites if site.block < site.depth - 1]
    return (attended or [site.block for site in sites] or [None])[-1]


def _grid(num_patches: int, planned: Grid, image_size: tuple[int, int]) -> Grid:
    """The grid of patches: the planned one, or by the image's aspect if that one is a window's."""
    if planned[0] * planned[1] == num_patches:
        return planned
    wanted = math.sqrt(num_patches * image_size[0] / image_size[1])
    divisors = [side for side in range(1, num_patches + 1) if num_patches % side == 0]
    height = min(divisors, key=lambda side: abs(side - wanted))
    return height, num_patches // height


def at_block(maps: Sequence[SiteMap], block: int, grid: Grid, num_images: int) -> SiteMap:
    """The tokens as they leave a block: those of the last merge so far, or the patches."""
    before = [site for site in maps if site.block <= block]
    if before:
        return before[-1]
    identity = torch.eye(grid[0] * grid[1]).expand(num_images, -1, -1)
    return SiteMap(block=block, grid=grid, weights=identity)


def _patch_index(patch: Grid, grid: Grid) -> int:
    (row, column), (height, width) = patch, grid
    if not (0 <= row < height and 0 <= column < width):
        raise ValueError(
            f"target {row},{column} lies outside the image: rows go from 0 to {height - 1}, "
            f"columns from 0 to {width - 1}"
        )
    return row * width + column

"""The vision tower of SigLIP 2 in transformers, for images of different sizes and aspect ratios.

It takes patches, a mask of those that are not padding, and the rows and columns of each image. A
budget holds at the size that its positions were learned for. Padding has size zero: it leaves
first, and no token merges with it. A converted tower also takes images, and cuts them into patches.
"""

from __future__ import annotations

from math import isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.siglip2 import modeling_siglip2 as siglip2
from transformers.utils.generic import can_return_tuple

from ltm.adapters.base import register
from ltm.adapters.blocks import Slot, Tokens, TokenState
from ltm.adapters.naflex import PaddedMixin
from ltm.adapters.transformers.clip import MergingEncoderLayer
from ltm.adapters.transformers.towers import (
    GivingTower,
    MeanPooled,
    MergingLayer,
    Swapped,
    TowerAdapter,
    become_too_,
    merges,
)
from ltm.core.attention import Rotation, size_bias
from ltm.core.schedule import Grid


def _side(tower: Any) -> int:
    """The side of a patch in pixels."""
    size = tower.config.patch_size
    return size if isinstance(size, int) else size[0]


def _patched(tower: nn.Module, images: Tensor) -> tuple[Tensor, Tensor, Grid]:
    """Cut images into patches; returns them, the rows and columns of each image, and the grid."""
    p = _side(tower)
    grid = images.shape[2] // p, images.shape[3] // p
    images = images[:, :, : grid[0] * p, : grid[1] * p].unflatten(3, (-1, p)).unflatten(2, (-1, p))
    patches = images.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    return patches, torch.tensor([grid], device="cpu").expand(images.shape[0], -1), grid


class FromImages(Swapped):
    """A tower that takes images as well as patches."""

    stays: ClassVar[bool] = True

    def forward(self, pixel_values: Tensor, *args: Any, **options: Any) -> Any:
        if pixel_values.ndim == 4 and not isinstance(self, MergingPaddedTower):
            patches, shapes, _ = _patched(self, pixel_values)
            options |= {"pixel_attention_mask": None, "spatial_shapes": shapes}
            return super().forward(patches, **options)
        return super().forward(pixel_values, *args, **options)


class MergingPaddedTower(GivingTower):
    """A converted tower, which opens the forward, since it knows what is padding."""

    def forward(
        self,
        pixel_values: Tensor,
        pixel_attention_mask: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        **options: Any,
    ) -> Any:
        grid = None
        if pixel_values.ndim == 4:
            pixel_values, spatial_shapes, grid = _patched(self, pixel_values)
        self.opened.open(grid)
        if pixel_attention_mask is not None:
            self.opened.frame.size = pixel_attention_mask.float()
        return super().forward(pixel_values, pixel_attention_mask, spatial_shapes, **options)


class MergingPaddedLayer(PaddedMixin, MergingEncoderLayer):
    """A layer whose tokens may be padding, which the given mask covers until the first merge."""

    def attend(
        self,
        y: Tensor,
        mask: Tensor | None,
        tokens: Tokens,
        rotation: Rotation | None,
        options: dict[str, Any],
    ) -> Tensor:
        if not tokens.merges:
            return self.self_attention()(y, attention_mask=mask, **options)[0]
        if tokens.size is not None and not self.slot.proportional:
            bias = size_bias((tokens.size > 0).float(), y.dtype)
            return self.self_attention()(y, attention_mask=bias, **options)[0]
        return super().attend(y, mask, tokens, rotation, options)


class MergingPoolingHead(Swapped):
    """The pooling head; after a merge the token sizes say what is padding."""

    sized: Slot

    def forward(self, hidden_state: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if self.sized.state.left_by(self.sized.index).merges:
            attention_mask = None
        return super().forward(hidden_state, attention_mask)


class MaskedMeanPooled(MeanPooled):
    """A classifier that reads the mean token, without padding."""

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> Any:
        options |= {"pixel_attention_mask": pixel_attention_mask, "spatial_shapes": spatial_shapes}
        if merges(self):
            return super().forward(pixel_values, labels, **options)
        return super(MeanPooled, self).forward(pixel_values, labels=labels, **options)  # pyright: ignore[reportAttributeAccessIssue]


@register
class Siglip2TowerAdapter(TowerAdapter):
    """Alone, or with a classifier on the mean of its tokens."""

    family: ClassVar[str] = "transformers-siglip2"
    covers: ClassVar[str] = "SigLIP 2's vision tower (transformers)"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (siglip2.Siglip2VisionModel,)
    layers: ClassVar[tuple[type[nn.Module], ...]] = (siglip2.Siglip2EncoderLayer,)
    layer: ClassVar[type[MergingLayer]] = MergingPaddedLayer
    mean_pooled: ClassVar[tuple[type[nn.Module], ...]] = (siglip2.Siglip2ForImageClassification,)
    pools: ClassVar[type[MeanPooled]] = MaskedMeanPooled

    def image_size(self, model: nn.Module) -> int:
        tower = self.tower(model)
        return isqrt(tower.config.num_patches) * _side(tower)

    def take_images_(self, model: nn.Module) -> None:
        if not isinstance(self.tower(model), FromImages):
            become_too_(self.tower(model), FromImages)

    def patch(self, tower: Any) -> tuple[int, int]:
        return _side(tower), _side(tower)

    def open_(self, tower: Any, state: TokenState) -> None:
        tower.opened = state
        become_too_(tower, MergingPaddedTower)

    def pool_(self, head: Any, slot: Slot) -> None:
        super().pool_(head, slot)
        head.sized = slot
        become_too_(head, MergingPoolingHead)

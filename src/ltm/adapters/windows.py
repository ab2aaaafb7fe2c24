"""Attention windows of a map, and merging inside each of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import (
    window_partition,
    window_reverse,
)
from torch import Tensor

from ltm.core.merge import Merge, Merged
from ltm.core.schedule import Grid

FAR = -100.0
"""What timm adds to the score of a pair that must not attend."""


@dataclass(frozen=True)
class Windows:
    """How a map is cut into attention windows: padded, then shifted, then cut."""

    grid: Grid
    window: Grid
    shift: Grid
    shift_first: bool = False
    """Shifted, then padded, as timm does it."""

    @property
    def padded(self) -> Grid:
        (h, w), (wh, ww) = self.grid, self.window
        return -(-h // wh) * wh, -(-w // ww) * ww

    def cut(self, x: Tensor) -> Tensor:
        """`b h w c -> (b windows) area c`. Padding before shifting keeps edges apart."""
        back = (-self.shift[0], -self.shift[1])
        x = self._pad(_roll(x, back)) if self.shift_first else _roll(self._pad(x), back)
        return window_partition(x, self.window).flatten(1, 2)

    def _pad(self, x: Tensor) -> Tensor:
        (h, w), (hp, wp) = self.grid, self.padded
        return x if (h, w) == (hp, wp) else F.pad(x, (0, 0, 0, wp - w, 0, hp - h))

    def join(self, windows: Tensor) -> Tensor:
        """`(b windows) area c -> b h w c`, the inverse of `cut`."""
        x = window_reverse(windows.unflatten(1, self.window), self.window, *self.padded)
        h, w = self.grid
        x = _roll(x[:, :h, :w], self.shift) if self.shift_first else _roll(x, self.shift)[:, :h, :w]
        return x.contiguous()

    def mask(self, size: Tensor | None, reference: Tensor) -> Tensor | None:
        """The bias of the scores, `windows area area`: who may attend, and log sizes of keys."""
        if size is None and self.grid == self.padded and not any(self.shift):
            return None
        real = reference.new_ones(1, *self.grid, 1)
        sizes = real if size is None else size.reshape(-1, *self.grid, 1).to(real.dtype)
        keys = self.cut(sizes)[..., 0]
        bias = torch.where(keys > 0, keys.clamp_min(1e-6).log(), FAR)[:, None, :]
        if not any(self.shift):
            return bias.expand(-1, bias.shape[-1], -1)
        region = window_partition(self._regions(reference), self.window).flatten(1)
        apart = region[:, :, None] != region[:, None, :]
        return bias + FAR * apart.to(bias.dtype)

    def _regions(self, reference: Tensor) -> Tensor:
        """Numbers of the parts of the shifted map that were no neighbours before the shift."""
        parts = []
        for side, window, shift in zip(self.padded, self.window, self.shift, strict=True):
            place = torch.arange(side, device=reference.device)
            parts.append((place >= side - window).int() + (place >= side - shift).int())
        return (3 * parts[0][:, None] + parts[1])[None, :, :, None]


def _roll(x: Tensor, by: Grid) -> Tensor:
    return torch.roll(x, by, (1, 2)) if any(by) else x


@dataclass(frozen=True, eq=False, kw_only=True)
class WindowMerge(Merge):
    """A merge inside every window, as a merge of the whole map."""

    inner: Merge
    windows: Windows

    @property
    def num_in(self) -> int:
        return self.windows.grid[0] * self.windows.grid[1]

    @property
    def num_out(self) -> int:
        (hp, wp), (wh, ww) = self.windows.padded, self.windows.window
        return (hp // wh) * (wp // ww) * self.inner.num_out

    def __call__(self, x: Tensor) -> Tensor:
        merged = self.inner(self.windows.cut(x.unflatten(1, self.windows.grid)))
        return merged.reshape(x.shape[0], -1, x.shape[2])

    def apply(self, x: Tensor, size: Tensor | None, values: Tensor | None = None) -> Merged:
        grid = self.windows.grid
        maps = x.new_ones(1, *grid, 1) if size is None else size.reshape(-1, *grid, 1)
        inside = self.windows.cut(maps.expand(x.shape[0], -1, -1, -1))[..., 0]
        merged, sizes, _ = self.inner.apply(self.windows.cut(x.unflatten(1, grid)), inside.float())
        return Merged(
            merged.reshape(x.shape[0], -1, x.shape[2]),
            sizes.reshape(x.shape[0], -1),
            None if values is None else self.hand_on(values),
        )

    def restore(self, y: Tensor) -> Tensor:
        windows = self.inner.restore(y.reshape(-1, self.inner.num_out, y.shape[2]))
        return self.windows.join(windows).flatten(1, 2)

    def weights(self) -> Tensor:
        inner = self.inner.weights()
        per_image = self.num_out // self.inner.num_out
        inner = inner.unflatten(0, (-1, per_image))
        whole = torch.stack([torch.block_diag(*image) for image in inner])
        places = self.windows.cut(
            torch.arange(1, self.num_in + 1, device=inner.device).reshape(1, *self.windows.grid, 1)
        ).flatten()
        order = torch.argsort(places, stable=True)[(places == 0).sum() :]
        return whole[:, order]

    def sizes(self, size: Tensor) -> Tensor:
        maps = size.expand(1, -1).reshape(-1, *self.windows.grid, 1)
        inside = self.windows.cut(maps)[..., 0]
        repeats = self.inner.weights().shape[0] // inside.shape[0]
        return self.inner.sizes(inside.repeat(repeats, 1)).reshape(-1, self.num_out)

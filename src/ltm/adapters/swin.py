"""Swin: merge the map after window attention, before the MLP.

Methods that keep no grid merge inside each window.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import (
    SwinTransformer,
    SwinTransformerBlock,
    window_partition,
    window_reverse,
)
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ltm.adapters.base import Layout, Run, observed_shapes, register
from ltm.adapters.blocks import (
    HalvesMixin,
    Slot,
    Tokens,
    TokenState,
    convert_block_,
    make_slots,
    revert_block_,
)
from ltm.adapters.grids import GridAdapter, MergingGridModel, blocks_by_width, starts_of
from ltm.core.attention import attention_hints
from ltm.core.merge import Merge, Merged
from ltm.core.schedule import Grid, halve
from ltm.kernels.dispatch import is_recorded
from ltm.methods.base import Decision, Hints, Merger, MethodConfig, Site

_FAR = -100.0
"""What timm adds to the score of a pair that is masked out."""


@dataclass(frozen=True)
class Windows:
    """How a map is cut into attention windows: pad, shift, cut."""

    grid: Grid
    window: Grid
    shift: Grid
    shift_first: bool = False
    """Shift before padding, as timm does."""

    @property
    def padded(self) -> Grid:
        (h, w), (wh, ww) = self.grid, self.window
        return -(-h // wh) * wh, -(-w // ww) * ww

    def cut(self, x: Tensor) -> Tensor:
        """`b h w c -> (b windows) area c`."""
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
        """The bias on the scores, `windows area area`: masks, and the log sizes of keys."""
        if size is None and self.grid == self.padded and not any(self.shift):
            return None
        real = reference.new_ones(1, *self.grid, 1)
        sizes = real if size is None else size.reshape(-1, *self.grid, 1).to(real.dtype)
        keys = self.cut(sizes)[..., 0]
        bias = torch.where(keys > 0, keys.clamp_min(1e-6).log(), _FAR)[:, None, :]
        if not any(self.shift):
            return bias.expand(-1, bias.shape[-1], -1)
        region = window_partition(self._regions(reference), self.window).flatten(1)
        apart = region[:, :, None] != region[:, None, :]
        return bias + _FAR * apart.to(bias.dtype)

    def attend(self, attention: nn.Module, x: Tensor, size: Tensor | None) -> Tensor:
        """Attention inside the windows of a map `b h w c`, with keys weighted by size."""
        if x.requires_grad or not _keeps_constants(x):
            return self.join(attention(self.cut(x), mask=self.mask(size, x)))
        inside, back = _places(self, x.device)
        windows = x.flatten(1, 2).index_select(1, inside)
        windows = windows.reshape(-1, self.window[0] * self.window[1], x.shape[-1])
        out = attention(windows, mask=_constant_mask(self, size, x))
        out = out.reshape(x.shape[0], -1, out.shape[-1]).index_select(1, back)
        return out.unflatten(1, self.grid)

    def _regions(self, reference: Tensor) -> Tensor:
        """Labels for the parts of the shifted map that were not adjacent before the shift."""
        parts = []
        for side, window, shift in zip(self.padded, self.window, self.shift, strict=True):
            place = torch.arange(side, device=reference.device)
            parts.append((place >= side - window).int() + (place >= side - shift).int())
        return (3 * parts[0][:, None] + parts[1])[None, :, :, None]


def _keeps_constants(x: Tensor) -> bool:
    """Whether tensors that depend on windows only may be cached; graphs compute or fold them."""
    return type(x) is Tensor and not (torch.compiler.is_compiling() or is_recorded())


@lru_cache(maxsize=256)
def _places(windows: Windows, device: torch.device) -> tuple[Tensor, Tensor]:
    """The token at each place of the windows, and the place of each token, for cutting by one copy.

    Padding gets an arbitrary token; the mask excludes it.
    """
    with torch.inference_mode(False):
        (h, w), (hp, wp) = windows.grid, windows.padded
        numbers = torch.arange(1, h * w + 1, device=device).reshape(1, h, w, 1)
        inside = windows.cut(numbers).flatten() - 1
        numbers = torch.arange(hp * wp, device=device)
        area = windows.window[0] * windows.window[1]
        return inside.clamp_min(0), windows.join(numbers.reshape(-1, area, 1)).flatten()


_masks = WeakTensorKeyDictionary()
"""Masks of constant sizes: frozen mergers pass on the same tensor in every forward."""


def _constant_mask(windows: Windows, size: Tensor | None, x: Tensor) -> Tensor | None:
    """`Windows.mask`, cached while the tensor of sizes exists and is not changed."""
    if size is None:
        return _mask_of_shape(windows, x.device, x.dtype)
    if size.shape[0] > 1 or size.requires_grad or size.is_inference():
        return windows.mask(size, x)
    known = cast("dict[Any, Tensor | None]", _masks.setdefault(size, {}))
    key = windows, x.dtype, size._version  # noqa: SLF001
    if key not in known:
        with torch.inference_mode(False), torch.no_grad():
            known[key] = windows.mask(size, torch.empty(0, device=x.device, dtype=x.dtype))
    return known[key]


@lru_cache(maxsize=256)
def _mask_of_shape(windows: Windows, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    with torch.inference_mode(False):
        return windows.mask(None, torch.empty(0, device=device, dtype=dtype))


def _roll(x: Tensor, by: Grid) -> Tensor:
    return torch.roll(x, by, (1, 2)) if any(by) else x


@dataclass(frozen=True, eq=False, kw_only=True)
class WindowMerge(Merge):
    """A merge inside each window, as a merge of the whole map."""

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
        maps = size.reshape(-1, *self.windows.grid, 1)
        inside = self.windows.cut(maps)[..., 0]
        repeats = self.inner.weights().shape[0] // inside.shape[0]
        return self.inner.sizes(inside.repeat(repeats, 1)).reshape(-1, self.num_out)


class WindowedMixin(HalvesMixin):
    """A block with window attention that merges its attention output."""

    attn: Any
    window: Grid
    shift: Grid
    whole: bool
    """Whether no earlier block has merged, so that the map has its original size."""
    paused: _Fitted | None = None
    """While merging is off: the windows to return to."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _resume_windows_(self)  # a copy merges, even if it is made while merging is off

    def ended(self, out: Tensor) -> Tensor:
        """What follows the residual of the second half."""
        return out

    def host_attention(self, x: Tensor) -> Tensor:
        """The host's own window attention."""
        return cast("Any", self)._attn(x)  # noqa: SLF001

    def window_hints(
        self, qkv: Tensor, real: Tensor | None, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        """The hints that a merger needs, for each window."""
        return attention_hints(self.attn, qkv, real, needs, class_token=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.entering(x)
        grid = (x.shape[1], x.shape[2])
        windows = Windows(grid, self.window, self.shift, shift_first=self.whole)
        z = x + self.attended(x, lambda y: self.attend(y, tokens, windows))
        merged, tokens, merge = self.merge(z.flatten(1, 2), tokens, grid=grid, windows=windows)
        out = self.ended(merged + self.transformed(merged))
        if merge is not None and not self.keeps_grid:
            out = merge.restore(out)
        elif merge is not None and tokens.grid is not None:
            grid = tokens.grid
        if self.slot.last and self.keeps_grid and tokens.size is not None:
            self.slot.state.frame.pool = tokens.size.reshape(-1, *grid)
        return out.unflatten(1, grid)

    def attend(self, x: Tensor, tokens: Tokens, windows: Windows) -> Tensor:
        """Window attention; the host's own if nothing was merged before."""
        if self.whole:
            return self.host_attention(x)
        return windows.attend(self.attn, x, tokens.size if self.slot.proportional else None)

    def decide(self, z: Tensor, hints: Hints, **context: Any) -> Decision:
        merger, windows = cast("Merger", self.merger), cast("Windows", context["windows"])
        if merger.keeps_grid:
            return merger(z, hints)
        inside = windows.cut(z.unflatten(1, windows.grid))
        real = None
        if windows.grid != windows.padded:
            real = windows.cut(z.new_ones(z.shape[0], *windows.grid, 1))[..., 0].float()
        found: dict[str, Any] = {}
        if merger.needs:
            qkv, _ = self.slot.state.take_projected(self.slot.index)
            found = self.window_hints(qkv, real, merger.needs)
        labels = hints.labels
        if labels is not None:
            labels = labels.repeat_interleave(inside.shape[0] // z.shape[0])
        num_out = merger.site.count_for(inside.shape[1])
        inner = merger(inside, Hints(num_out=num_out, size=real, labels=labels, **found))
        return Decision(merge=WindowMerge(inner=inner.merge, windows=windows))


class MergingSwinBlock(WindowedMixin, SwinTransformerBlock):
    """A block of Swin."""

    def attended(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        return self.drop_path1(attend(self.norm1(x)))

    def transformed(self, z: Tensor) -> Tensor:
        return self.drop_path2(self.mlp(self.norm2(z)))


class MergingSwin(MergingGridModel, SwinTransformer):
    """A converted `SwinTransformer`."""


class WindowAdapter(GridAdapter):
    """A family of networks with shifted windows, also as feature extractors."""

    @abstractmethod
    def fitted(self, window: Grid, host: Grid) -> dict[str, Any]:
        """The attributes of a block's attention for windows smaller than the host's."""

    def refusal(self, model: nn.Module) -> str | None:
        known = {*self.hosts, self.merging}
        other = {type(block) for block in self.units(model)} - known
        names = ", ".join(sorted(kind.__name__ for kind in other))
        return f"its blocks are {names}, a variant that is not known here." if other else None

    def layout(self, model: nn.Module, image_size: tuple[int, int]) -> Layout:
        found = self.units(model)
        blocks = blocks_by_width(model, found, [block.dim for block in found])
        runs = tuple(
            Run(block.window_area, cast("Grid", tuple(block.window_size)), (index,))
            for index, block in enumerate(found)
        )
        (_, *entry, _), *_ = observed_shapes(model, found[:1], image_size)
        # Memory traffic limits speed, and is largest in the first stages: merge where stages begin.
        stages = [block.stage for block in blocks]
        sites = tuple(stages.index(stage) for stage in range(max(stages)))
        multiple = max(found[0].window_size)
        grid = (entry[0], entry[1])
        return Layout(blocks, 0, self.num_classes(model), runs, grid, multiple, sites)

    def convert_units_(
        self, units: list[Any], config: MethodConfig, sites: Sequence[Site], state: TokenState
    ) -> None:
        slots = make_slots(config, sites, state, starts_of([b.dim for b in units], config))
        grids = _merged_grids(units, slots) if config.keeps_grid() else [None] * len(units)
        for block, slot, grid in zip(units, slots, grids, strict=True):
            self._convert_block_(block, config, slot, grid)

    def _convert_block_(
        self, block: Any, config: MethodConfig, slot: Slot, grid: Grid | None
    ) -> None:
        window = cast("Grid", tuple(block.window_size))
        shift = cast("Grid", tuple(block.shift_size))
        if grid is not None and grid != _resolution(block):
            window, shift = self._fit_window_(block, grid, slot)
        block.window, block.shift, block.whole = window, shift, grid is None
        convert_block_(block, config, slot, self.merging, block.attn.qkv)

    def _fit_window_(self, block: Any, grid: Grid, slot: Slot) -> tuple[Grid, Grid]:
        """Fit windows to a smaller map: as few as the host's size gives, of sides that pad least.

        The host's table of relative positions stays; its index is made anew.
        """
        host = cast("Grid", tuple(block.window_size))
        window = (_even_side(grid[0], host[0]), _even_side(grid[1], host[1]))
        shift = tuple(
            0 if g <= w else min(s, w // 2)
            for g, w, s in zip(grid, window, block.shift_size, strict=True)
        )
        if window != host:
            attn = block.attn
            fitted = self.fitted(window, host)
            slot.original = {name: getattr(attn, name) for name in fitted}
            _set_(attn, fitted)
        return window, cast("Grid", shift)

    def revert_unit_(self, unit: Any) -> None:
        _host_windows_(unit)
        del unit.window, unit.shift, unit.whole
        revert_block_(unit, self.hosts[0], unit.attn.qkv)

    def host_arguments(self, model: nn.Module) -> dict[str, Any]:
        """The window size, which resizing changes."""
        if not isinstance(model, tuple(self.models)):
            return {}
        return {"window_size": list(self.units(model)[0].window_size)}

    @contextmanager
    def pausing(self, model: nn.Module) -> Iterator[None]:
        merging = [block for block in self.units(model) if isinstance(block, WindowedMixin)]
        blocks = [block for block in merging if block.paused is None]
        for block in blocks:
            block.paused = _host_windows_(block)
        try:
            yield
        finally:
            for block in blocks:
                _resume_windows_(block)


@register
class SwinAdapter(WindowAdapter):
    """timm's `SwinTransformer`."""

    family: ClassVar[str] = "swin"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (SwinTransformerBlock,)
    covers: ClassVar[str] = "Swin (timm SwinTransformer)"
    models: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {SwinTransformer: MergingSwin}
    merging: ClassVar[type[nn.Module]] = MergingSwinBlock

    def fitted(self, window: Grid, host: Grid) -> dict[str, Any]:
        index = relative_index(window, host)
        return {"window_area": window[0] * window[1], "relative_position_index": index}


def _merged_grids(blocks: Sequence[Any], slots: Sequence[Slot]) -> list[Grid | None]:
    """The size of the map that enters each block; None up to and including the first merge."""
    grids: list[Grid | None] = []
    grid, width = None, blocks[0].dim
    for block, slot in zip(blocks, slots, strict=True):
        grid = halve(grid) if grid is not None and block.dim != width else grid
        width, site = block.dim, slot.site
        grids.append(grid)
        grid = site.grid_out if site is not None and site.merges else grid
    return grids


def _resolution(block: Any) -> Grid:
    """The size of the map that a block was made for."""
    found = getattr(block, "input_resolution", None) or block.feat_size
    return cast("Grid", tuple(found))


def _set_(attn: Any, values: dict[str, Any]) -> None:
    device = attn.qkv.weight.device
    for name, value in values.items():
        setattr(attn, name, value.to(device) if isinstance(value, Tensor) else value)


def _even_side(length: int, most: int) -> int:
    """The side of windows that cover a length with the fewest windows and the least padding."""
    return -(-length // -(-length // most))


def relative_index(window: Grid, host: Grid) -> Tensor:
    """Indices into the host's table of relative positions for the pairs in a smaller window."""
    rows, columns = torch.meshgrid(*(torch.arange(side) for side in window), indexing="ij")
    rows, columns = rows.flatten(), columns.flatten()
    down = rows[:, None] - rows[None] + host[0] - 1
    right = columns[:, None] - columns[None] + host[1] - 1
    return down * (2 * host[1] - 1) + right


@dataclass(frozen=True, eq=False)
class _Fitted:
    """The windows of a block, and the attributes of its attention that depend on them."""

    window: Grid
    shift: Grid
    whole: bool
    attention: dict[str, Any]


def _host_windows_(block: WindowedMixin) -> _Fitted:
    """Switch to the host's windows, and return those in use before."""
    attention = {name: getattr(block.attn, name) for name in block.slot.original}
    before = _Fitted(block.window, block.shift, block.whole, attention)
    host = cast("Any", block)
    window, shift = cast("Grid", tuple(host.window_size)), cast("Grid", tuple(host.shift_size))
    _set_windows_(block, _Fitted(window, shift, True, block.slot.original))
    return before


def _resume_windows_(block: WindowedMixin) -> None:
    """Return to the windows that fit the merged map."""
    if block.paused is not None:
        _set_windows_(block, block.paused)
        block.paused = None


def _set_windows_(block: WindowedMixin, windows: _Fitted) -> None:
    block.window, block.shift, block.whole = windows.window, windows.shift, windows.whole
    _set_(block.attn, windows.attention)

"""What grid networks share: maps as tokens, pooling by size, feature maps at full size."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from timm.layers.adaptive_avgmax_pool import SelectAdaptivePool2d
from timm.models._features import FeatureListNet, feature_take_indices
from torch import Tensor, nn

from ltm.adapters.base import Adapter, Block
from ltm.adapters.blocks import Tokens, TokenState, become_, inverted, require_sizes
from ltm.adapters.conversion import Resizable
from ltm.core.schedule import Grid
from ltm.methods.base import MethodConfig, Site

_SMALL_MAP = 64
"""Up to this side, matrix products resample a map faster than torch's own kernel on a GPU."""


def map_to_tokens(x: Tensor) -> Tensor:
    """`b c h w -> b (h w) c`."""
    return x.flatten(2).transpose(1, 2)


def tokens_to_map(x: Tensor, grid: Grid) -> Tensor:
    """`b (h w) c -> b c h w`."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], *grid)


def stretch(x: Tensor, size: Sequence[int]) -> Tensor:
    """Resample a map bilinearly.

    torch's GPU kernel has a thread per pixel of one map, so small maps leave the GPU idle. Two
    matrix products are many times faster.
    """
    if x.is_cuda and max(*x.shape[2:], *size) <= _SMALL_MAP:
        return stretch_by_products(x, size)
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def stretch_by_products(x: Tensor, size: Sequence[int]) -> Tensor:
    """Resample rows and columns by matrix products, in single precision even under autocast."""
    rows, columns = (
        _linear(before, after, x) for before, after in zip(x.shape[2:], size, strict=True)
    )
    with torch.autocast(x.device.type, enabled=False):
        return (rows.mT @ (x.float() @ columns)).to(x.dtype)


def _linear(num_in: int, num_out: int, like: Tensor) -> Tensor:
    """The matrix `n m` of linear interpolation."""
    each = torch.eye(num_in, device=like.device)[None]
    return F.interpolate(each, size=num_out, mode="linear", align_corners=False)[0]


class SizedPool(SelectAdaptivePool2d):
    """Average pooling with tokens weighted by size."""

    state: TokenState

    def forward(self, x: Tensor) -> Tensor:
        size = self.state.take_pool()
        if size is not None and self.pool_type in ("avg", "fastavg", "fast"):
            require_sizes(size, x)
            share = (size / size.mean(dim=(1, 2), keepdim=True)).to(x.dtype)
            if x.shape[2:] == size.shape[1:]:
                x = x * share[:, None]
            elif x.shape[1:3] == size.shape[1:]:
                x = x * share[..., None]
        return super().forward(x)


def restore_maps(
    maps: Sequence[Tensor], image: Grid, reductions: Sequence[int], *, channels_last: bool = False
) -> list[Tensor]:
    """Resample feature maps to the sizes that their strides imply."""

    def restore(feature: Tensor, reduction: int) -> Tensor:
        nominal = [-(-side // reduction) for side in image]
        return feature if list(feature.shape[-2:]) == nominal else stretch(feature, nominal)

    if channels_last:
        moved = [feature.permute(0, 3, 1, 2) for feature in maps]
        return [f.permute(0, 2, 3, 1) for f in restore_maps(moved, image, reductions)]
    return [restore(feature, r) for feature, r in zip(maps, reductions, strict=True)]


def _require_images(x: Tensor) -> None:
    """Raise a ValueError for an empty batch, which timm's grid networks cannot reshape."""
    if not torch.compiler.is_compiling() and x.shape[0] == 0:
        raise ValueError("images: got an empty batch; this network needs at least one image.")


class MergingGridModel(Resizable):
    """A converted grid network: it pools by size, and its intermediates have their full size."""

    token_state: TokenState

    def forward_features(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """Timm's own; the head knows the sizes of these features, even after other forwards."""
        _require_images(x)
        state = self.token_state
        state.open()
        features = super().forward_features(x, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]
        state.remember(features, Tokens(size=state.last_pool()))
        return features

    def forward_head(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """Timm's own, on features of any forward."""
        known = self.token_state.recall(x)
        if known is not None:
            self.token_state.frame.pool = known.size
        return super().forward_head(x, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]

    def reset_classifier(self, num_classes: int, *args: Any, **options: Any) -> None:
        """As for all networks; a new pool also pools by size."""
        super().reset_classifier(num_classes, *args, **options)
        _size_pools_(self, self.token_state)

    def forward_intermediates(
        self, x: Tensor, indices: int | list[int] | None = None, *args: Any, **options: Any
    ) -> Any:
        """Timm's own, with maps resampled to the sizes that their strides imply."""
        _require_images(x)
        info = cast("Any", self).feature_info
        self.token_state.open()
        out = super().forward_intermediates(x, indices, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]
        taken, _ = feature_take_indices(len(info), indices)
        reductions = [info[index]["reduction"] for index in taken]
        image = (x.shape[-2], x.shape[-1])
        if isinstance(out, tuple):
            return out[0], restore_maps(out[1], image, reductions)
        return restore_maps(out, image, reductions)


class MergingFeatures(FeatureListNet):
    """timm's `features_only` network around converted blocks."""

    token_state: TokenState

    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        _require_images(x)
        self.token_state.open()
        maps = super().forward(x)
        reductions = cast("Any", self).feature_info.reduction()
        last = str(cast("Any", self).output_fmt).endswith("NHWC")
        return restore_maps(maps, (x.shape[-2], x.shape[-1]), reductions, channels_last=last)


def shrunk_maps(network: nn.Module, x: Tensor) -> list[Tensor]:
    """The maps of a converted grid network before they are resampled to full size."""
    if isinstance(network, FeatureListNet):
        return FeatureListNet.forward(network, x)
    inner = getattr(network, "model", None)
    if isinstance(inner, MergingGridModel):
        host = cast("Any", super(MergingGridModel, inner))
        places = cast("Any", network).out_indices
        return host.forward_intermediates(x, indices=places, intermediates_only=True)
    return network(x)


def _size_pools_(model: nn.Module, state: TokenState) -> None:
    """Make the pools of a network weight tokens by size."""
    for module in model.modules():
        if type(module) is SelectAdaptivePool2d:
            become_(module, SizedPool)
            cast("SizedPool", module).state = state


class GridAdapter(Adapter):
    """A family whose networks work on maps; its units are the blocks in `hosts`."""

    models: ClassVar[dict[type[nn.Module], type[nn.Module]]]
    """The classes of its networks, and what they become."""
    merging: ClassVar[type[nn.Module]]
    """What its units become."""

    @abstractmethod
    def convert_units_(
        self, units: list[Any], config: MethodConfig, sites: Sequence[Site], state: TokenState
    ) -> None:
        """Turn the units into merging ones."""

    @abstractmethod
    def revert_unit_(self, unit: Any) -> None:
        """Undo the conversion of a unit."""

    def refusal(self, model: nn.Module) -> str | None:
        return None

    def units(self, model: nn.Module) -> list[Any]:
        return [module for module in model.modules() if isinstance(module, self.hosts)]

    def num_classes(self, model: nn.Module) -> int:
        """The number of classes of a network, which may be inside another module; 0 if none."""
        found = (module for module in model.modules() if isinstance(module, tuple(self.models)))
        return int(getattr(next(found, model), "num_classes", 0) or 0)

    def convert_(
        self, model: nn.Module, config: MethodConfig, sites: Sequence[Site], state: TokenState
    ) -> None:
        self.convert_units_(self.units(model), config, sites, state)
        merging = self._networks()
        for module in model.modules():
            if type(module) in merging:
                become_(module, merging[type(module)])
                cast("Any", module).token_state = state
        _size_pools_(model, state)

    def _networks(self) -> dict[type[nn.Module], type[nn.Module]]:
        return {**self.models, FeatureListNet: MergingFeatures}

    def revert_(self, model: nn.Module) -> None:
        for unit in self.units(model):
            if isinstance(unit, self.merging):
                self.revert_unit_(unit)
        hosts = inverted(self._networks())
        for module in model.modules():
            if type(module) in hosts:
                module.__dict__.pop("token_state", None)
                become_(module, hosts[type(module)])
            elif type(module) is SizedPool:
                del module.state
                become_(module, SelectAdaptivePool2d)


def blocks_by_width(
    model: nn.Module, modules: Sequence[nn.Module], widths: Sequence[int]
) -> tuple[Block, ...]:
    """The blocks of a network whose stages differ in width."""
    paths = {module: path for path, module in model.named_modules()}
    stages = sorted(set(widths))
    return tuple(
        Block(paths[module], width, stages.index(width))
        for module, width in zip(modules, widths, strict=True)
    )


def starts_of(widths: Sequence[int], config: MethodConfig) -> list[bool]:
    """Whether patches enter each block: at the first one of a stage, or if grids are restored."""
    before = [None, *widths[:-1]]
    return [a != b or not config.keeps_grid() for a, b in zip(widths, before, strict=True)]

"""Convert a model, change how much it merges, look inside, and undo it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from ltm.adapters import Conversion, adapter_of, find_adapter, select_adapter
from ltm.adapters.blocks import MergingMixin, Record
from ltm.adapters.conversion import (
    ATTRIBUTE,
    adopt_,
    all_or_nothing,
    convert_,
    macs_of,
    mergers_of,
    revert_,
)
from ltm.core.cost import evaluating
from ltm.core.merge import compose_weights
from ltm.core.schedule import Grid
from ltm.methods.base import Merger, MethodConfig, Site


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion changed, to be printed."""

    family: str
    method: str
    sites: tuple[Site, ...]
    num_blocks: int
    macs_before: int
    macs_after: int
    learns: bool = False
    """Whether its masks are learned: they have to be trained."""

    @property
    def share(self) -> float:
        """MACs after the conversion over MACs before it."""
        return self.macs_after / self.macs_before

    def __str__(self) -> str:
        merging = [site for site in self.sites if site.merges]
        headline = (
            f"{self.method} on {self.family}: {len(merging)} of {self.num_blocks} blocks merge, "
            f"{self.macs_before / 1e9:.3f} -> {self.macs_after / 1e9:.3f} GMACs "
            f"({self.share:.3f} of the original)"
        )
        lines = [f"  block {site.block:>2}: {_tokens(site)}" for site in merging]
        if self.learns:
            lines.append("  Its masks are learned: train them, or the network loses accuracy.")
        return "\n".join([headline, *lines])


def _tokens(site: Site) -> str:
    if site.grid_in is not None and site.grid_out is not None:
        (h, w), (h2, w2) = site.grid_in, site.grid_out
        return f"{h} x {w} -> {h2} x {w2} tokens"
    return f"{site.num_in} -> {site.num_out} tokens"


def merge_tokens_(
    model: nn.Module, config: MethodConfig, image_size: int | tuple[int, int] | None = None
) -> ConversionReport:
    """Make a network merge tokens, in place.

    The model keeps its checkpoint keys and its interface; `unmerge_tokens_` undoes it. If the model
    or the config cannot work, a ValueError is raised before the model is changed.
    """
    _require_network(model)
    if not isinstance(config, MethodConfig):
        raise TypeError(
            f"config: got {type(config).__name__}; give a method's config, such as ltm.LTM()."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"model: got {type(model).__name__}; convert the network before it is wrapped."
        )
    if any(isinstance(module, MergingMixin) for module in model.modules()):
        raise ValueError(
            "model: it merges tokens already; use unmerge_tokens_ or set_ratio_ on the network "
            "that was converted."
        )
    select_adapter(model)  # which says why not before the size is asked for
    convert_(model, config, image_size_of(model, image_size))
    return report(model)


def _require_network(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: got {type(model).__name__}; give a network, timm.create_model(...)."
        )


def unmerge_tokens_(model: nn.Module) -> None:
    """Undo `merge_tokens_`."""
    conversion_of(model)
    revert_(model)


def unmerged_copy(model: nn.Module, *, share_weights: bool = False) -> nn.Module:
    """A copy of a model that merges nothing, whether or not the model does.

    With `share_weights` the copy uses the tensors of the model, which merging does not change.
    """
    shared = [*model.parameters(), *model.buffers()] if share_weights else []
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    if is_merging(copied):
        revert_(copied)
    return copied


def merging_copy(
    model: nn.Module,
    config: MethodConfig,
    image_size: int | tuple[int, int] | None = None,
    *,
    share_weights: bool = False,
) -> nn.Module:
    """A copy of a model that merges as `config` says, whether or not the model merges."""
    copied = unmerged_copy(model, share_weights=share_weights)
    merge_tokens_(copied, config, image_size)
    return copied


def set_ratio_(model: nn.Module, ratio: float) -> ConversionReport:
    """Change how much a converted model merges; learned values are kept if their shapes fit."""
    return reconvert_(model, conversion_of(model).config.with_amount(ratio=ratio))


def reconvert_(
    model: nn.Module, config: MethodConfig, image_size: tuple[int, int] | None = None
) -> ConversionReport:
    """Convert a converted model again, with other settings of the same method."""
    before = conversion_of(model)
    if before.frozen:
        raise ValueError("model: it is frozen, and a frozen model cannot be changed.")
    with all_or_nothing(model):
        learned = mergers_of(model)
        revert_(model)
        convert_(model, config, image_size or before.image_size)
        adopt_(model, learned)
    return report(model)


def is_merging(model: nn.Module) -> bool:
    """Whether the model was converted."""
    return isinstance(getattr(model, ATTRIBUTE, None), Conversion)


def merging_network(model: nn.Module) -> nn.Module | None:
    """The converted network in a model, such as a detector's backbone; None if there is none."""
    return next((module for module in model.modules() if is_merging(module)), None)


def conversion_of(model: nn.Module) -> Conversion:
    """The `Conversion` of a model; a ValueError if it was not converted."""
    conversion = getattr(model, ATTRIBUTE, None)
    if not isinstance(conversion, Conversion):
        raise ValueError("model: it merges no tokens; call merge_tokens_ first.")
    return conversion


def note_(model: nn.Module, **changes: Any) -> None:
    """Change fields of a model's `Conversion`."""
    setattr(model, ATTRIBUTE, dataclasses.replace(conversion_of(model), **changes))


def report(model: nn.Module) -> ConversionReport:
    """The report of a converted model.

    MACs are those of `gmacs`, which include informative weights from the start: a budget that is
    met here is still met once class statistics are collected. `freeze_` counts again.
    """
    done = conversion_of(model)
    num_blocks = done.sites[0].depth if done.sites else 0
    return ConversionReport(
        family=done.family,
        method=done.config.name,
        sites=done.sites,
        num_blocks=num_blocks,
        macs_before=done.macs_before,
        macs_after=done.macs_after,
        learns=learns_masks(model) and not done.frozen,
    )


def learns_masks(model: nn.Module) -> bool:
    """Whether a converted model has masks that are learned in training."""
    done = conversion_of(model)
    return any(done.config.learns(site) for site in done.sites if site.merges)


def mergers(model: nn.Module) -> Iterator[tuple[str, Merger]]:
    """The mergers of a converted model, by module path."""
    yield from mergers_of(model).items()


def token_counts(model: nn.Module) -> list[int | Grid]:
    """Tokens after each site, prefix excluded; (height, width) on grids."""
    return [site.grid_out or site.num_out for site in conversion_of(model).sites]


def gmacs(model: nn.Module, image_size: int | tuple[int, int] | None = None) -> float:
    """Billions of multiply-adds for one image, converted or not, fused attention included.

    Informative weights are counted even before class statistics are collected, so the number does
    not change when they are.
    """
    _require_network(model)
    return macs_of(model, image_size_of(model, image_size)) / 1e9


def image_size_of(model: nn.Module, given: int | tuple[int, int] | None = None) -> tuple[int, int]:
    """The given input size, or else the model's own."""
    if given is not None:
        return _pixels(given)
    if is_merging(model):
        return conversion_of(model).image_size
    for module in model.modules():
        patch_embed: Any = getattr(module, "patch_embed", None)
        if getattr(patch_embed, "img_size", None):
            return tuple(patch_embed.img_size)
    known = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    if "input_size" in known:
        return tuple(known["input_size"][-2:])
    adapter = find_adapter(model)
    own = None if adapter is None else adapter.image_size(model)
    if own is not None:
        return _pixels(own)
    raise ValueError("image_size: the model does not say; give it, for example image_size=224.")


def _pixels(given: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width in pixels; a ValueError if the value is no size."""
    sides = tuple(given) if isinstance(given, tuple | list) else (given, given)
    try:
        height, width = map(index, sides)
    except (TypeError, ValueError):
        height = width = 0
    if min(height, width) < 1:
        raise ValueError(f"image_size: got {given!r}; give a number of pixels, or (height, width).")
    return height, width


@torch.no_grad()
def merge_maps(model: nn.Module, images: Tensor) -> dict[int, Tensor]:
    """The weight of each patch in each token, `b n0 p`, by merging block.

    Columns sum to one. The patches are those at the start of the block's stage.
    """
    with evaluating(model), watching(model) as records:
        model(images)
    return {
        record.block: compose_weights(record.merges).expand(len(images), -1, -1)
        for record in records
        if record.decision is not None
    }


@contextmanager
def watching(model: nn.Module) -> Iterator[list[Record]]:
    """Collect what happens at each block of a converted model in forwards inside.

    They run eagerly, even if the model is compiled: graphs keep no records.
    """
    state = conversion_of(model).state
    with torch.compiler.set_stance("force_eager"), state.watching() as records:
        yield records


@contextmanager
def merging_off(model: nn.Module) -> Iterator[None]:
    """Make forwards and backwards inside those of the original model.

    Mergers stay in place, unused: for warm-up epochs, and for comparison with the original.
    """
    done = conversion_of(model)
    with done.state.pausing(), adapter_of(done.family).pausing(model):
        yield


@contextmanager
def announcing(model: nn.Module, labels: Tensor | None) -> Iterator[None]:
    """Give the mergers the labels of the images, in training forwards inside."""
    with conversion_of(model).state.announcing(labels):
        yield

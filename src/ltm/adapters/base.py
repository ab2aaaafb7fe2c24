"""What every family of networks shares: merging blocks, and the adapter that makes them.

Conversion swaps the class of a host block for a subclass of it that merges between its children;
the block gains one child, `merger`. Undoing swaps the class back.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ltm import kernels
from ltm.adapters.state import Record, Tokens, TokenState
from ltm.core.cost import meta_images, run_on_meta
from ltm.core.merge import Merge
from ltm.core.schedule import Grid
from ltm.methods.base import Decision, Hints, Merger, MethodConfig, Site


@dataclass(frozen=True)
class Block:
    """One transformer block of a host network, before anything is converted."""

    path: str
    module: nn.Module
    width: int
    stage: int
    """Which run of blocks at one resolution it belongs to."""


@dataclass(frozen=True)
class Run:
    """Consecutive blocks on one sequence of tokens, which is whole again after the last of them."""

    num_in: int
    grid: Grid
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The places where a network can merge, at one input size."""

    blocks: tuple[Block, ...]
    num_prefix: int
    num_classes: int
    runs: tuple[Run, ...]
    """How tokens flow where a method keeps no grid."""
    entry: Grid | None = None
    """The grid at the first block of a grid network; None for sequences."""
    multiple: int = 1
    """Sides that suit the network, its windows or its next stage, are multiples of this."""
    sites: tuple[int, ...] | None = None
    """The blocks of a grid network that merge, where a method prefers few; None: all of them."""

    @property
    def is_sequence(self) -> bool:
        """Tokens are one sequence from the first block to the last."""
        return self.entry is None

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        stages = [block.stage for block in self.blocks]
        return tuple(stages.count(stage) for stage in sorted(set(stages)))


@dataclass(frozen=True, eq=False)
class Conversion:
    """What was done to a model: kept on it, read by everything that works on converted models."""

    family: str
    config: MethodConfig
    image_size: tuple[int, int]
    sites: tuple[Site, ...]
    state: TokenState
    macs_before: int
    macs_after: int
    frozen: bool = False


@dataclass(eq=False)
class Slot:
    """A merging block's part in the conversion; a plain attribute of the block."""

    state: TokenState
    index: int
    """Position among the network's blocks."""
    starts: bool
    """Tokens are patches again when they enter this block."""
    proportional: bool
    counting: float = 1.0
    """The power of the sizes that the attention counts, where it is proportional."""
    site: Site | None = None
    opens: bool = False
    """A forward pass begins at this block."""
    last: bool = False
    """The head comes after this block."""
    hands_on: bool = True
    """A later site of the same stage takes up what this one hands on."""
    original: dict[str, Any] = field(default_factory=dict)
    """Host attributes to give back when the conversion is undone."""


class MergingMixin(nn.Module):
    """The part of a merging block that does not depend on the family."""

    slot: Slot
    merger: Merger | None

    def entering(self, x: Tensor) -> Tokens:
        """What is known about the tokens that come in."""
        slot = self.slot
        if slot.opens:
            slot.state.open()
        return slot.state.enter(slot.index, x, starts=slot.starts)

    def look(self, qkv: Tensor, size: Tensor | None, needs: frozenset[str]) -> dict[str, Tensor]:
        """The hints that a merger needs, from the output of the block's `qkv` projection."""
        raise NotImplementedError

    def decide(self, z: Tensor, hints: Hints, **context: Any) -> Decision:
        """Ask the merger, with the hints that it needs added to those that are at hand."""
        merger = cast("Merger", self.merger)
        if merger.needs:
            qkv = self.slot.state.take_projected(self.slot.index)
            found = self.look(qkv, hints.size, merger.needs)
            hints = dataclasses.replace(hints, **found)
        return merger(z, hints)

    def merge(
        self, z: Tensor, tokens: Tokens, *, grid: Grid | None = None, **context: Any
    ) -> tuple[Tensor, Tokens, Merge | None]:
        """Decide, merge, and note down what the next block has to know."""
        slot, site, merger = self.slot, self.slot.site, self.merger
        hints, decision, merged = None, None, z
        if site is not None and merger is not None and slot.state.merging:
            num_patches = z.shape[1] - site.num_prefix
            merger.require_planned(num_patches, grid, tokens.patches)
            grid_out = None if grid is None else site.grid_for(grid)
            num_out = site.count_for(num_patches) if grid_out is None else grid_out[0] * grid_out[1]
            if num_out < num_patches or merger.own_counts:
                z = kernels.compact(z)
                hints = Hints(
                    num_out=num_out,
                    grid_in=grid,
                    grid_out=grid_out,
                    patches=tokens.patches,
                    size=tokens.size,
                    carry=tokens.carry,
                    labels=tokens.labels,
                )
                decision = self.decide(z, hints, **context)
                values = decision.values if slot.hands_on else None
                merged, size, means = decision.merge.apply(z, tokens.size, values)
                merges = (*tokens.merges, decision.merge)
                carry = decision.carry if means is None else means
                tokens = dataclasses.replace(
                    tokens, size=size, carry=carry, merges=merges, grid=grid_out or tokens.grid
                )
        slot.state.leave(slot.index, tokens)
        if slot.state.watched:
            hints = hints or Hints(num_out=z.shape[1], size=tokens.size)
            slot.state.record(
                Record(slot.index, merger, hints, decision, merged, tokens.size, tokens.merges)
            )
        return merged, tokens, None if decision is None else decision.merge


class Adapter(ABC):
    """How one family of networks is recognised, laid out and converted."""

    family: ClassVar[str]
    covers: ClassVar[str]
    """For error messages: what this family accepts."""
    shrinks_maps: ClassVar[bool] = False
    """Dense tasks lose precision where merged tokens shrink its maps; restored ones do not."""

    hosts: ClassVar[tuple[type[nn.Module], ...]]
    """A network that holds one of these modules belongs to this family."""

    def finds(self, model: nn.Module) -> bool:
        """Whether the model belongs to this family."""
        return any(isinstance(module, self.hosts) for module in model.modules())

    @abstractmethod
    def refusal(self, model: nn.Module) -> str | None:
        """Why a model of this family cannot be converted, if so."""

    @abstractmethod
    def layout(self, model: nn.Module, image_size: tuple[int, int]) -> Layout:
        """Where the model can merge. `model` is a copy on `meta` and may be run."""

    @abstractmethod
    def convert_(
        self, model: nn.Module, config: MethodConfig, sites: Sequence[Site], state: TokenState
    ) -> None:
        """Turn every block into a merging block, with a merger where there is a site."""

    @abstractmethod
    def units(self, model: nn.Module) -> list[nn.Module]:
        """The modules whose cost depends on the shape of their input and their sites alone."""

    @abstractmethod
    def revert_(self, model: nn.Module) -> None:
        """Undo `convert_`."""

    def host_arguments(self, model: nn.Module) -> dict[str, Any]:
        """Arguments with which timm makes the network again, besides those of all networks."""
        return {}

    @contextmanager
    def pausing(self, model: nn.Module) -> Iterator[None]:
        """Give the blocks back for a while what conversion fitted to fewer tokens."""
        yield


def make_slots(
    config: MethodConfig, sites: Sequence[Site], state: TokenState, starts: Sequence[bool]
) -> list[Slot]:
    """A slot per block, `starts` saying at which blocks tokens are patches again."""
    by_block = {site.block: site for site in sites}
    taken_up = _taken_up({site.block for site in sites if site.merges}, starts)
    return [
        Slot(
            state,
            index,
            starts=fresh,
            proportional=config.proportional_attention,
            site=by_block.get(index),
            opens=index == 0,
            last=index == len(starts) - 1,
            hands_on=taken_up[index],
        )
        for index, fresh in enumerate(starts)
    ]


def _taken_up(merging: Collection[int], starts: Sequence[bool]) -> list[bool]:
    """Of every block, whether one of the blocks after it in its stage merges."""
    found, later = [], False
    for index in reversed(range(len(starts))):
        found.append(later)
        later = (later or index in merging) and not starts[index]
    return found[::-1]


def starts_of(widths: Sequence[int], config: MethodConfig) -> list[bool]:
    """The first block of each stage (each has a width of its own); all, if grids are restored."""
    before = [None, *widths[:-1]]
    return [a != b or not config.keeps_grid() for a, b in zip(widths, before, strict=True)]


def become_(module: Any, kind: type[nn.Module]) -> None:
    """Swap the class of a module; everything it holds stays."""
    module.__class__ = kind


class RecordedProjection(nn.Module):
    """A projection of the host whose output the block may read once, for queries and keys."""

    recorded: tuple[TokenState, int]
    """The state, and the index of the block."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        state, index = self.recorded
        if state.merging:
            state.frame.projected[index] = out
        return out


class RecordedLinear(RecordedProjection, nn.Linear):
    """A recorded linear layer."""


class RecordedConv2d(RecordedProjection, nn.Conv2d):
    """A recorded convolution."""


_RECORDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RecordedLinear,
    nn.Conv2d: RecordedConv2d,
}


def record_(projection: nn.Module, state: TokenState, index: int) -> None:
    """Make a projection leave its output in the state, whatever its class (LoRA's, for example)."""
    host = type(projection)
    if host not in _RECORDED:
        _RECORDED[host] = type(f"Recorded{host.__name__}", (RecordedProjection, host), {})
    become_(projection, _RECORDED[host])
    cast("RecordedProjection", projection).recorded = (state, index)


def stop_recording_(projection: nn.Module) -> tuple[TokenState, int] | None:
    """Undo `record_`; returns what it was given, if it was."""
    if not isinstance(projection, RecordedProjection):
        return None
    recorded = projection.recorded
    del projection.recorded
    become_(projection, type(projection).__mro__[2])
    return recorded


def convert_block_(
    block: Any, config: MethodConfig, slot: Slot, merging: type[nn.Module], projection: nn.Module
) -> None:
    """A host block becomes a merging one; its projection is recorded where the merger needs it.

    The merger comes on the device of the block's weights.
    """
    merger, site = None, slot.site
    if site is not None and site.merges:
        device = next(block.parameters()).device
        with torch.device("meta") if device.type == "meta" else torch.device("cpu"):
            merger = config.build(site)
        merger = merger.to(device).train(block.training)
    block.merger, block.slot = merger, slot
    if merger is not None and merger.needs:
        record_(projection, slot.state, slot.index)
    become_(block, merging)


def revert_block_(block: Any, host: type[nn.Module], projection: nn.Module) -> None:
    """Undo `convert_block_`."""
    stop_recording_(projection)
    del block.merger, block.slot
    become_(block, host)


def observed_shapes(
    meta_model: nn.Module, modules: Sequence[nn.Module], image_size: tuple[int, int]
) -> list[tuple[int, ...]]:
    """The shape of what enters each module, from one forward on `meta`."""
    shapes: dict[nn.Module, tuple[int, ...]] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        shapes.setdefault(module, tuple(args[0].shape))

    handles = [module.register_forward_pre_hook(note) for module in modules]
    try:
        run_on_meta(meta_model, meta_images(meta_model, image_size))
    finally:
        for handle in handles:
            handle.remove()
    return [shapes[module] for module in modules]


_ADAPTERS: list[Adapter] = []


def register(adapter: type[Adapter]) -> type[Adapter]:
    """Make a family known. Families that contain another's blocks are registered before it."""
    _ADAPTERS.append(adapter())
    return adapter


def unregister(adapter: type[Adapter]) -> None:
    """Undo `register`."""
    _ADAPTERS[:] = [known for known in _ADAPTERS if type(known) is not adapter]


def adapters() -> tuple[Adapter, ...]:
    """All known families, in the order in which they are asked."""
    return tuple(_ADAPTERS)


def adapter_of(family: str) -> Adapter:
    """The adapter of a family by name."""
    return next(adapter for adapter in _ADAPTERS if adapter.family == family)


def select_adapter(model: nn.Module) -> Adapter:
    """The family that a model belongs to; what cannot be converted is refused by name."""
    for adapter in _ADAPTERS:
        if adapter.finds(model):
            reason = adapter.refusal(model)
            if reason is not None:
                raise ValueError(f"model: {type(model).__name__} cannot be converted: {reason}")
            return adapter
    known = "; ".join(adapter.covers for adapter in _ADAPTERS)
    raise ValueError(
        f"model: {type(model).__name__} has no block that can merge tokens. Known are: {known}."
    )

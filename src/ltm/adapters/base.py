"""The contract of a family of networks, and the registry of families."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor, nn

from ltm.adapters.blocks import Tokens, TokenState
from ltm.core.cost import meta_images, run_on_meta
from ltm.core.schedule import Grid
from ltm.methods.base import MethodConfig, Site


@dataclass(frozen=True)
class Block:
    """One transformer block of a host network."""

    path: str
    """Its module path."""
    width: int
    """Channels of a token."""
    stage: int
    """The index of its stage; blocks of a stage have one resolution."""


@dataclass(frozen=True)
class Run:
    """Consecutive blocks on one sequence of tokens; after the last one all tokens are restored."""

    num_in: int
    grid: Grid
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Where a network can merge, at one input size."""

    blocks: tuple[Block, ...]
    num_prefix: int
    num_classes: int
    runs: tuple[Run, ...]
    """The sequences of tokens, for methods that keep no grid."""
    entry: Grid | None = None
    """The grid at the first block of a grid network; None on sequence networks."""
    multiple: int = 1
    """The sides of merged grids should be multiples of this, to fit windows or the next stage."""
    sites: tuple[int, ...] | None = None
    """The blocks of a grid network that merge if a method prefers few; None means all."""

    @property
    def is_sequence(self) -> bool:
        """Whether the tokens are one sequence from the first block to the last."""
        return self.entry is None

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        stages = [block.stage for block in self.blocks]
        return tuple(stages.count(stage) for stage in sorted(set(stages)))


@dataclass(frozen=True, eq=False)
class Conversion:
    """What was done to a model; the model holds it as `token_merging`."""

    family: str
    config: MethodConfig
    image_size: tuple[int, int]
    sites: tuple[Site, ...]
    state: TokenState
    macs_before: int
    macs_after: int
    frozen: bool = False

    @property
    def sizes(self) -> Tensor | None:
        """How many patches each token of the last forward stands for, prefix included.

        `b t`, or `1 t` if it is the same for all images; None if nothing was merged.
        """
        return self.leaving().size

    def leaving(self, features: Tensor | None = None) -> Tokens:
        """What is known about these features, or about those of the last forward."""
        last = self.sites[-1].depth - 1 if self.sites else -1
        return self.state.left_by(last) if features is None else self.state.known(features, last)


class Adapter(ABC):
    """How to recognise and convert one family of networks, and where its blocks are."""

    family: ClassVar[str]
    covers: ClassVar[str]
    """The networks of this family, for error messages."""
    shrinks_maps: ClassVar[bool] = False
    """Whether merging shrinks its feature maps, which costs dense tasks precision."""

    hosts: ClassVar[tuple[type[nn.Module], ...]]
    """A model that contains one of these modules belongs to this family."""

    def finds(self, model: nn.Module) -> bool:
        """Whether a model belongs to this family."""
        return any(isinstance(module, self.hosts) for module in model.modules())

    @abstractmethod
    def refusal(self, model: nn.Module) -> str | None:
        """Why a model of this family cannot be converted; None if it can."""

    @abstractmethod
    def layout(self, model: nn.Module, image_size: tuple[int, int]) -> Layout:
        """Where the model can merge; `model` is a copy on `meta`, which may be run."""

    @abstractmethod
    def convert_(
        self, model: nn.Module, config: MethodConfig, sites: Sequence[Site], state: TokenState
    ) -> None:
        """Turn each block into a merging one, with a merger if it is a site."""

    @abstractmethod
    def units(self, model: nn.Module) -> list[nn.Module]:
        """The modules whose cost depends only on the shape of their input and on their sites."""

    @abstractmethod
    def revert_(self, model: nn.Module) -> None:
        """Undo `convert_`."""

    def networks(self) -> tuple[type[nn.Module], ...]:
        """Classes besides timm's that the `config.json` of a saved folder may name."""
        return ()

    def saved_entries(self, model: nn.Module) -> dict[str, Any] | None:
        """The entries of `config.json` for such a network; None for networks of timm."""
        return None

    def give_scores_(self, model: nn.Module) -> None:  # noqa: B027 - timm's networks do
        """Make a classifier of another package take images and return scores, as timm's do."""

    def image_size(self, model: nn.Module) -> int | tuple[int, int] | None:
        """The image size of a network that does not tell it the way timm's do; else None."""
        return None

    def take_images_(self, model: nn.Module) -> None:  # noqa: B027 - most networks do
        """Make a network that takes something else, such as patches, take images."""

    def host_arguments(self, model: nn.Module) -> dict[str, Any]:
        """Arguments that timm needs to make the network again, besides the usual ones."""
        return {}

    @contextmanager
    def pausing(self, model: nn.Module) -> Iterator[None]:
        """Undo inside what conversion fitted to fewer tokens, while merging is off."""
        yield


def observed_shapes(
    meta_model: nn.Module, modules: Sequence[nn.Module], image_size: tuple[int, int]
) -> list[tuple[int, ...]]:
    """The shape of each module's first input, from a forward on `meta`."""
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
    """Register a family; one that contains the blocks of another has to come before it."""
    _ADAPTERS.append(adapter())
    return adapter


def unregister(adapter: type[Adapter]) -> None:
    """Undo `register`."""
    _ADAPTERS[:] = [known for known in _ADAPTERS if type(known) is not adapter]


def adapters() -> tuple[Adapter, ...]:
    """All registered families, in the order in which they are tried."""
    return tuple(_ADAPTERS)


def adapter_of(family: str) -> Adapter:
    """The adapter of a family, by its name."""
    return next(adapter for adapter in _ADAPTERS if adapter.family == family)


_FAMILIES_OF = {"transformers": "ltm.adapters.transformers"}
"""Modules with the families of other packages; imported once they are needed."""


def import_families(packages: Iterable[str]) -> None:
    """Register the families of these packages, if there are any."""
    for package in set(packages) & _FAMILIES_OF.keys():
        import_module(_FAMILIES_OF[package])


def find_adapter(model: nn.Module) -> Adapter | None:
    """The family of a model; None if there is none."""
    import_families(type(module).__module__.partition(".")[0] for module in model.modules())
    return next((adapter for adapter in _ADAPTERS if adapter.finds(model)), None)


def select_adapter(model: nn.Module) -> Adapter:
    """The family of a model; a ValueError says why a model cannot be converted."""
    adapter = find_adapter(model)
    if adapter is not None:
        reason = adapter.refusal(model)
        if reason is not None:
            raise ValueError(f"model: {type(model).__name__} cannot be converted: {reason}")
        return adapter
    known = "; ".join(adapter.covers for adapter in _ADAPTERS)
    raise ValueError(
        f"model: {type(model).__name__} has no block that can merge tokens. Known are: {known}."
    )

"""What a token-merging method is: a config that builds one Merger per site.

A method knows nothing about networks. A block gives it tokens and hints, and it returns a Merge.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast, get_type_hints

from jaxtyping import Float, Int
from torch import Tensor, nn

from ltm.core.merge import Merge
from ltm.core.schedule import Grid, constant_number, require_ratio
from ltm.core.validation import Within, plain, settle

Count = int | Grid
"""Tokens after a site, prefix excluded: a number on sequences, (height, width) on grids."""

AMOUNTS = ("ratio", "per_block", "counts", "num_tokens")
"""The four ways to say how much to merge."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """One merging block, as a method sees it."""

    block: int
    """Position among the network's transformer blocks."""
    depth: int
    """Number of transformer blocks."""
    width: int
    """Channels of a token."""
    num_prefix: int
    num_classes: int
    grid: Grid
    """The patch grid at the start of the block's stage."""
    num_in: int
    num_out: int
    grid_in: Grid | None = None
    """Set if tokens form a rectangle and must form one afterwards."""
    grid_out: Grid | None = None

    @property
    def merges(self) -> bool:
        return self.num_out < self.num_in

    def is_planned(self, num_in: int, grid_in: Grid | None, patches: Grid | None) -> bool:
        """Whether the tokens have the shape that the site was planned for."""
        if self.grid_in is not None:
            return grid_in == self.grid_in
        return num_in == self.num_in and patches in (None, self.grid)

    def count_for(self, num_tokens: int) -> int:
        """Tokens to keep if the sequence has another length than planned."""
        if num_tokens == self.num_in:
            return self.num_out
        return max(1, -(-num_tokens * self.num_out // self.num_in))

    def grid_for(self, grid: Grid) -> Grid:
        """The grid to keep if the grid is not the planned one."""
        if self.grid_in is None or self.grid_out is None:
            raise ValueError("grid_for: this site's tokens form no grid.")
        if grid == self.grid_in:
            return self.grid_out
        (h, w), (h_in, w_in), (h_out, w_out) = grid, self.grid_in, self.grid_out
        return max(1, -(-h * h_out // h_in)), max(1, -(-w * w_out // w_in))


@dataclass(frozen=True, eq=False, kw_only=True)
class Hints:
    """What a block gives a merger besides its tokens. Optional fields are set only if needed.

    Letters: b images, t tokens with their prefix, d a head's channels.
    """

    num_out: int
    grid_in: Grid | None = None
    grid_out: Grid | None = None
    patches: Grid | None = None
    """The patch grid that a sequence's tokens come from, if it is known."""
    size: Float[Tensor, "_ t"] | None = None
    """How many patches each token stands for; None before the first merge."""
    keys: Float[Tensor, "b t d"] | None = None
    """The attention keys, averaged over the heads."""
    importance: Float[Tensor, "b t"] | None = None
    """Attention received from the class token, or from the mean query if there is none."""
    attention: Float[Tensor, "b t"] | None = None
    """Attention received on average over all tokens."""
    carry: Tensor | None = None
    """What the previous site of the same stage handed on: the means of its values, or its carry."""
    labels: Int[Tensor, "_"] | None = None
    """True labels, if they were announced (`ltm.api.announcing`)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Decision:
    """A merge, and what the next site gets: `values`, `carry` or nothing."""

    merge: Merge
    values: Float[Tensor, "_ n"] | None = None
    """A value per token before the merge; the next site gets the means over merged tokens."""
    carry: Tensor | None = None
    """A value about the tokens after the merge, handed on unchanged."""


class Merger(nn.Module, ABC):
    """A method at one site. `needs` names the hints that it reads."""

    needs: frozenset[str] = frozenset()
    keeps_grid: bool = False
    """Whether merged tokens form a rectangle again; if not, grid networks restore their grid."""
    own_counts: bool = False
    """Whether each image keeps its own number of tokens; the plan then holds only on average."""

    constant: bool = False
    """The decision is the same for every image: it does not read the tokens."""

    absent: str | None = None
    """The prefix of its keys while a checkpoint is loaded that has none of them."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site
        self.register_load_state_dict_post_hook(_keep_what_is_absent)  # pyright: ignore[reportUnknownMemberType]

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **options: Any
    ) -> None:
        self.absent = None if any(key.startswith(prefix) for key in state_dict) else prefix
        super()._load_from_state_dict(state_dict, prefix, *args, **options)  # pyright: ignore[reportUnknownMemberType]

    def require_planned(
        self, num_in: int, grid_in: Grid | None, patches: Grid | None = None
    ) -> None:
        """Refuse tokens that the merger cannot take, even if it would not merge them."""

    @abstractmethod
    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        """Decide which of the tokens become one."""

    def set_noise_(self, scale: float) -> None:
        """Set the scale of the noise that explores other choices in training."""

    @property
    def active(self) -> bool:
        """Whether the mask module has everything it needs, such as class statistics."""
        return False

    def unset(self) -> frozenset[str]:
        """Names of tensors that were never set; saved folders leave them out."""
        return frozenset()

    def activate_(self) -> None:
        """Do all the work that a trained mask module does."""

    def reset_classes_(self, num_classes: int) -> None:
        """Forget everything about the classes, because there are new ones."""
        self.site = dataclasses.replace(self.site, num_classes=num_classes)

    def frozen(self, decision: Decision | None, hints: Hints | None) -> Merger:
        """The merger that replaces it in deployment; itself if nothing in it is only for training.

        `decision` is its decision on some image, with the hints it got; None where it made none.
        """
        return self

    def frozen_as(self, saved: Mapping[str, Tensor]) -> Merger:
        """What took the place of a merger like this one, from its tensors in a file, by name.

        The tensors are loaded into it afterwards.
        """
        return self.frozen(None, None)

    def adopt_(self, other: Merger) -> None:
        """Take over what another merger of the same method has learned, where it fits."""
        own = self.state_dict()
        for name, value in other.state_dict().items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)


class StatisticalMerger(Merger):
    """A merger that learns from class statistics: it observes batches, then takes their sums."""

    @property
    @abstractmethod
    def keeps_statistics(self) -> bool:
        """Whether there is anything to learn, with its settings and in its network."""

    @abstractmethod
    def observe(self, merged: Float[Tensor, "b t2 c"], hints: Hints) -> None:
        """Add what came out to the sums."""

    @abstractmethod
    def take_statistics_(self) -> None:
        """Use the sums of all processes from now on. All processes have to call it."""

    @abstractmethod
    def forget_statistics_(self) -> None:
        """Forget the sums and the statistics taken from earlier ones."""

    @abstractmethod
    def forget_sums_(self) -> None:
        """Drop unfinished sums; statistics taken from earlier ones stay."""

    @abstractmethod
    def bound(
        self, merged: Float[Tensor, "b t2 c"], hints: Hints, targets: Tensor
    ) -> Float[Tensor, ""] | None:
        """The information-bottleneck bound of what came out, where statistics are known.

        `targets` are labels (b) or distributions over classes (b a).
        """


def statistical(mergers: Iterable[Merger]) -> list[StatisticalMerger]:
    """Those mergers that keep class statistics."""
    return [m for m in mergers if isinstance(m, StatisticalMerger) and m.keeps_statistics]


def _keep_what_is_absent(merger: Merger, keys: Any) -> None:
    """A checkpoint without a merger's keys leaves the merger unchanged, and no keys are missing."""
    prefix, merger.absent = merger.absent, None
    if prefix is not None:
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.startswith(prefix)]


@dataclass(frozen=True, eq=False, kw_only=True)
class Images:
    """What a method may ask about a converted model and the images it is fitted on."""

    share: Callable[[], float]
    """The mean share of the original's MACs over the images, from the tokens really left."""
    collect_statistics_: Callable[[], object]
    """Let every merger that keeps class statistics observe the images, and take them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExtraLoss:
    """What a method adds to the loss of a batch."""

    value: Float[Tensor, ""]
    share: Float[Tensor, ""] | None = None
    """The share of MACs in this batch, where it differs from image to image."""


_METHODS: dict[str, type[MethodConfig]] = {}


@dataclass(frozen=True, kw_only=True)
class MethodConfig(ABC):
    """A method: its settings, and what the rest of the library asks of it.

    A new method must give a `name` and `build`. It may give, where the default does not suit it:

    - words: `title`, `description`, `describe`, `colour`, `marker`, `aliases`
    - where it merges, and how much: `choose_sites`, `spread`, `prefers_few`, `keeps_grid`,
      `sequences_only`, `counting`, `for_feature_maps`
    - what it takes from images: `needs_images`, `fit_`
    - training: `learning_rate`, `extra_loss`
    - what a calibration may search: `unschedulable`, `choices`, `choice_at`, `scheduled`
    - settings that have parts, or that old files lack: `settings_types`, `from_settings`,
      `to_settings`, `earlier`, `later`

    How much to merge is said in one of four ways:

    ratio: share of the original network's MACs, the method's own cost included. The default is
        0.7, or half of what can be saved on a network that cannot go so low.
    per_block: share of tokens that every block keeps (the paper's form; it compounds).
    counts: tokens left after each site, prefix excluded; `(height, width)` pairs on grids.
    num_tokens: tokens that leave a sequence network, prefix excluded, in the order of their
        positions. The last block does not merge unless `sites` says so: language models often read
        the tokens that enter it.
    """

    ratio: float | None = None
    per_block: float | None = None
    counts: tuple[Count, ...] | None = None
    num_tokens: Annotated[int, Within(1, 10**6)] | None = None
    sites: tuple[int, ...] | None = None
    """The blocks that merge, counted from 0; None leaves the choice to the method."""
    proportional_attention: bool = True
    """Weigh tokens in the attention by the number of patches they stand for."""

    by_default: ClassVar[bool] = False
    """No amount was given, so a network that cannot reach 0.7 gets what it can."""
    name: ClassVar[str]
    """What the method is called in commands and files; naming a class registers it."""
    title: ClassVar[str]
    """Its name as people write it; the class's own unless given."""
    description: ClassVar[str]
    """What it does with tokens, in a phrase; the first line of the docstring unless given."""
    colour: ClassVar[str | None] = None
    """Its colour in plots, "#rrggbb"; None takes one that is free."""
    marker: ClassVar[str | None] = None
    aliases: ClassVar[dict[str, str]] = {}
    """Short names for the method with some settings, `name=value,...`."""
    prefers_few: ClassVar[bool] = False
    """Merges once per stage of a grid network, where that is enough, instead of in every block."""
    sequences_only: ClassVar[bool] = False
    """Networks whose tokens form grids are refused."""
    choices: ClassVar[tuple[Hashable, ...]] = (None,)
    """What a site of a sequence may do, the usual first: values with a readable `str`."""
    earlier: ClassVar[dict[str, Any]] = {}
    """Values of settings that old saved configs lack."""
    later: ClassVar[frozenset[str]] = frozenset({"num_tokens"})
    """Settings that version 0.1.0 does not know; they are saved where they differ from it."""

    def __post_init__(self) -> None:
        given = [name for name in AMOUNTS if getattr(self, name) is not None]
        if len(given) > 1:
            ways = f"{', '.join(AMOUNTS[:-1])} and {AMOUNTS[-1]}"
            raise ValueError(f"{' and '.join(given)}: give one of {ways}.")
        if not given:
            object.__setattr__(self, "ratio", 0.7)
            object.__setattr__(self, "by_default", True)
        for field in ("ratio", "per_block"):
            value = getattr(self, field)
            if value is not None:
                require_ratio(field, value)
        settle(self)
        if self.sites is not None:
            ascending = tuple(sorted(set(self.sites)))
            if self.counts is not None and self.sites != ascending:
                raise ValueError(
                    f"sites: got {self.sites}; counts go with them one by one: give each site "
                    "once, in ascending order."
                )
            object.__setattr__(self, "sites", ascending)

    def __init_subclass__(cls) -> None:
        own = vars(cls)
        if "name" not in own:
            return
        cls.title = own.get("title", cls.__name__)
        documented = (inspect.getdoc(cls) or cls.title).splitlines()[0].rstrip(".")
        cls.description = own.get("description", documented)
        _METHODS[cls.name] = cls

    @abstractmethod
    def build(self, site: Site) -> Merger:
        """The merger of one site."""

    def left_out(self, sites: Sequence[Site]) -> str:
        """What a network with such sites has to do without, and why; empty: nothing."""
        return ""

    def keeps_grid(self) -> bool:
        """Whether this method's merged tokens form a rectangle again on grid networks."""
        return False

    def choose_sites(self, num_blocks: int) -> tuple[int, ...]:
        """The blocks that merge unless `sites` says so."""
        return tuple(range(num_blocks))

    def spread(
        self, strength: float, num_in: int, sites: tuple[int, ...], depth: int | None
    ) -> list[int]:
        """Tokens after each of the chosen sites of a sequence, at a strength in [0, 1].

        `depth` is the number of blocks; None for a stage of a network that has several.
        """
        return constant_number(strength, num_in, len(sites))

    def counting(self) -> float:
        """The power of a token's size that the attention of a sequence network counts."""
        return 1.0

    def for_feature_maps(self) -> MethodConfig:
        """The same settings, with grids restored after every block where that is open."""
        return self

    # What it takes from images.

    def needs_images(self) -> bool:
        """Whether a conversion is incomplete before `fit_` has seen images."""
        return False

    def fit_(  # noqa: B027 - most methods take nothing
        self, mergers: Sequence[Merger], images: Images, *, tolerance: float
    ) -> None:
        """Give the mergers of a converted model what the method takes from images.

        A ratio that is met as a mean is met within `tolerance`.
        """

    # Training.

    def learning_rate(self, parameter: str) -> float | None:
        """The learning rate of a merger's parameter; None leaves it to the training's settings."""
        return None

    def extra_loss(
        self, mergers: Sequence[Merger], share: Callable[[Tensor], Tensor]
    ) -> ExtraLoss | None:
        """What is added to the loss after a forward in training.

        `share` turns the numbers of tokens after each merger into a share of MACs.
        """
        return None

    # What a calibration may search.

    def unschedulable(self, *, grid: bool) -> str:
        """Why no schedule of sites and counts can be searched; empty where one can.

        `grid` is whether the network's tokens form grids.
        """
        return ""

    def variations(self) -> Iterator[MethodConfig]:
        """The same method with one setting changed at a time, for a calibration to try.

        They leave as many tokens and cost as many multiply-adds.
        """
        return iter(())

    def choice_at(self, block: int) -> Hashable:
        """Which of its `choices` a site has."""
        return None

    def scheduled(
        self,
        *,
        ratio: float | None = None,
        counts: tuple[Count, ...] | None = None,
        sites: tuple[int, ...] | None = None,
        choices: tuple[Hashable, ...] = (),
    ) -> MethodConfig:
        """The same settings with another schedule, the `choices` of its sites included."""
        amount = {**dict.fromkeys(AMOUNTS), "ratio": ratio, "counts": counts}
        return dataclasses.replace(self, sites=sites, **amount)

    # Words and files.

    def describe(self, site: Site) -> str:
        """What happens to the tokens of a site, in a phrase."""
        return self.description

    @classmethod
    def settings_types(cls) -> dict[str, Any]:
        """The type of every setting by its flat name, parts of settings included."""
        types = get_type_hints(cls)
        return {field.name: types[field.name] for field in dataclasses.fields(cls)}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> MethodConfig:
        """The config of flat settings by name."""
        require_known(cls, settings)
        return cls(**settings)

    def to_settings(self) -> dict[str, Any]:
        """Flat settings by name, as `from_settings` takes them."""
        return dataclasses.asdict(self)

    def words(self, ratio: float | None = None) -> str:
        """The method as commands write it: its name, and what differs from its defaults.

        `ltm.models.method_config(words, ratio)` reads it back.
        """
        usual = type(self)(ratio=ratio).to_settings()
        words = [
            f"{name}={_written(value)}"
            for name, value in self.to_settings().items()
            if value != usual[name] and not (value is None and name in AMOUNTS)
        ]
        return f"{self.name}:{','.join(words)}" if words else self.name

    # What all methods share.

    def with_amount(
        self,
        *,
        ratio: float | None = None,
        counts: tuple[Count, ...] | None = None,
        sites: tuple[int, ...] | None = None,
    ) -> MethodConfig:
        """The same settings, but for how much is merged; at the same sites unless given."""
        sites = self.sites if sites is None else sites
        amount = {**dict.fromkeys(AMOUNTS), "ratio": ratio, "counts": counts}
        return dataclasses.replace(self, sites=sites, **amount)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the method's name."""
        settings, usual = self.to_settings(), type(self)().to_settings()
        new = {name for name in self.later if settings[name] == usual[name]}
        return {"method": self.name, **{n: v for n, v in settings.items() if n not in new}}


def _written(value: Any, between: str = "+") -> str:
    """A setting as text: `3+5+8` for a sequence, `14x14` for a grid in one."""
    if isinstance(value, tuple | list):
        return between.join(_written(item, "x") for item in cast("Sequence[Any]", value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def config_from_dict(values: Mapping[str, Any], *, saved: bool = False) -> MethodConfig:
    """The config of some values; of `saved` ones, what it was when they were written."""
    settings = dict(values)
    method = settings.pop("method", None)
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(f"method: got {method!r}; known are {', '.join(sorted(_METHODS))}.")
    config_type = _METHODS[method]
    if saved:
        settings = {**config_type.earlier, **settings}
    return config_type.from_settings({name: plain(value) for name, value in settings.items()})


def require_known(config: type[MethodConfig], settings: Iterable[str]) -> None:
    """Refuse settings that a method does not have."""
    unknown = set(settings) - set(config.settings_types())
    if unknown:
        raise ValueError(f"{config.name} has no setting {', '.join(sorted(unknown))}.")


def methods() -> dict[str, type[MethodConfig]]:
    """All registered methods by name, those for every family first."""
    return dict(sorted(_METHODS.items(), key=lambda item: item[1].sequences_only))

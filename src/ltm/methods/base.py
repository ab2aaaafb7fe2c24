"""The contract of a token-merging method: a config that builds one merger per site.

A method knows nothing about networks. A block gives a merger tokens and hints; the merger returns
a `Decision`, which holds the `Merge`.
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
    """Index among the network's transformer blocks."""
    depth: int
    """Number of transformer blocks in the network."""
    width: int
    """Channels of a token."""
    num_prefix: int
    num_classes: int
    grid: Grid
    """The patch grid at the start of the block's stage."""
    num_in: int
    num_out: int
    grid_in: Grid | None = None
    """Set if the tokens form a grid before the merge and must form one after it."""
    grid_out: Grid | None = None

    @property
    def merges(self) -> bool:
        return self.num_out < self.num_in

    def is_planned(self, num_in: int, grid_in: Grid | None, patches: Grid | None) -> bool:
        """Whether tokens have the shape that this site was planned for."""
        if self.grid_in is not None:
            return grid_in == self.grid_in
        return num_in == self.num_in and patches in (None, self.grid)

    def count_for(self, num_tokens: int) -> int:
        """Tokens to keep of a sequence, whose length may differ from the planned one."""
        if num_tokens == self.num_in:
            return self.num_out
        return max(1, -(-num_tokens * self.num_out // self.num_in))

    def grid_for(self, grid: Grid) -> Grid:
        """The grid to keep of a grid, whose size may differ from the planned one."""
        if self.grid_in is None or self.grid_out is None:
            raise ValueError("grid_for: this site's tokens form no grid.")
        if grid == self.grid_in:
            return self.grid_out
        (h, w), (h_in, w_in), (h_out, w_out) = grid, self.grid_in, self.grid_out
        return max(1, -(-h * h_out // h_in)), max(1, -(-w * w_out // w_in))


@dataclass(frozen=True, eq=False, kw_only=True)
class Hints:
    """What a block tells a merger about its tokens.

    `keys`, `importance` and `attention` are set if the merger's `needs` names them.

    Letters: b images, t tokens with their prefix, d channels of a head.
    """

    num_out: int
    grid_in: Grid | None = None
    grid_out: Grid | None = None
    patches: Grid | None = None
    """The patch grid that the tokens of a sequence come from, if known."""
    size: Float[Tensor, "_ t"] | None = None
    """How many patches each token stands for; None before the first merge."""
    keys: Float[Tensor, "b t d"] | None = None
    """The attention keys, averaged over the heads."""
    importance: Float[Tensor, "b t"] | None = None
    """Attention received from the class token, or from the mean query if there is none."""
    attention: Float[Tensor, "b t"] | None = None
    """Attention received from all tokens, on average."""
    carry: Tensor | None = None
    """What the previous site of the stage passed on: means of its values, or its carry."""
    labels: Int[Tensor, "_"] | None = None
    """True labels, if given by `ltm.api.announcing`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Decision:
    """A merge, and what it passes on to the next site: `values`, `carry` or nothing."""

    merge: Merge
    values: Float[Tensor, "_ n"] | None = None
    """One value per patch token; the next site gets their means over merged tokens."""
    carry: Tensor | None = None
    """Passed on unchanged."""


class Merger(nn.Module, ABC):
    """A method at one site."""

    needs: frozenset[str] = frozenset()
    """Which of `keys`, `importance` and `attention` it reads from the hints."""
    keeps_grid: bool = False
    """Whether the merged tokens form a grid; if not, grid networks restore all tokens."""
    own_counts: bool = False
    """Whether the number of tokens differs between images, so that the plan holds on average."""
    constant: bool = False
    """Whether the decision is the same for all images, so that the tokens are not read."""
    absent: str | None = None
    """While a checkpoint without this merger's tensors is loaded: the prefix of their keys."""

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
        """Raise a ValueError if the merger cannot take tokens of this shape."""

    @abstractmethod
    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        """Decide which tokens to merge."""

    def num_leaving(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> int:
        """How many patch tokens leave the sequence."""
        return tokens.shape[1] - self.site.num_prefix - hints.num_out

    def set_noise_(self, scale: float) -> None:
        """Set the scale of the exploration noise in training."""

    @property
    def active(self) -> bool:
        """Whether its class statistics are set and in use."""
        return False

    def unset(self) -> frozenset[str]:
        """Names of tensors that were never set; `save` leaves them out."""
        return frozenset()

    def activate_(self) -> None:
        """Behave as if class statistics were set, so that MACs include their use."""

    def reset_classes_(self, num_classes: int) -> None:
        """Drop everything learned about the classes and prepare for new ones."""
        self.site = dataclasses.replace(self.site, num_classes=num_classes)

    def frozen(self, decision: Decision | None, hints: Hints | None) -> Merger:
        """The merger to deploy in place of this one; often itself.

        `decision` and `hints` are those of a forward on a blank image; None if it merged nothing.
        """
        return self

    def frozen_as(self, saved: Mapping[str, Tensor]) -> Merger:
        """The frozen merger that saved tensors belong to; they are loaded into it afterwards."""
        return self.frozen(None, None)

    def adopt_(self, other: Merger) -> None:
        """Copy what another merger of the same method has learned, where shapes match."""
        own = self.state_dict()
        for name, value in other.state_dict().items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)


class StatisticalMerger(Merger):
    """A merger with class statistics: it sums them over batches, then puts them to use."""

    @property
    @abstractmethod
    def keeps_statistics(self) -> bool:
        """Whether its settings and its network call for statistics."""

    @abstractmethod
    def observe(self, merged: Float[Tensor, "b t2 c"], hints: Hints) -> None:
        """Add merged tokens to the sums."""

    @abstractmethod
    def take_statistics_(self) -> None:
        """Replace the statistics by the sums of all processes. Every process has to call it."""

    @abstractmethod
    def forget_statistics_(self) -> None:
        """Drop the statistics and the sums."""

    @abstractmethod
    def forget_sums_(self) -> None:
        """Drop the sums and keep the statistics."""

    @abstractmethod
    def bound(
        self, merged: Float[Tensor, "b t2 c"], hints: Hints, targets: Tensor
    ) -> Float[Tensor, ""] | None:
        """The information-bottleneck bound of merged tokens; None without statistics.

        `targets` are labels (b) or distributions over classes (b a).
        """


def statistical(mergers: Iterable[Merger]) -> list[StatisticalMerger]:
    """The mergers that keep class statistics."""
    return [m for m in mergers if isinstance(m, StatisticalMerger) and m.keeps_statistics]


def _keep_what_is_absent(merger: Merger, keys: Any) -> None:
    """Do not report the keys of a merger as missing if the checkpoint has none of them."""
    prefix, merger.absent = merger.absent, None
    if prefix is not None:
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.startswith(prefix)]


@dataclass(frozen=True, eq=False, kw_only=True)
class Images:
    """What `fit_` may ask for: both run the converted model on the images it is fitted on."""

    share: Callable[[], float]
    """The mean share of the original's MACs, from the tokens that each image really keeps."""
    collect_statistics_: Callable[[], object]
    """Collect class statistics for every merger that keeps them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExtraLoss:
    """What a method adds to the training loss of a batch."""

    value: Float[Tensor, ""]
    share: Float[Tensor, ""] | None = None
    """The mean share of MACs in this batch, if it differs between images."""


_METHODS: dict[str, type[MethodConfig]] = {}


@dataclass(frozen=True, kw_only=True)
class MethodConfig(ABC):
    """The settings of a method, and what the rest of the library asks of it.

    A method has to define `name` and `build`. It may override:

    - words: `title`, `description`, `describe`, `colour`, `marker`, `aliases`
    - where it merges, and how much: `choose_sites`, `spread`, `prefers_few`, `keeps_grid`,
      `sequences_only`, `counting`, `for_feature_maps`
    - what it learns from images: `needs_images`, `fit_`
    - training: `learning_rate`, `learns`, `extra_loss`
    - what calibration may search: `unschedulable`, `variations`, `choices`, `choice_at`,
      `settings_for`
    - nested settings, settings with one value per site, compatibility with old files:
      `settings_types`, `from_settings`, `to_settings`, `per_site`, `earlier`, `later`

    The amount of merging is given in one of four ways: `ratio`, `per_block`, `counts` or
    `num_tokens`.
    """

    ratio: float | None = None
    """Share of the original network's MACs, the method's own cost included. The default is 0.7, or
    half of what can be saved on a network that cannot go so low."""
    per_block: float | None = None
    """Share of tokens that every block keeps, as in the paper; it compounds."""
    counts: tuple[Count, ...] | None = None
    """Tokens left after each site, prefix excluded; `(height, width)` pairs on grids."""
    num_tokens: Annotated[int, Within(1, 10**6)] | None = None
    """Tokens that come out of a sequence network, prefix excluded, in the order of their positions.
    The last block does not merge unless `sites` says so: language models often read the tokens that
    enter it."""
    sites: tuple[int, ...] | None = None
    """The blocks that merge, counted from 0; None leaves the choice to the method."""
    proportional_attention: bool = True
    """Weigh tokens in the attention by the number of patches they stand for."""

    by_default: ClassVar[bool] = False
    """Set if no amount was given: a network that cannot reach 0.7 then gets a larger ratio."""
    name: ClassVar[str]
    """The method's name in commands and files; defining it registers the class."""
    title: ClassVar[str]
    """The method's name in tables and plots; by default the class name."""
    description: ClassVar[str]
    """What it does to tokens, in a phrase; by default the first line of the docstring."""
    colour: ClassVar[str | None] = None
    """Colour in plots, "#rrggbb"; None picks a free one."""
    marker: ClassVar[str | None] = None
    """matplotlib's marker in plots; None picks a free one."""
    aliases: ClassVar[dict[str, str]] = {}
    """Short names in commands, each for this method with settings `name=value,...`."""
    prefers_few: ClassVar[bool] = False
    """Merge once per stage of a grid network, if that is enough, instead of in every block."""
    sequences_only: ClassVar[bool] = False
    """Refuse networks whose tokens form grids."""
    choices: ClassVar[tuple[Hashable, ...]] = (None,)
    """What calibration may choose for a site of a sequence, the default first; each has a readable
    `str`."""
    earlier: ClassVar[dict[str, Any]] = {}
    """Defaults for settings that configs saved by older versions lack."""
    later: ClassVar[frozenset[str]] = frozenset({"num_tokens"})
    """Settings that 0.1.0 does not know; files hold them only if they are not the default."""

    def __post_init__(self) -> None:
        amounts = [name for name in AMOUNTS if getattr(self, name) is not None]
        if len(amounts) > 1:
            ways = f"{', '.join(AMOUNTS[:-1])} and {AMOUNTS[-1]}"
            raise ValueError(f"{' and '.join(amounts)}: give one of {ways}.")
        if not amounts:
            object.__setattr__(self, "ratio", 0.7)
            object.__setattr__(self, "by_default", True)
        for field in ("ratio", "per_block"):
            value = getattr(self, field)
            if value is not None:
                require_ratio(field, value)
        settle(self)
        self._settle_sites()

    def _settle_sites(self) -> None:
        """Sort the sites; settings with one value per site need them sorted from the start."""
        given = self.sites
        if given is not None:
            ascending = tuple(sorted(set(given)))
            if self.counts is not None and given != ascending:
                raise ValueError(
                    f"sites: got {given}; counts go with them one by one: give each site once, in "
                    "ascending order."
                )
            object.__setattr__(self, "sites", ascending)
        for name, values in self.per_site().items():
            if values is not None and (given != self.sites or len(values) != len(given or ())):
                raise ValueError(
                    f"{name}: got {len(values)} of them, and sites={given}; give one per site, "
                    "with the sites in ascending order."
                )

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
        """Which part of the method a network with these sites goes without, and why; else empty."""
        return ""

    def per_site(self) -> dict[str, tuple[Any, ...] | None]:
        """Settings with one value per site, by name: they need `sites` in ascending order."""
        return {}

    def keeps_grid(self) -> bool:
        """Whether the merged tokens form a grid on grid networks."""
        return False

    def choose_sites(self, num_blocks: int) -> tuple[int, ...]:
        """The blocks of a sequence network that merge if `sites` is not given."""
        return tuple(range(num_blocks))

    def spread(
        self, strength: float, num_in: int, sites: tuple[int, ...], depth: int | None
    ) -> list[int]:
        """Tokens after each of the chosen sites of a sequence, at a strength in [0, 1].

        `depth` is the number of blocks; None for a stage of a network that has several.
        """
        return constant_number(strength, num_in, len(sites))

    def counting(self) -> float:
        """The power of the token size in the proportional attention of sequence networks."""
        return 1.0

    def for_feature_maps(self) -> MethodConfig:
        """These settings for dense tasks, which want full-size maps: restore grids if possible."""
        return self

    # What it learns from images.

    def needs_images(self) -> bool:
        """Whether a conversion is incomplete before `fit_` has seen images."""
        return False

    def fit_(  # noqa: B027 - most methods take nothing
        self, mergers: Sequence[Merger], images: Images, *, tolerance: float
    ) -> None:
        """Set what the mergers of a converted model learn from images without training.

        A ratio that holds on average over images is met within `tolerance`.
        """

    # Training.

    def learning_rate(self, parameter: str) -> float | None:
        """The learning rate of a merger's parameter; None uses that of the training settings."""
        return None

    def learns(self, site: Site) -> bool:
        """Whether the masks of a site are learned, so that they are of little use untrained."""
        return False

    def extra_loss(
        self, mergers: Sequence[Merger], share: Callable[[Tensor], Tensor]
    ) -> ExtraLoss | None:
        """What to add to the loss after a training forward.

        `share` converts the numbers of tokens after each merger to a share of MACs.
        """
        return None

    # What calibration may search.

    def unschedulable(self, *, grid: bool) -> str:
        """Why calibration cannot search a schedule on grids, or on sequences; empty if it can."""
        return ""

    def variations(self) -> Iterator[MethodConfig]:
        """These settings with one changed at a time, for calibration to try.

        Token counts and MACs must stay the same.
        """
        return iter(())

    def choice_at(self, block: int) -> Hashable:
        """Which of the `choices` a site has now."""
        return None

    def settings_for(self, choices: tuple[Hashable, ...]) -> dict[str, Any]:
        """The settings that make these choices, one per site; without any, the default ones."""
        return {}

    def scheduled(
        self,
        *,
        ratio: float | None = None,
        counts: tuple[Count, ...] | None = None,
        sites: tuple[int, ...] | None = None,
        choices: tuple[Hashable, ...] = (),
    ) -> MethodConfig:
        """These settings with another schedule: amount, sites, and a choice per site."""
        return self._replaced(ratio, counts, sites, **self.settings_for(choices))

    # Words and files.

    def describe(self, site: Site) -> str:
        """What happens to tokens at a site, in a phrase."""
        return self.description

    @classmethod
    def settings_types(cls) -> dict[str, Any]:
        """The type of every setting by its flat name, nested settings included."""
        types = get_type_hints(cls)
        return {field.name: types[field.name] for field in dataclasses.fields(cls)}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> MethodConfig:
        """Make a config from flat settings."""
        require_known(cls, settings)
        return cls(**settings)

    def to_settings(self) -> dict[str, Any]:
        """The flat settings, as `from_settings` takes them."""
        return dataclasses.asdict(self)

    def words(self, ratio: float | None = None) -> str:
        """The method as commands take it: its name and the settings that are not the default.

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
        """These settings with another amount, at the same sites unless given."""
        return self._replaced(ratio, counts, self.sites if sites is None else sites)

    def _replaced(
        self,
        ratio: float | None,
        counts: tuple[Count, ...] | None,
        sites: tuple[int, ...] | None,
        **settings: Any,
    ) -> MethodConfig:
        amount = {**dict.fromkeys(AMOUNTS), "ratio": ratio, "counts": counts}
        return dataclasses.replace(self, sites=sites, **amount, **settings)

    def to_dict(self) -> dict[str, Any]:
        """The method's name and settings as plain values, for files."""
        settings, usual = self.to_settings(), type(self)().to_settings()
        new = {name for name in self.later if settings[name] == usual[name]}
        return {"method": self.name, **{n: v for n, v in settings.items() if n not in new}}


def _written(value: Any, between: str = "+") -> str:
    """A setting as text: `3+5+8` for a list, `7x7+5x5` for a list of grids."""
    if isinstance(value, tuple | list):
        return between.join(_written(item, "x") for item in cast("Sequence[Any]", value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def config_from_dict(values: Mapping[str, Any], *, saved: bool = False) -> MethodConfig:
    """Make a config from what `to_dict` gives; `saved` ones may come from an older version."""
    settings = dict(values)
    method = settings.pop("method", None)
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(f"method: got {method!r}; known are {', '.join(sorted(_METHODS))}.")
    config_type = _METHODS[method]
    if saved:
        settings = {**config_type.earlier, **settings}
    return config_type.from_settings({name: plain(value) for name, value in settings.items()})


def require_known(config: type[MethodConfig], settings: Iterable[str]) -> None:
    """Raise a ValueError for settings that a method does not have."""
    unknown = set(settings) - set(config.settings_types())
    if unknown:
        raise ValueError(f"{config.name} has no setting {', '.join(sorted(unknown))}.")


def methods() -> dict[str, type[MethodConfig]]:
    """All registered methods by name; those for sequences only come last."""
    return dict(sorted(_METHODS.items(), key=lambda item: item[1].sequences_only))

"""The settings of LTM, and where it merges.

Support and weights are nested values here; files and commands keep all settings on one level, as
version 0.1.0 did.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_type_hints

import numpy as np

from ltm.core.schedule import weighted_rate
from ltm.core.validation import settle
from ltm.methods.base import (
    Images,
    Merger,
    MethodConfig,
    Site,
    require_known,
    statistical,
)
from ltm.methods.ltm.learned import Learned, LearnedMerger
from ltm.methods.ltm.matched import Choice, Matched, MatchingMerger, Operator, UnimportantMerger
from ltm.methods.ltm.step import Informative, has_too_many

# Where merging hurts least on pretrained ViTs: nothing in the first quarter, most in the middle.
_PROFILE_DEPTH = (3 / 12, 5 / 12, 8 / 12)
_PROFILE_LEAVING = (0.12, 0.27, 0.39)
# Below this share of MACs three sites would have to remove too much at once.
_FEW_SITES_DOWN_TO = 0.45
_MANY_DEPTH = (2 / 12, 3 / 12, 5 / 12, 7 / 12, 9 / 12)
# Below this one the first block has to merge too.
_LATE_SITES_DOWN_TO = 0.35
_EARLY_DEPTH = (0, 2 / 12, 3 / 12, 5 / 12, 8 / 12)
# Strong merging is best spread evenly: between these ratios the profile turns into equal shares.
_PROFILE_DOWN_TO, _EQUAL_FROM = 0.65, 0.55

# Values of matching settings that calibration tries.
_LADDERS = {
    "attended": (0.25, 0.5, 0.75, 1.0, 1.5),
    "size_power": (0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
}

_PER_SITE = ("operators", "protections")
"""Settings of a matching with one value per site."""

_PHRASES: dict[Operator, str] = {
    "merge": "tokens that are missed least join their nearest, weighted",
    "norm": "tokens that are missed least join their nearest, weighted, norms kept",
    "prune_redundant": "tokens that have a near twin are dropped",
    "prune_unimportant": "tokens that receive least attention are dropped",
    "none": "nothing leaves",
}


@dataclass(frozen=True, kw_only=True)
class ByFamily:
    """Matched on sequences, learned on grids, which suits pretrained networks."""

    matched: Matched = field(default_factory=Matched)
    learned: Learned = field(default_factory=Learned)

    def __post_init__(self) -> None:
        settle(self)


Support = Matched | Learned | ByFamily
Weights = Informative | Literal["uniform"] | None


def _by_family(matched: Matched, learned: Learned) -> ByFamily | None:
    """Both supports; None, the default of `support`, if both are the default ones."""
    support = ByFamily(matched=matched, learned=learned)
    return None if support == ByFamily() else support


@dataclass(frozen=True, kw_only=True)
class LTM(MethodConfig):
    """Learnable token merging. The defaults suit pretrained networks."""

    support: Support | None = None
    """Which tokens may merge: `Matched(...)`, found per image, or `Learned(...)`, a trained static
    pattern. None means `ByFamily()`: matched on sequences, learned on grids."""
    weights: Weights = field(default_factory=Informative)
    """Weigh tokens by the information-bottleneck step as well as by size; None or "uniform" weigh
    by size alone."""

    name: ClassVar[str] = "ltm"
    description: ClassVar[str] = "tokens that are missed least join their nearest, weighted"
    colour: ClassVar[str | None] = "#d55e00"
    marker: ClassVar[str | None] = "o"
    aliases: ClassVar[dict[str, str]] = {
        "ltm-static": "support=learned,weights=uniform",
        "ltm-uniform": "weights=uniform",
    }
    prefers_few: ClassVar[bool] = True
    choices: ClassVar[tuple[Hashable, ...]] = (
        Choice("norm", 1.0),
        Choice("norm", 0.0),
        Choice("merge", 1.0),
        Choice("merge", 0.0),
        Choice("prune_redundant", 1.0),
        Choice("prune_redundant", 0.0),
        Choice("prune_unimportant", 0.0),
    )
    earlier: ClassVar[dict[str, Any]] = {"attended": 0.0, "size_power": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights == "uniform":
            object.__setattr__(self, "weights", None)

    def per_site(self) -> dict[str, tuple[Any, ...] | None]:
        return {name: getattr(self.matched, name) for name in _PER_SITE}

    @property
    def matched(self) -> Matched:
        """The settings of a matched support; the default ones if `support` has none."""
        if isinstance(self.support, ByFamily):
            return self.support.matched
        return self.support if isinstance(self.support, Matched) else Matched()

    @property
    def learned(self) -> Learned:
        """The settings of a learned support; the default ones if `support` has none."""
        if isinstance(self.support, ByFamily):
            return self.support.learned
        return self.support if isinstance(self.support, Learned) else Learned()

    def is_learned(self, *, grid: bool) -> bool:
        """Whether the support is learned, on grids or on sequences."""
        if isinstance(self.support, Matched | Learned):
            return isinstance(self.support, Learned)
        return grid

    def choice_at(self, block: int) -> Choice:
        own = self.matched
        operator: Operator = "norm" if own.keep_norm else "merge"
        if self.sites is None or block not in self.sites:
            return Choice(operator, own.protection)
        index = self.sites.index(block)
        return Choice(
            operator if own.operators is None else own.operators[index],
            own.protection if own.protections is None else own.protections[index],
        )

    def counting(self) -> float:
        return 1.0 if self.is_learned(grid=False) else self.matched.size_power

    def left_out(self, sites: Sequence[Site]) -> str:
        classes = max((site.num_classes for site in sites), default=0)
        if not isinstance(self.weights, Informative) or not has_too_many(classes):
            return ""
        return (
            f"weights: the informative step is left out, because its table of {classes} x "
            f"{classes} classes is too large: tokens weigh as with weights='uniform'."
        )

    def keeps_grid(self) -> bool:
        return self.is_learned(grid=True)

    def build(self, site: Site) -> Merger:
        weights = self.weights if isinstance(self.weights, Informative) else None
        if self.is_learned(grid=site.grid_in is not None):
            for name, values in self.per_site().items():
                if values is not None:
                    raise ValueError(
                        f"{name}: they belong to a matching, and this network keeps its grids: "
                        "give support=Matched(...), or leave them out."
                    )
            return LearnedMerger(site, self.learned, weights)
        choice = self.choice_at(site.block)
        kind = UnimportantMerger if choice.operator == "prune_unimportant" else MatchingMerger
        return kind(site, self.matched, weights, choice)

    def learns(self, site: Site) -> bool:
        return self.is_learned(grid=site.grid_in is not None)

    def fit_(self, mergers: Sequence[Merger], images: Images, *, tolerance: float) -> None:
        if statistical(mergers):
            images.collect_statistics_()

    def unschedulable(self, *, grid: bool) -> str:
        if not grid and self.is_learned(grid=False):
            return "a learned support on a sequence has no schedule to search"
        return ""

    def variations(self) -> Iterator[LTM]:
        """The next lower and the next higher value of each setting in `_LADDERS`."""
        if isinstance(self.support, Learned):
            return
        for name, ladder in _LADDERS.items():
            value = getattr(self.matched, name)
            below = [other for other in ladder if other < value]
            above = [other for other in ladder if other > value]
            for other in (*below[-1:], *above[:1]):
                matched = dataclasses.replace(self.matched, **{name: other})
                yield dataclasses.replace(self, support=self._supporting(matched))

    def _supporting(self, matched: Matched) -> Support | None:
        """This support with other settings of its matching."""
        alone = isinstance(self.support, Matched)
        return matched if alone else _by_family(matched, self.learned)

    def settings_for(self, choices: tuple[Hashable, ...]) -> dict[str, Any]:
        if isinstance(self.support, Learned):
            return {}
        chosen = [choice for choice in choices if isinstance(choice, Choice)]
        matched = dataclasses.replace(
            self.matched,
            operators=tuple(choice.operator for choice in chosen) or None,
            protections=tuple(choice.protection for choice in chosen) or None,
        )
        return {"support": self._supporting(matched)}

    def describe(self, site: Site) -> str:
        if self.is_learned(grid=site.grid_in is not None):
            return "neighbours merge by a mask that is the same for every image"
        return _PHRASES[self.choice_at(site.block).operator]

    def for_feature_maps(self) -> LTM:
        if self.counts is not None or isinstance(self.support, Matched | Learned):
            return self
        return dataclasses.replace(self, support=self.matched)

    @classmethod
    def settings_types(cls) -> dict[str, Any]:
        return {**super().settings_types(), **_flat_types()}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> LTM:
        require_known(cls, settings)
        own = {name: value for name, value in settings.items() if name not in _flat_types()}
        return cls(**own, support=_support_of(settings), weights=_weights_of(settings))

    def to_settings(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in MethodConfig.settings_types()}
        return {**own, **_flatten(self.support, self.weights)}

    def __getattr__(self, name: str) -> Any:
        """A setting by its flat name, as in version 0.1.0."""
        if name not in _FLAT:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(
            f"LTM.{name}: read config.to_settings()[{name!r}].", DeprecationWarning, stacklevel=2
        )
        return self.to_settings()[name]

    def choose_sites(self, num_blocks: int) -> tuple[int, ...]:
        if self.ratio is None and self.num_tokens is None:
            return tuple(range(num_blocks))
        ratio = 1.0 if self.ratio is None else self.ratio
        depths = _MANY_DEPTH if ratio >= _LATE_SITES_DOWN_TO else _EARLY_DEPTH
        if ratio >= _FEW_SITES_DOWN_TO:
            depths = _PROFILE_DEPTH
        return tuple(sorted({round(depth * num_blocks) for depth in depths}))

    def spread(
        self, strength: float, num_in: int, sites: tuple[int, ...], depth: int | None
    ) -> list[int]:
        even = (_PROFILE_DOWN_TO - (self.ratio or 1.0)) / (_PROFILE_DOWN_TO - _EQUAL_FROM)
        even = min(max(even, 0.0), 1.0)
        mean = sum(_PROFILE_LEAVING) / len(_PROFILE_LEAVING)

        def share(site: int) -> float:
            if self.choice_at(site).operator == "none":
                return 0.0
            if depth is None:
                return mean
            profile = float(np.interp(site / depth, _PROFILE_DEPTH, _PROFILE_LEAVING))
            return (1 - even) * profile + even * mean

        return weighted_rate(strength, num_in, [share(site) for site in sites])


def _fields(part: type[Any]) -> tuple[str, ...]:
    return tuple(entry.name for entry in dataclasses.fields(part))


_KINDS = {"matching": Matched, "learned": Learned, "by_family": ByFamily}
_FORMS: dict[type[Any], str] = {
    Matched: "support=Matched",
    Learned: "support=Learned",
    Informative: "weights=Informative",
}
_FLAT = frozenset(name for part in _FORMS for name in _fields(part))
"""Settings that are fields of a support or of weights now."""


def _flat_types() -> dict[str, Any]:
    """The type of every flat setting."""
    types: dict[str, Any] = {
        "support": Literal["matching", "learned", "by_family"] | None,
        "weights": Literal["informative", "uniform"],
    }
    for part in _FORMS:
        hints = get_type_hints(part)
        types |= {name: hints[name] for name in _fields(part)}
    return types


def _flatten(support: Support | None, weights: Weights) -> dict[str, Any]:
    """Flat settings of a support and weights."""
    both = support if isinstance(support, ByFamily) else ByFamily()
    informative = weights if isinstance(weights, Informative) else None
    return {
        "support": next((kind for kind, t in _KINDS.items() if isinstance(support, t)), None),
        **dataclasses.asdict(support if isinstance(support, Matched) else both.matched),
        "weights": "uniform" if informative is None else "informative",
        **dataclasses.asdict(support if isinstance(support, Learned) else both.learned),
        **dataclasses.asdict(informative or Informative()),
    }


def _support_of(settings: Mapping[str, Any]) -> Support | None:
    """The support that flat settings describe.

    Files of version 0.1.0 may lack the word `support`: then the other settings tell.
    """
    kind = settings.get("support")
    if kind not in (None, *_KINDS):
        words = " or ".join(map(repr, _KINDS))
        raise ValueError(f"support: got {kind!r}; it must be {words}, or None.")
    matched, learned = _part(Matched, settings), _part(Learned, settings)
    if kind == "by_family":
        return ByFamily(matched=matched, learned=learned)
    if kind == "matching" and learned != Learned():
        raise ValueError(
            "support: got 'matching'; space='token', scope='batch', mask_form='letter', "
            "candidates='all' and by_size=False need support='learned', since matched places "
            "differ from image to image."
        )
    if kind == "learned" or learned != Learned():
        for name in _PER_SITE:
            if getattr(matched, name) is not None:
                raise ValueError(f"{name}: they belong to support='matching'.")
        return learned
    return matched if kind == "matching" else _by_family(matched, learned)


def _weights_of(settings: Mapping[str, Any]) -> Informative | None:
    """The weights that flat settings describe."""
    kind, informative = settings.get("weights", "informative"), _part(Informative, settings)
    if kind not in ("informative", "uniform"):
        raise ValueError(f"weights: got {kind!r}; it must be 'informative' or 'uniform'.")
    return informative if kind == "informative" else None


def _part(part: type[Any], settings: Mapping[str, Any]) -> Any:
    return part(**{name: settings[name] for name in _fields(part) if name in settings})


def _accepting_flat(init: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` that also takes the keywords of version 0.1.0, with a warning."""

    @functools.wraps(init)
    def accepting(self: Any, **settings: Any) -> None:
        old = {n: v for n, v in settings.items() if n in _FLAT or (n in _OLD and v in _OLD[n])}
        if old:
            warnings.warn(_advice(old), DeprecationWarning, stacklevel=2)
            given = settings.get("support"), settings.get("weights", Informative())
            support, weights = (None if isinstance(value, str) else value for value in given)
            texts = {n: settings[n] for n in _OLD if isinstance(settings.get(n), str)}
            flat = {**_flatten(support, weights), **texts, **old}
            settings = {n: v for n, v in settings.items() if n not in _FLAT}
            settings |= {"support": _support_of(flat), "weights": _weights_of(flat)}
        init(self, **settings)

    return accepting


_OLD = {"support": ("matching", "learned"), "weights": ("informative",)}
"""Values that were words in version 0.1.0."""


def _advice(old: Mapping[str, Any]) -> str:
    """The old keywords, and what to write instead."""
    parts = [
        f"{form}({_listed((n for n in _fields(part) if n in old), old)})"
        for part, form in _FORMS.items()
        if any(name in old for name in _fields(part))
        or _KINDS.get(old.get("support", "")) is part
        or (part is Informative and "weights" in old)
    ]
    return f"LTM({_listed(old, old)}): write LTM({', '.join(parts)})."


def _listed(names: Iterable[str], values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={values[name]!r}" for name in names)


LTM.__init__ = _accepting_flat(LTM.__init__)

"""A support and weights as values, and as flat settings: in commands, files and old keywords.

Version 0.1.0 had all settings of LTM on one level. Files and commands still do.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from ltm.core.validation import settle
from ltm.methods.ltm.learned import Learned
from ltm.methods.ltm.matched import Matched
from ltm.methods.ltm.step import Informative


@dataclass(frozen=True, kw_only=True)
class ByFamily:
    """Matched on sequences, learned on grids: what suits pretrained networks of each family."""

    matched: Matched = field(default_factory=Matched)
    learned: Learned = field(default_factory=Learned)

    def __post_init__(self) -> None:
        settle(self)


Support = Matched | Learned | ByFamily
Weights = Informative | Literal["uniform"] | None


def by_family(matched: Matched, learned: Learned) -> ByFamily | None:
    """Both supports; None where both are the usual ones."""
    support = ByFamily(matched=matched, learned=learned)
    return None if support == ByFamily() else support


def _fields(part: type[Any]) -> tuple[str, ...]:
    return tuple(entry.name for entry in dataclasses.fields(part))


_KINDS = {"matching": Matched, "learned": Learned}
_FORMS: dict[type[Any], str] = {
    Matched: "support=Matched",
    Learned: "support=Learned",
    Informative: "weights=Informative",
}
FLAT = frozenset(name for part in _FORMS for name in _fields(part))
"""Settings that are parts of others now."""


def flat_types() -> dict[str, Any]:
    """The type of every flat setting."""
    types: dict[str, Any] = {
        "support": Literal["matching", "learned"] | None,
        "weights": Literal["informative", "uniform"],
    }
    for part in _FORMS:
        hints = get_type_hints(part)
        types |= {name: hints[name] for name in _fields(part)}
    return types


def flatten(support: Support | None, weights: Weights) -> dict[str, Any]:
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


def support_of(settings: Mapping[str, Any]) -> Support | None:
    """The support that flat settings mean."""
    kind = settings.get("support")
    if kind not in (None, *_KINDS):
        raise ValueError(f"support: got {kind!r}; it must be 'matching' or 'learned', or None.")
    matched, learned = _part(Matched, settings), _part(Learned, settings)
    if kind == "matching" and learned != Learned():
        raise ValueError(
            "support: got 'matching'; space='token', scope='batch' and mask_form='letter' "
            "need support='learned', since matched places differ from image to image."
        )
    if kind == "learned" or learned != Learned():
        for name in ("operators", "protections"):
            if getattr(matched, name) is not None:
                raise ValueError(f"{name}: they belong to support='matching'.")
        return learned
    return matched if kind == "matching" else by_family(matched, learned)


def weights_of(settings: Mapping[str, Any]) -> Informative | None:
    """The weights that flat settings mean."""
    kind, informative = settings.get("weights", "informative"), _part(Informative, settings)
    if kind not in ("informative", "uniform"):
        raise ValueError(f"weights: got {kind!r}; it must be 'informative' or 'uniform'.")
    return informative if kind == "informative" else None


def _part(part: type[Any], settings: Mapping[str, Any]) -> Any:
    return part(**{name: settings[name] for name in _fields(part) if name in settings})


def accepting_flat(init: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` that takes the keywords of version 0.1.0 too, with a warning."""

    @functools.wraps(init)
    def accepting(self: Any, **settings: Any) -> None:
        old = {n: v for n, v in settings.items() if n in FLAT or (n in _OLD and v in _OLD[n])}
        if old:
            warnings.warn(_advice(old), DeprecationWarning, stacklevel=2)
            given = settings.get("support"), settings.get("weights", Informative())
            support, weights = (None if isinstance(value, str) else value for value in given)
            texts = {n: settings[n] for n in _OLD if isinstance(settings.get(n), str)}
            flat = {**flatten(support, weights), **texts, **old}
            settings = {n: v for n, v in settings.items() if n not in FLAT}
            settings |= {"support": support_of(flat), "weights": weights_of(flat)}
        init(self, **settings)

    return accepting


_OLD = {"support": ("matching", "learned"), "weights": ("informative",)}
"""Values that are parts now."""


def _advice(old: Mapping[str, Any]) -> str:
    """Old keywords, and what to write instead."""
    parts = [
        f"{form}({_written((n for n in _fields(part) if n in old), old)})"
        for part, form in _FORMS.items()
        if any(name in old for name in _fields(part))
        or _KINDS.get(old.get("support", "")) is part
        or (part is Informative and "weights" in old)
    ]
    return f"LTM({_written(old, old)}): write LTM({', '.join(parts)})."


def _written(names: Iterable[str], values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={values[name]!r}" for name in names)

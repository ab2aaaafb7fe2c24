"""Check settings when they are made; a ValueError names field, value and what is allowed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

_UNIONS = (Union, UnionType)


@dataclasses.dataclass(frozen=True)
class Within:
    """The bounds of a number, in the annotation of its field: `Annotated[float, Within(0, 8)]`."""

    least: float
    most: float
    above: bool = False
    """Exclude `least` itself."""

    def __contains__(self, value: Any) -> bool:
        low = value > self.least if self.above else value >= self.least
        return low and value <= self.most

    def __str__(self) -> str:
        start = "larger than" if self.above else "from"
        return f"{start} {self.least:g} {'and at most' if self.above else 'to'} {self.most:g}"


def settle(settings: Any) -> None:
    """Check the fields of a frozen dataclass by their types, and make their values plain."""
    types = _types_of(cast("type[Any]", type(settings)))
    for field in dataclasses.fields(settings):
        value, wanted = getattr(settings, field.name), types[field.name]
        if not _suits(value, wanted):
            raise ValueError(f"{field.name}: got {value!r}; it must be {_said(wanted)}.")
        object.__setattr__(settings, field.name, plain(value))


@functools.cache
def _types_of(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def check_entries(
    entries: Mapping[str, Any],
    types: Mapping[str, Any],
    path: str = "",
    *,
    required: Iterable[str] = (),
) -> None:
    """Check the entries of a file by their types; errors put `path` before their names."""
    for name, value in entries.items():
        if name not in types:
            known = ", ".join(sorted(types))
            raise ValueError(f"{path}{name!r:.80} is no known entry; there are {known}.")
        if not _suits(value, types[name]):
            raise ValueError(f"{path}{name} is {value!r:.80}; it must be {_said(types[name])}.")
    missing = [name for name in required if name not in entries]
    if missing:
        raise ValueError(f"{path.rstrip('.') or 'it'} lacks {', '.join(missing)}.")


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raise a ValueError with name, value and what is allowed, unless the condition holds."""
    if not holds:
        raise ValueError(f"{name} is {value}, but must be {allowed}")


def require_least(name: str, value: float | None, least: float = 1) -> None:
    """Raise a ValueError if a number is too small; None passes."""
    require(value is None or value >= least, name, value, f"at least {least}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, without its full stop, for use in a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def plain(value: Any) -> Any:
    """Turn numbers of other types, such as numpy's, into Python's, and sequences into tuples."""
    if isinstance(value, list | tuple):
        return tuple(plain(item) for item in cast("Sequence[Any]", value))
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _suits(value: Any, wanted: Any) -> bool:
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in _UNIONS:
        return any(_suits(value, kind) for kind in inner)
    if origin is Annotated:
        kind, *bounds = inner
        return _suits(value, kind) and all(value in bound for bound in bounds)
    if origin in (tuple, dict):
        return _items_suit(value, origin, inner)
    if origin is Literal or wanted is Any:
        return wanted is Any or value in inner
    if isinstance(value, bool):  # in Python an int, but not here
        return wanted is bool
    kinds: dict[Any, Any] = {float: Real, int: Integral}
    return isinstance(value, kinds.get(wanted, wanted)) and (
        wanted is not float or _is_finite(value)
    )


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _items_suit(value: Any, container: type, inner: tuple[Any, ...]) -> bool:
    if container is dict:
        entries = cast("dict[Any, Any]", value).items() if isinstance(value, dict) else [()]
        return all(_all_suit(entry, inner) for entry in entries)
    return isinstance(value, list | tuple) and _all_suit(cast("Sequence[Any]", value), inner)


def _all_suit(values: Sequence[Any], kinds: tuple[Any, ...]) -> bool:
    """Whether the items of a tuple fit `(kind, ...)`, or one kind each."""
    if kinds[1:] == (...,):
        return all(_suits(value, kinds[0]) for value in values)
    return len(kinds) == len(values) and all(map(_suits, values, kinds))


def _said(wanted: Any) -> str:
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in _UNIONS:
        said = " or ".join(_said(kind) for kind in inner if kind is not NoneType)
        return f"{said}, or None" if NoneType in inner else said
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is Annotated:
        kind, *bounds = inner
        return " ".join([_said(kind), *map(str, bounds)])
    if origin is tuple:
        each = [_said(kind) for kind in inner if kind is not ...]
        return f"a sequence, each {each[0]}" if ... in inner else f"({', '.join(each)})"
    if origin is dict:
        return "a group of entries"
    said = {NoneType: "null", bool: "True or False", float: "a number", int: "a whole number"}
    return said.get(wanted, str(wanted.__name__))

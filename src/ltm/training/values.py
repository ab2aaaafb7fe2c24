"""Plain values and typed ones: between YAML, `name=value` words and frozen dataclasses."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")


def plain(value: Any) -> Any:
    """Turn dataclasses and tuples into dicts and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return value


def typed(values: Mapping[str, Any], kind: type[T], base: T, path: str = "") -> T:
    """Change some fields of a (nested) frozen dataclass, each checked against its type."""
    hints = get_type_hints(kind)
    changed: dict[str, Any] = {}
    for name, value in values.items():
        where = f"{path}{name}"
        if name not in hints:
            raise ValueError(f"{where} is no setting; {choices(str(name), hints)}")
        before = getattr(base, name)
        if not dataclasses.is_dataclass(before):
            changed[name] = convert(value, hints[name], where)
        elif isinstance(value, Mapping):
            changed[name] = typed(value, type(before), before, f"{where}.")
        else:
            raise ValueError(f"{where} is {value!r}, but must be a group of settings")
    return dataclasses.replace(base, **changed)  # type: ignore[type-var]


def convert(value: Any, hint: Any, where: str) -> Any:
    """Check a plain value against a type, turning lists into tuples and 1e-3 into a number."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return convert(value, parts[0], where)
    if origin in (Union, UnionType):
        return _convert_any(value, parts, where)
    if origin is tuple:
        return _convert_tuple(value, parts, where)
    if origin is Literal:
        return _convert_word(value, parts, where)
    return _convert_plain(value, hint, where)


def _convert_word(value: Any, words: tuple[Any, ...], where: str) -> str:
    """YAML reads 32 as a number where a word is meant."""
    if str(value) in words:
        return str(value)
    raise ValueError(f"{where} is {value!r}; choose from {', '.join(map(str, words))}")


def _convert_plain(value: Any, kind: type, where: str) -> Any:
    if kind is bool or isinstance(value, bool):
        fits = kind is bool and isinstance(value, bool)
    elif kind in (int, float):
        return _number(value, kind, where)
    else:
        fits = isinstance(value, str | int | float) if kind is str else isinstance(value, kind)
    if fits:
        return str(value) if kind is str else value
    name = "nothing" if kind is NoneType else kind.__name__
    raise ValueError(f"{where} is {value!r}, but must be of type {name}")


def _convert_any(value: Any, parts: tuple[Any, ...], where: str) -> Any:
    if value is None and NoneType in parts:
        return None
    problem: ValueError | None = None
    for part in parts:
        try:
            return convert(value, part, where)
        except ValueError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _convert_tuple(value: Any, parts: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} is {value!r}, but must be a list")
    if len(parts) == 2 and parts[1] is Ellipsis:
        parts = (parts[0],) * len(value)
    if len(value) != len(parts):
        raise ValueError(f"{where} has {len(value)} values, but must have {len(parts)}")
    return tuple(convert(v, part, where) for v, part in zip(value, parts, strict=True))


def _number(value: Any, hint: type, where: str) -> Any:
    """YAML reads 1e-3 as text, and 3 as a whole number where a float is meant."""
    try:
        number = hint(value)
        if float(number) == float(value):
            return number
    except (TypeError, ValueError):
        pass
    kind = "a whole number" if hint is int else "a number"
    raise ValueError(f"{where} is {value!r}, but must be {kind}")


def named_values(setting: str, words: Iterable[str]) -> dict[str, Any]:
    """Read `name=value` words; values are written as in YAML, lists also in round brackets."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{setting}: {word!r} must be written name=value")
        if text.startswith("(") and text.endswith(")"):
            text = f"[{text[1:-1]}]"
        try:
            values[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{setting}: {word!r} has no readable value") from error
    return values


def choices(wrong: str, known: Iterable[str], most: int = 5) -> str:
    """Suggest what a wrong name may have meant, or list what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(wrong, known, most, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there are {', '.join(known)}"

"""Checks at the door: a ValueError names the argument, its value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

_UNIONS = (Union, UnionType)


def check_beta(beta: float) -> None:
    """Refuse a temperature that is no positive number."""
    if not (math.isfinite(beta) and beta > 0):
        raise ValueError(f"beta is {beta}: a positive finite number is needed")


def check_floor(floor: float) -> None:
    """Refuse a floor under probabilities that is none."""
    if not 0 <= floor < 1:
        raise ValueError(f"floor is {floor}: a number in [0, 1) is needed")


def check_num_classes(num_classes: int) -> None:
    """Refuse a model of no class."""
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}: at least 1 is needed")


def check_features(name: str, x: Tensor, num_dims: int | None = None) -> None:
    """Refuse an empty batch, an empty feature, and any shape but `num_dims` dimensions."""
    shape = tuple(x.shape)
    if num_dims is not None and x.ndim != num_dims:
        raise ValueError(f"{name} has shape {shape}: {num_dims} dimensions are needed")
    if x.ndim == 0 or x.shape[0] == 0:
        raise ValueError(f"{name} has shape {shape}: a batch of at least one sample is needed")
    if x.numel() == 0:
        raise ValueError(f"{name} has shape {shape}: at least one value per sample is needed")


def check_finite(name: str, x: Tensor) -> None:
    """Refuse NaN and infinity, which would otherwise spread over every class."""
    if not bool(x.isfinite().all()):
        count = int((~x.isfinite()).sum())
        raise ValueError(
            f"{name} has {count} values that are NaN or infinite: only finite ones fit"
        )


def check_shape(name: str, x: Tensor, shape: tuple[int, ...], reason: str) -> None:
    """Refuse a shape that does not fit its neighbours; `reason` says which."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: {shape} is needed, {reason}")


def check_labels(labels: Tensor, num_samples: int, num_classes: int) -> None:
    """Refuse labels that are not one whole number in [0, num_classes) per sample."""
    check_shape("labels", labels, (num_samples,), "one per sample")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels are of type {labels.dtype}: whole numbers are needed")
    # A compiled or meta graph has no values to look at.
    if torch.compiler.is_compiling() or labels.is_meta:
        return
    low, high = (int(value) for value in labels.aminmax())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"labels range from {low} to {high}: with {num_classes} classes "
            f"they must lie in 0 to {num_classes - 1}"
        )


def settle(settings: Any) -> None:
    """Check the values of a frozen dataclass by their fields' types, and make them plain."""
    types = get_type_hints(cast("type[Any]", type(settings)))
    for field in dataclasses.fields(settings):
        value, wanted = getattr(settings, field.name), types[field.name]
        if not _suits(value, wanted):
            raise ValueError(f"{field.name}: got {value!r}; it must be {_said(wanted)}.")
        object.__setattr__(settings, field.name, plain(value))


def plain(value: Any) -> Any:
    """Numbers of other kinds, numpy's say, as Python's own, and sequences as tuples of such."""
    if isinstance(value, list | tuple):
        return tuple(plain(item) for item in cast("Sequence[Any]", value))
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _suits(value: Any, wanted: Any) -> bool:
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in _UNIONS:
        return any(_suits(value, kind) for kind in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        return isinstance(value, list | tuple) and _all_suit(cast("Sequence[Any]", value), inner)
    if isinstance(value, bool):  # no number, though Python says so
        return wanted is bool
    if wanted is float:
        return isinstance(value, Real) and math.isfinite(value)
    return isinstance(value, Integral if wanted is int else wanted)


def _all_suit(values: Sequence[Any], kinds: tuple[Any, ...]) -> bool:
    """Items of a tuple: each of the first kind where the second is an ellipsis."""
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
    if origin is tuple:
        each = [_said(kind) for kind in inner if kind is not ...]
        return f"a sequence, each {each[0]}" if ... in inner else f"({', '.join(each)})"
    said = {bool: "True or False", float: "a number", int: "a whole number"}
    return said.get(wanted, str(wanted.__name__))

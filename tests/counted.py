"""Costs that tests have counted: equal networks cost the same, so others need not count again.

Most of the time of a conversion goes into counting multiply-adds on `meta`, and hundreds of tests
convert the same toys.
"""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ltm.adapters import planning
from ltm.core import cost
from ltm.methods.base import Merger

_Costs = dict[object, int]


def structure_of(model: nn.Module) -> object:
    """All that the cost of an untouched network can depend on; None of any other."""
    parts: list[object] = []
    for name, module in model.named_modules():
        values = vars(module)
        watched = "forward" in values or module._forward_hooks or module._forward_pre_hooks
        if watched or isinstance(module, Merger):
            return None
        plain = [(k, v) for k, v in values.items() if k != "training" and _is_plain(v)]
        shapes = [(k, tuple(p.shape)) for k, p in module.named_parameters(recurse=False)]
        shapes += [(k, tuple(b.shape)) for k, b in module.named_buffers(recurse=False)]
        parts.append((name, type(module), tuple(plain), tuple(shapes)))
    return tuple(parts)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | torch.Size):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def share_counts_(patch: pytest.MonkeyPatch) -> None:
    """Give every planner of an equal network and size the costs that were counted before."""
    made, counted = planning.Planner.__init__, planning.count_macs
    costs: dict[object, _Costs] = {}
    whole: dict[object, int] = {}

    def init(self, model, adapter, config, image_size) -> None:
        made(self, model, adapter, config, image_size)
        structure = structure_of(self.shadow)
        if structure is not None:
            self._costs = costs.setdefault((structure, type(adapter), tuple(image_size)), {})

    def count(shadow, images) -> int:
        structure = structure_of(shadow)
        if structure is None:
            return counted(shadow, images)
        key = structure, tuple(images.shape)
        if key not in whole:
            whole[key] = counted(shadow, images)
        return whole[key]

    patch.setattr(planning.Planner, "__init__", init)
    patch.setattr(planning, "count_macs", count)
    patch.setattr(planning, "FlopCounterMode", Counter)
    patch.setattr(cost, "FlopCounterMode", Counter)


class Counter(FlopCounterMode):
    """Counts as ever; what an operation gives on `meta` is looked up if it ran before."""

    def __enter__(self):
        # Entered first, asked last: the counter has seen the operation by then.
        self.shapes = KnownShapes()
        self.shapes.__enter__()
        return super().__enter__()

    def __exit__(self, *args):
        super().__exit__(*args)
        self.shapes.__exit__(*args)


class Shape(NamedTuple):
    """A tensor on `meta`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class KnownShapes(TorchDispatchMode):
    """Torch takes up to a millisecond for the shape of a result on `meta`; this remembers it."""

    known: dict[object, Shape | tuple[Shape, ...]] = {}  # noqa: RUF012

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        options = kwargs or {}
        if not is_functional(func):
            return func(*args, **options)
        try:
            key = func, described(args), described(tuple(options.items()))
            known = self.known.get(key)
        except TypeError:  # a tensor elsewhere, or what has no hash
            return func(*args, **options)
        if known is None:
            result = func(*args, **options)
            results = (result,) if isinstance(result, Tensor) else result
            if all(x.is_meta for x in results):
                self.known[key] = described(result)
            return result
        return empty(known) if isinstance(known, Shape) else tuple(map(empty, known))


@functools.cache
def is_functional(func: Any) -> bool:
    """Whether an operation gives new tensors, nothing else, and changes none."""
    schema = func._schema
    unaliased = all(x.alias_info is None for x in (*schema.arguments, *schema.returns))
    return unaliased and {str(x.type) for x in schema.returns} == {"Tensor"}


def described(value: Any) -> Any:
    """What a shape depends on; `1`, `1.0` and `True` are equal, but not the same."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError("not on meta")
        return Shape(value.shape, value.stride(), value.dtype)
    if isinstance(value, tuple | list):
        return tuple([described(x) for x in value])
    return type(value), value


def empty(known: Shape) -> Tensor:
    return torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")

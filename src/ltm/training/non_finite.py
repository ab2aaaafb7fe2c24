"""Find the module whose output is the first that is not finite, for the error of a NaN loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ltm.core.finite import is_finite
from ltm.methods.base import Merger


class NonFiniteLossError(ValueError):
    """The loss became NaN or infinite; the run stops, and its last checkpoint stays."""


@torch.no_grad()
def find_non_finite(model: nn.Module, *inputs: Any) -> str:
    """Run a batch again; return a sentence on where values first stop being finite."""
    if not _finite(inputs):
        return "the images themselves are not finite"
    weights = next((n for n, p in model.named_parameters() if not _finite(p)), None)
    if weights is not None:
        return f"the weights {_name(model, weights)} are not finite"
    culprit = _first_culprit(model, inputs)
    if culprit is not None:
        return f"{_name(model, culprit)} gives the first values that are not finite"
    gradient = next((n for n, p in model.named_parameters() if not _finite(p.grad)), None)
    if gradient is not None:
        return f"the gradient of {_name(model, gradient)} is the first that is not finite"
    return "the network's output and gradients are finite, so the loss itself overflowed"


def _first_culprit(model: nn.Module, inputs: tuple[Any, ...]) -> str | None:
    """The first module with finite inputs and an output that is not finite."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not found and _finite(args) and not _finite(output):
                found.append(name)

        return hook

    handles = [m.register_forward_hook(watch(name)) for name, m in model.named_modules() if name]
    try:
        model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _name(model: nn.Module, path: str) -> str:
    """The path of a module or parameter, and its merging site if it belongs to one."""
    modules, parts = dict(model.named_modules()), path.split(".")
    for end in range(len(parts), 0, -1):
        module = modules.get(".".join(parts[:end]))
        merger = module if isinstance(module, Merger) else getattr(module, "merger", None)
        if isinstance(merger, Merger):
            return f"{path} (at the site of block {merger.site.block})"
    return path


def _finite(value: Any) -> bool:
    return all(map(is_finite, _tensors(value)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])

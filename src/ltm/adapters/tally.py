"""Counting a network on `meta` again and again: what was counted before is passed over.

On `meta` only shapes matter, so a module that gets what it got before costs what it cost before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ltm.adapters.base import Slot
from ltm.adapters.state import Tokens, TokenState
from ltm.core.cost import run_on_meta
from ltm.methods.base import Merger


class _Counted(NamedTuple):
    """What is known about a module that was run before."""

    macs: int
    shape: tuple[int, ...]
    tokens: Tokens
    """What it leaves for the next block; its merges are those that it added itself."""


class Tally:
    """Counts one network in its many conversions."""

    def __init__(self, shadow: nn.Module, images: Tensor) -> None:
        self.shadow, self.images = shadow, images
        self._counted: dict[object, _Counted] = {}
        self._counter = FlopCounterMode(display=False)
        self._passed = 0
        """MACs of what was passed over."""

    def count(self, units: Iterable[nn.Module], config: object, state: TokenState) -> int:
        """MACs as the network is now; the units are blocks that depend on the config."""
        blocks = {unit: (config, _signature(unit)) for unit in units}
        others = {module: module for module in _apart_from(self.shadow, set(blocks))}
        self._passed, self._counter = 0, FlopCounterMode(display=False)
        for module, what in (*blocks.items(), *others.items()):
            module.forward = self._watched(module, what, state)
        try:
            with self._counter:
                run_on_meta(self.shadow, self.images)
            return self._counter.get_total_flops() // 2 + self._passed
        finally:
            for module in (*blocks, *others):
                del module.forward

    def _watched(self, module: nn.Module, what: object, state: TokenState) -> Callable[..., Any]:
        forward, slot = module.forward, getattr(module, "slot", None)

        def run(*args: Any, **options: Any) -> Any:
            if options or not isinstance(args[0], Tensor):
                return forward(*args, **options)
            key = what, tuple(args[0].shape)
            if key in self._counted:
                return self._pass_over(args[0], self._counted[key], slot, state)
            before, merges = self._counter.get_total_flops(), _entering(slot, state).merges
            out = forward(*args)
            if isinstance(out, Tensor):
                left = Tokens() if slot is None else state.read(slot.index + 1) or Tokens()
                added = Tokens(size=left.size, merges=left.merges[len(merges) :])
                macs = (self._counter.get_total_flops() - before) // 2
                self._counted[key] = _Counted(macs, tuple(out.shape), added)
            return out

        return run

    def _pass_over(
        self, x: Tensor, known: _Counted, slot: Slot | None, state: TokenState
    ) -> Tensor:
        self._passed += known.macs
        if slot is not None:
            merges = (*_entering(slot, state).merges, *known.tokens.merges)
            state.write(slot.index + 1, Tokens(size=known.tokens.size, merges=merges))
        return x.new_empty(known.shape)


def _entering(slot: Slot | None, state: TokenState) -> Tokens:
    """What is known about the tokens that enter a block."""
    if slot is None or slot.starts:
        return Tokens()
    return state.read(slot.index) or Tokens()


def _apart_from(model: nn.Module, units: set[nn.Module]) -> list[nn.Module]:
    """The largest modules that neither hold any of the units nor are part of one."""
    found: list[nn.Module] = []
    for child in model.children():
        if child not in units:
            holds = not units.isdisjoint(child.modules())
            found += _apart_from(child, units) if holds else [child]
    return found


def _signature(unit: nn.Module) -> tuple[object, ...]:
    """What the cost of a unit depends on, besides the shape of its input."""
    weights = tuple(tuple(p.shape) for n, p in unit.named_parameters() if "merger" not in n)
    mergers = ((path, m) for path, m in unit.named_modules() if isinstance(m, Merger))
    sites = tuple((path, type(m).__name__, m.site) for path, m in mergers)
    return type(unit).__name__, weights, sites, getattr(unit, "window", None)

"""The state that travels with the tokens of one forward pass.

`timm` runs its blocks one after the other with nothing but the tokens between them, so what a
merge leaves behind (sizes, the carry, the merges so far) waits in a slot: the network opens a
forward, block i reads slot i and writes slot i + 1. There is no hook, so stopping early, copying
and exporting need no care.

Tensors that somebody may come back with, after other forwards, are known by themselves: the input
of a block, with which gradient checkpointing runs it again, and features that a head is given.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ltm.core.merge import Merge
from ltm.core.schedule import Grid
from ltm.methods.base import Decision, Hints, Merger

LABELS, PATCHES = "labels", "patches"
"""The slots of the labels that were announced for a forward, and of the shape of its images."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """What is known about the tokens that enter a block."""

    size: Tensor | None = None
    """Patches per token, prefix included; None while all are ones."""
    carry: Tensor | None = None
    merges: tuple[Merge, ...] = ()
    """All merges since the tokens were patches."""
    labels: Tensor | None = None
    """True labels of the images, where somebody announced them."""
    patches: Grid | None = None
    """The shape in which a sequence's tokens stood while they were patches."""


def require_sizes(size: Tensor, x: Tensor) -> None:
    """Refuse features of which nothing is known: sizes are those of another batch."""
    if not torch.compiler.is_compiling() and size.shape[0] not in (1, x.shape[0]):
        raise ValueError(
            f"forward_head: got features of {x.shape[0]} images, and the last forward had "
            f"{size.shape[0]}; give what forward_features returned, as it is."
        )


@dataclass(eq=False)
class Record:
    """One site's part of a forward pass that somebody watches."""

    block: int
    merger: Merger | None
    hints: Hints
    decision: Decision | None
    merged: Tensor
    """The tokens after the merge, `b t c`."""
    size: Tensor | None
    merges: tuple[Merge, ...]


@dataclass(eq=False)
class _Forward(threading.local):
    """One thread's slots, and those of blocks that a backward pass runs again."""

    slots: dict[Any, Any] = field(default_factory=dict)
    again: dict[Any, Any] = field(default_factory=dict)
    backward: int = -1
    records: list[Record] | None = None
    labels: Tensor | None = None


def _backward() -> int:
    """The backward pass that is running, as `torch.utils.checkpoint` asks it itself; -1: none."""
    return torch._C._current_graph_task_id()  # pyright: ignore # noqa: PGH003, SLF001


class TokenState:
    """Slots for one converted model, safe for forwards in several threads at once."""

    def __init__(self) -> None:
        self._forward = _Forward()
        self._latest = self._forward.slots
        self._traced: dict[Any, Any] = {}
        self._known = WeakTensorKeyDictionary()
        self._announced: Tensor | None = None
        """The labels that graphs see."""
        self.merging = True
        """Whether blocks merge at all; one switch for all threads, as autograd has its own."""

    def __deepcopy__(self, memo: dict[int, object]) -> TokenState:
        return TokenState()

    def __reduce__(self) -> tuple[type[TokenState], tuple[()]]:
        return TokenState, ()

    def _slots(self) -> dict[Any, Any]:
        # A graph is traced once for all threads, and tracers cannot look into thread-locals.
        if torch.compiler.is_compiling():
            return self._traced
        backward, forward = _backward(), self._forward
        if backward == -1:
            return forward.slots
        if forward.backward != backward:
            forward.backward, forward.again = backward, {}
        return forward.again

    def start(self, patches: Grid | None = None) -> None:
        """Forget the forward before: called by the network and, where it runs alone, a first block.

        The network itself, because a first block that is compiled cannot reach a thread's slots.
        """
        if not torch.compiler.is_compiling():
            if _backward() != -1:
                return
            slots = {LABELS: self._forward.labels, PATCHES: patches}
            self._latest = self._forward.slots = slots
        self._traced = {PATCHES: patches}

    def enter(self, index: int | None, x: Tensor) -> Tokens:
        """What is known about the tokens that enter a block; no index where they are patches."""
        if torch.compiler.is_compiling():
            if index is None:
                return Tokens(labels=self._announced, patches=self._traced.get(PATCHES))
            if index not in self._traced:
                raise RuntimeError(
                    f"torch.compile: block {index} alone cannot know what was merged before it; "
                    "compile the whole model."
                )
            return self._traced[index]
        if _backward() == -1:
            slots = self._forward.slots
            known = None if index is None else slots.get(index) or self._traced.get(index)
            tokens = known or Tokens(labels=self._forward.labels, patches=slots.get(PATCHES))
            if torch.is_grad_enabled():
                self.remember(x, tokens)
            return tokens
        # Run again, maybe after other forwards and on a thread of autograd's own.
        known = self.recall(x) or (None if index is None else self.read(index))
        slots = self._latest
        return known or Tokens(labels=slots.get(LABELS), patches=slots.get(PATCHES))

    def remember(self, x: Tensor, tokens: Tokens) -> None:
        """Know a tensor by itself, for as long as somebody holds it."""
        if not torch.compiler.is_compiling():
            self._known[x] = tokens

    def recall(self, x: Tensor) -> Tokens | None:
        """What is known about a tensor by itself."""
        return None if torch.compiler.is_compiling() else self._known.get(x)

    def write(self, key: Any, value: Any) -> None:
        self._slots()[key] = value

    def read(self, key: Any) -> Any:
        slots = self._slots()
        if key in slots or torch.compiler.is_compiling():
            return slots.get(key)
        # What is not here was left by the forward that runs again, or by a block that is compiled.
        again = self._latest if _backward() != -1 else {}
        return again.get(key, self._traced.get(key))

    def take(self, key: Any) -> Any:
        """Read once: what is large does not outlive its use."""
        slots = self._slots()
        # Not deleted: graphs put back all entries of a dictionary that has lost one.
        found, slots[key] = slots.get(key), None
        if found is None and not torch.compiler.is_compiling():
            found = self._traced.pop(key, None)
        return found

    @property
    def watched(self) -> bool:
        return not torch.compiler.is_compiling() and self._forward.records is not None

    def record(self, record: Record) -> None:
        if self._forward.records is not None:
            self._forward.records.append(record)

    @contextmanager
    def watching(self) -> Iterator[list[Record]]:
        """Collect a record per site of the forwards inside."""
        before, records = self._forward.records, []
        self._forward.records = records
        try:
            yield records
        finally:
            self._forward.records = before

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Merge nothing in the forwards (and backwards) inside."""
        before, self.merging = self.merging, False
        try:
            yield
        finally:
            self.merging = before

    @contextmanager
    def announcing(self, labels: Tensor | None) -> Iterator[None]:
        """Let mergers see the true labels of the forwards inside."""
        before = self._forward.labels
        self._forward.labels = self._announced = labels
        try:
            yield
        finally:
            self._forward.labels = self._announced = before

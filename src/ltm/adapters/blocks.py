"""Merging blocks, and the state that travels between them with the tokens of one forward pass.

Conversion swaps the class of a host block for a subclass of it that merges between its children;
the block gains one child, `merger`. Undoing swaps the class back.

`timm` runs its blocks one after the other with nothing but the tokens between them, so what a
merge leaves behind (sizes, the carry, the merges so far) waits in a frame: the network opens one
for a forward, block i reads what enters block i and writes what enters block i + 1. There is no
hook, so stopping early, copying and exporting need no care.

Checkpointed inputs and returned features are looked up by tensor identity: gradient checkpointing
runs a block again with the same input, and a head may be given features of an earlier forward.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

import torch
from timm.layers.norm import LayerNorm
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ltm.core.merge import Merge
from ltm.core.schedule import Grid
from ltm.kernels.dispatch import compact
from ltm.methods.base import Decision, Hints, Merger, MethodConfig, Site

_T = TypeVar("_T")


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
    positions: Tensor | None = None
    """The patch at whose place each token stands, `b t`, prefix included; None: its own."""
    grid: Grid | None = None
    """The rectangle that the tokens form now, where they form one."""


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
class Frame:
    """One forward pass: what its blocks leave for those after them."""

    patches: Grid | None = None
    size: Tensor | None = None
    """Of the tokens that enter the first block: zeros are padding. None: all are ones."""
    labels: Tensor | None = None
    tokens: dict[int, Tokens] = field(default_factory=dict)
    """What is known about the tokens that enter each block."""
    projected: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    """The outputs of each block's projections to queries and keys, until they are read."""
    pool: Tensor | None = None
    """The token sizes of the last map, `b h w`, until the head has read them."""


@dataclass(eq=False)
class _Thread(threading.local):
    """One thread's frames: of its forward, and of blocks that a backward pass runs again."""

    frame: Frame = field(default_factory=Frame)
    again: Frame = field(default_factory=Frame)
    backward: int = -1
    records: list[Record] | None = None
    labels: Tensor | None = None


def _backward() -> int:
    """The backward pass that is running, as `torch.utils.checkpoint` asks it itself; -1: none."""
    return torch._C._current_graph_task_id()  # pyright: ignore # noqa: PGH003, SLF001


class TokenState:
    """Frames for one converted model, safe for forwards in several threads at once."""

    def __init__(self) -> None:
        self._thread = _Thread()
        self._latest = self._thread.frame
        """The last forward of any thread: backward passes have threads of their own."""
        self._traced = Frame()
        """A graph is traced once for all threads, and tracers cannot look into thread-locals."""
        self._known = WeakTensorKeyDictionary()
        self._announced: Tensor | None = None
        """The labels that graphs see."""
        self.has_warned = False
        """Whether somebody was told that the network gives fewer tokens."""
        self.merging = True
        """Whether blocks merge at all; one switch for all threads, as autograd has its own."""

    def __deepcopy__(self, memo: dict[int, object]) -> TokenState:
        return TokenState()

    def __reduce__(self) -> tuple[type[TokenState], tuple[()]]:
        return TokenState, ()

    @property
    def frame(self) -> Frame:
        """The frame to write to."""
        if torch.compiler.is_compiling():
            return self._traced
        backward, thread = _backward(), self._thread
        if backward == -1:
            return thread.frame
        if thread.backward != backward:
            thread.backward, thread.again = backward, Frame()
        return thread.again

    def _read(self, look: Callable[[Frame], _T | None]) -> _T | None:
        """What a frame holds: what is not there was left by others.

        By the forward that runs again, or by a block that is compiled.
        """
        found = look(self.frame)
        if found is not None or torch.compiler.is_compiling():
            return found
        found = look(self._latest) if _backward() != -1 else None
        return look(self._traced) if found is None else found

    def open(self, patches: Grid | None = None) -> None:
        """Forget the forward before: called by the network and, where it runs alone, a first block.

        The network itself, because a first block that is compiled cannot reach a thread's frame.
        """
        if not torch.compiler.is_compiling():
            if _backward() != -1:
                return
            frame = Frame(patches=patches, labels=self._thread.labels)
            self._latest = self._thread.frame = frame
        self._traced = Frame(patches=patches)

    def fresh(self, grid: Grid | None = None) -> Tokens:
        """Patches that nothing has merged yet."""
        if torch.compiler.is_compiling():
            frame = self._traced
            return Tokens(labels=self._announced, patches=frame.patches, size=frame.size, grid=grid)
        frame, labels = self._latest, self._latest.labels
        if _backward() == -1:
            frame, labels = self._thread.frame, self._thread.labels
        return Tokens(labels=labels, patches=frame.patches, size=frame.size, grid=grid)

    def enter(self, index: int, x: Tensor, *, starts: bool) -> Tokens:
        """What is known about the tokens that enter a block; `starts`: they are patches."""
        if torch.compiler.is_compiling():
            if not starts and index not in self._traced.tokens:
                raise RuntimeError(
                    f"torch.compile: block {index} alone cannot know what was merged before it; "
                    "compile the whole model."
                )
            tokens = self.fresh() if starts else self._traced.tokens[index]
        elif _backward() == -1:
            # Written out: functions called from here may be compiled by themselves, and would see
            # the frame of graphs.
            frame, left = self._thread.frame, self._traced.tokens.get(index)
            known = None if starts else frame.tokens.get(index) or left
            tokens = known or Tokens(
                labels=self._thread.labels, patches=frame.patches, size=frame.size
            )
            if torch.is_grad_enabled():
                self.remember(x, tokens)
        else:
            # Run again, maybe after other forwards and on a thread of autograd's own.
            tokens = self.recall(x)
            if tokens is None and not starts:
                tokens = self._read(lambda frame: frame.tokens.get(index))
            tokens = tokens or self.fresh()
        self.frame.tokens[index] = tokens
        return tokens

    def leave(self, index: int, tokens: Tokens) -> None:
        """Note what is known about the tokens that leave a block."""
        self.frame.tokens[index + 1] = tokens

    def left_by(self, index: int) -> Tokens:
        """What is known about the tokens that left a block."""
        return self._read(lambda frame: frame.tokens.get(index + 1)) or Tokens()

    def take_projected(self, index: int, part: int = 0) -> Tensor:
        """A block's queries and keys, read once: what is large does not outlive its use."""
        # Not deleted: graphs put back all entries of a dictionary that has lost one.
        key = (index, part)
        found = self.frame.projected.get(key)
        self.frame.projected[key] = None
        if found is None and not torch.compiler.is_compiling():
            found = self._traced.projected.pop(key, None)
        assert found is not None
        return found

    def take_pool(self) -> Tensor | None:
        """The token sizes of the last map, read once."""
        found, self.frame.pool = self.frame.pool, None
        if found is None and not torch.compiler.is_compiling():
            found, self._traced.pool = self._traced.pool, None
        return found

    def last_pool(self) -> Tensor | None:
        """The token sizes of the last map, which stay."""
        return self._read(lambda frame: frame.pool)

    def remember(self, x: Tensor, tokens: Tokens) -> None:
        """Know a tensor by itself, for as long as somebody holds it."""
        if not torch.compiler.is_compiling():
            self._known[x] = tokens

    def recall(self, x: Tensor) -> Tokens | None:
        """What is known about a tensor by itself."""
        return None if torch.compiler.is_compiling() else self._known.get(x)

    @property
    def watched(self) -> bool:
        return not torch.compiler.is_compiling() and self._thread.records is not None

    def record(self, record: Record) -> None:
        if self._thread.records is not None:
            self._thread.records.append(record)

    @contextmanager
    def watching(self) -> Iterator[list[Record]]:
        """Collect a record per site of the forwards inside."""
        before, records = self._thread.records, []
        self._thread.records = records
        try:
            yield records
        finally:
            self._thread.records = before

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
        before = self._thread.labels
        self._thread.labels = self._announced = labels
        try:
            yield
        finally:
            self._thread.labels = self._announced = before


@dataclass(eq=False)
class Slot:
    """A merging block's part in the conversion; a plain attribute of the block."""

    state: TokenState
    index: int
    """Position among the network's blocks."""
    starts: bool
    """Tokens are patches again when they enter this block."""
    proportional: bool
    counting: float = 1.0
    """The power of the sizes that the attention counts, where it is proportional."""
    site: Site | None = None
    opens: bool = False
    """A forward pass begins at this block."""
    last: bool = False
    """The head comes after this block."""
    hands_on: bool = True
    """A later site of the same stage takes up what this one hands on."""
    num_projections: int = 1
    """Projections that are recorded for queries and keys, where the merger needs them."""
    original: dict[str, Any] = field(default_factory=dict)
    """Host attributes to give back when the conversion is undone."""


class MergingMixin(nn.Module):
    """The part of a merging block that does not depend on the family."""

    slot: Slot
    merger: Merger | None
    needs_positions: ClassVar[bool] = False
    """Attention depends on where tokens stand, so that merged ones need a position."""

    @property
    def keeps_grid(self) -> bool:
        """Tokens form a grid after the merge, if they did before."""
        return self.merger is None or self.merger.keeps_grid

    def entering(self, x: Tensor) -> Tokens:
        """What is known about the tokens that come in."""
        slot = self.slot
        if slot.opens:
            slot.state.open()
        return slot.state.enter(slot.index, x, starts=slot.starts)

    def look(self, *projected: Any, **context: Any) -> dict[str, Tensor]:
        """The hints that a merger needs.

        Given are the outputs of the block's recorded projections (in most families one, `qkv`),
        the sizes of the tokens, and the names of the hints.
        """
        raise NotImplementedError

    def decide(self, z: Tensor, hints: Hints, **context: Any) -> Decision:
        """Ask the merger, with the hints that it needs added to those that are at hand."""
        merger = cast("Merger", self.merger)
        if merger.needs:
            slot = self.slot
            parts = range(slot.num_projections)
            projected = [slot.state.take_projected(slot.index, part) for part in parts]
            found = self.look(*projected, hints.size, merger.needs, **context)
            del projected  # as large as all that a merger makes
            hints = dataclasses.replace(hints, **found)
        return merger(z, hints)

    def merge(
        self, z: Tensor, tokens: Tokens, *, grid: Grid | None = None, **context: Any
    ) -> tuple[Tensor, Tokens, Merge | None]:
        """Decide, merge, and note down what the next block has to know."""
        slot, site, merger = self.slot, self.slot.site, self.merger
        hints, decision, merged = None, None, z
        grid = grid if self.keeps_grid else None
        if site is not None and merger is not None and slot.state.merging:
            num_patches = z.shape[1] - site.num_prefix
            merger.require_planned(num_patches, grid, tokens.patches)
            grid_out = None if grid is None else site.grid_for(grid)
            num_out = site.count_for(num_patches) if grid_out is None else grid_out[0] * grid_out[1]
            if num_out < num_patches or merger.own_counts:
                z = z if merger.constant else compact(z)
                hints = Hints(
                    num_out=num_out,
                    grid_in=grid,
                    grid_out=grid_out,
                    patches=tokens.patches,
                    size=tokens.size,
                    carry=tokens.carry,
                    labels=tokens.labels,
                )
                decision = self.decide(z, hints, **context)
                values = decision.values if slot.hands_on else None
                merged, size, means = decision.merge.apply(z, tokens.size, values)
                merges = (*tokens.merges, decision.merge)
                carry = decision.carry if means is None else means
                tokens = dataclasses.replace(
                    tokens, size=size, carry=carry, merges=merges, grid=grid_out or tokens.grid
                )
                if self.needs_positions:
                    kept = decision.merge.kept().expand(z.shape[0], -1)
                    before = tokens.positions
                    kept = kept if before is None else before.gather(1, kept)
                    tokens = dataclasses.replace(tokens, positions=kept)
        slot.state.leave(slot.index, tokens)
        if slot.state.watched:
            hints = hints or Hints(num_out=z.shape[1], size=tokens.size)
            slot.state.record(
                Record(slot.index, merger, hints, decision, merged, tokens.size, tokens.merges)
            )
        return merged, tokens, None if decision is None else decision.merge


class SizedMixin(MergingMixin):
    """A block whose attention takes the sizes of tokens as a mask."""

    class_token: bool
    """Whether the first token is one; there may be registers without it."""

    def sizes(self, tokens: Tokens, mask: Tensor | None, is_causal: bool) -> Tensor | None:
        """What the attention has to know of the sizes; masks are for tokens that are whole."""
        if (mask is not None or is_causal) and tokens.merges:
            raise ValueError("attn_mask: masks of the original tokens do not fit merged ones.")
        return tokens.size if self.slot.proportional else None


def make_slots(
    config: MethodConfig, sites: Sequence[Site], state: TokenState, starts: Sequence[bool]
) -> list[Slot]:
    """A slot per block, `starts` saying at which blocks tokens are patches again."""
    by_block = {site.block: site for site in sites}
    taken_up = _taken_up({site.block for site in sites if site.merges}, starts)
    return [
        Slot(
            state,
            index,
            starts=fresh,
            proportional=config.proportional_attention,
            site=by_block.get(index),
            opens=index == 0,
            last=index == len(starts) - 1,
            hands_on=taken_up[index],
        )
        for index, fresh in enumerate(starts)
    ]


def _taken_up(merging: Collection[int], starts: Sequence[bool]) -> list[bool]:
    """Of every block, whether one of the blocks after it in its stage merges."""
    found, later = [], False
    for index in reversed(range(len(starts))):
        found.append(later)
        later = (later or index in merging) and not starts[index]
    return found[::-1]


def become_(module: Any, kind: type[nn.Module]) -> None:
    """Swap the class of a module; everything it holds stays."""
    module.__class__ = kind


class RecordedProjection(nn.Module):
    """A projection of the host whose output the block may read once, for queries and keys."""

    recorded: tuple[TokenState, int, int]
    """The state, the index of the block, and which of its projections this is."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        state, index, part = self.recorded
        if state.merging:
            state.frame.projected[index, part] = out
        return out


class RecordedLinear(RecordedProjection, nn.Linear):
    """A recorded linear layer."""


class RecordedConv2d(RecordedProjection, nn.Conv2d):
    """A recorded convolution."""


class RecordedIdentity(RecordedProjection, nn.Identity):
    """A recorded place where queries or keys could be normalised, and are not."""


class RecordedLayerNorm(RecordedProjection, LayerNorm):
    """A recorded norm of queries or keys."""


_RECORDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RecordedLinear,
    nn.Conv2d: RecordedConv2d,
    nn.Identity: RecordedIdentity,
    LayerNorm: RecordedLayerNorm,
}


def record_(projection: nn.Module, state: TokenState, index: int, part: int = 0) -> None:
    """Make a projection leave its output in the state, whatever its class (LoRA's, for example)."""
    host = type(projection)
    if host not in _RECORDED:
        _RECORDED[host] = type(f"Recorded{host.__name__}", (RecordedProjection, host), {})
    become_(projection, _RECORDED[host])
    cast("RecordedProjection", projection).recorded = (state, index, part)


def stop_recording_(projection: nn.Module) -> tuple[TokenState, int, int] | None:
    """Undo `record_`; returns what it was given, if it was."""
    if not isinstance(projection, RecordedProjection):
        return None
    recorded = projection.recorded
    del projection.recorded
    become_(projection, type(projection).__mro__[2])
    return recorded


def convert_block_(
    block: Any, config: MethodConfig, slot: Slot, merging: type[nn.Module], *projections: nn.Module
) -> None:
    """A host block becomes a merging one; its projections are recorded where the merger needs them.

    The merger comes on the device of the block's weights.
    """
    merger, site = None, slot.site
    if site is not None and site.merges:
        device = next(block.parameters()).device
        with torch.device("meta") if device.type == "meta" else torch.device("cpu"):
            merger = config.build(site)
        merger = merger.to(device).train(block.training)
    block.merger, block.slot = merger, slot
    slot.num_projections = len(projections)
    if merger is not None and merger.needs:
        for part, projection in enumerate(projections):
            record_(projection, slot.state, slot.index, part)
    become_(block, merging)


def revert_block_(block: Any, host: type[nn.Module], *projections: nn.Module) -> None:
    """Undo `convert_block_`."""
    for projection in projections:
        stop_recording_(projection)
    del block.merger, block.slot
    become_(block, host)

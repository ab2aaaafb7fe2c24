"""Merging blocks, and the state that travels between them with the tokens of one forward pass.

Conversion replaces the class of a host block by a subclass that merges between its children; the
block gets one more child, `merger`. Undoing puts the class back.

timm passes nothing but tokens from block to block, so the rest (sizes, carry, merges so far) is
kept in a frame. The network opens a frame at the start of a forward; block i reads what enters
block i and writes what enters block i + 1. There are no hooks, so stopping early, copying and
exporting work without special care.

Gradient checkpointing runs a block again on the same input, and a head may be given features of an
earlier forward. So such inputs and features are also looked up by tensor identity.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import torch
from timm.layers.norm import LayerNorm
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ltm.core.merge import Merge
from ltm.core.schedule import Grid
from ltm.kernels.dispatch import alongside, compact, mark, stays_map
from ltm.methods.base import Decision, Hints, Merger, MethodConfig, Site

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """What is known about the tokens between two blocks, besides the tokens themselves."""

    size: Tensor | None = None
    """Patches per token, prefix included; None while all are one."""
    carry: Tensor | None = None
    """What the last site passes on to the next one, in `Hints.carry`."""
    merges: tuple[Merge, ...] = ()
    """All merges since the tokens were patches."""
    labels: Tensor | None = None
    """True labels of the images, if given by `announcing`."""
    patches: Grid | None = None
    """The patch grid that the tokens of a sequence come from, if known."""
    positions: Tensor | None = None
    """The index of the patch whose position each token takes, `b t`, prefix included; None while
    no token has left."""
    grid: Grid | None = None
    """The grid that the tokens form now, if they do."""


def require_sizes(size: Tensor, x: Tensor) -> None:
    """Raise a ValueError if the known sizes belong to a batch of another size."""
    if not torch.compiler.is_compiling() and size.shape[0] not in (1, x.shape[0]):
        raise ValueError(
            f"forward_head: got features of {x.shape[0]} images, and the last forward had "
            f"{size.shape[0]}; give what forward_features returned, as it is."
        )


@dataclass(eq=False)
class Record:
    """What happened at one block of a forward, for `watching`."""

    block: int
    merger: Merger | None
    hints: Hints
    decision: Decision | None
    merged: Tensor
    """The tokens after the merge, `b t c`."""
    size: Tensor | None
    merges: tuple[Merge, ...]


Projected: TypeAlias = "tuple[Tensor, torch.cuda.Event | None]"
"""The output of a projection, and where in a CUDA graph it was there."""


@dataclass(eq=False)
class Frame:
    """What the blocks of one forward leave for later ones."""

    patches: Grid | None = None
    size: Tensor | None = None
    """Sizes of the tokens that enter the first block; zeros are padding, None means all ones."""
    labels: Tensor | None = None
    tokens: dict[int, Tokens] = field(default_factory=dict)
    """What is known about the tokens that enter each block."""
    projected: dict[tuple[int, int], Projected | None] = field(default_factory=dict)
    """Outputs of recorded projections, by block and part, until they are read."""
    pool: Tensor | None = None
    """Token sizes of the last map, `b h w`, until the head has read them."""


@dataclass(eq=False)
class _Thread(threading.local):
    """The frames of one thread: of its forward, and of blocks that a backward runs again."""

    frame: Frame = field(default_factory=Frame)
    again: Frame = field(default_factory=Frame)
    backward: int = -1
    returned: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """Features that the network returned and that somebody still holds."""
    inside: bool = False
    """Whether the network's own `forward` is running."""
    records: list[Record] | None = None
    labels: Tensor | None = None


def _backward() -> int:
    """The running backward pass, as `torch.utils.checkpoint` asks for it; -1 if there is none."""
    return torch._C._current_graph_task_id()  # pyright: ignore # noqa: PGH003, SLF001


class TokenState:
    """Frames for one converted model, safe for forwards in several threads at once."""

    def __init__(self) -> None:
        self._thread = _Thread()
        self._latest = self._thread.frame
        """The frame of the last forward in any thread: a backward runs in a thread of its own."""
        self._traced = Frame()
        """The frame in compiled graphs: they are traced once for all threads, and tracers cannot
        read thread-locals."""
        self._known = WeakTensorKeyDictionary()
        self._announced: Tensor | None = None
        """The labels in compiled graphs."""
        self.has_warned = False
        """Whether the warning about fewer tokens was given."""
        self.merging = True
        """Whether blocks merge; one switch for all threads, because a backward has its own."""

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
        """Read from the frame; else from that of the forward that runs again, or of a graph."""
        found = look(self.frame)
        if found is not None or torch.compiler.is_compiling():
            return found
        found = look(self._latest) if _backward() != -1 else None
        return look(self._traced) if found is None else found

    def open(self, patches: Grid | None = None) -> None:
        """Start a forward with an empty frame.

        The network calls it, because a compiled first block cannot reach the frame of a thread. A
        first block calls it too where it may run alone.
        """
        if not torch.compiler.is_compiling():
            if _backward() != -1:
                return
            frame = Frame(patches=patches, labels=self._thread.labels)
            self._latest = self._thread.frame = frame
        self._traced = Frame(patches=patches)

    def fresh(self, grid: Grid | None = None) -> Tokens:
        """What is known about patches before any merge."""
        if torch.compiler.is_compiling():
            frame = self._traced
            return Tokens(labels=self._announced, patches=frame.patches, size=frame.size, grid=grid)
        frame, labels = self._latest, self._latest.labels
        if _backward() == -1:
            frame, labels = self._thread.frame, self._thread.labels
        return Tokens(labels=labels, patches=frame.patches, size=frame.size, grid=grid)

    def enter(self, index: int, x: Tensor, *, starts: bool) -> Tokens:
        """What is known about the tokens that enter a block; with `starts` they are patches."""
        if torch.compiler.is_compiling():
            if not starts and index not in self._traced.tokens:
                raise RuntimeError(
                    f"torch.compile: block {index} alone cannot know what was merged before it; "
                    "compile the whole model."
                )
            tokens = self.fresh() if starts else self._traced.tokens[index]
        elif _backward() == -1:
            # Written out, because a function called from here may be compiled on its own, and would
            # then use the frame of graphs.
            frame, left = self._thread.frame, self._traced.tokens.get(index)
            known = None if starts else frame.tokens.get(index) or left
            tokens = known or Tokens(
                labels=self._thread.labels, patches=frame.patches, size=frame.size
            )
            if torch.is_grad_enabled():
                self.remember(x, tokens)
        else:
            # A backward runs the block again, maybe after other forwards and in another thread.
            tokens = self.recall(x)
            if tokens is None and not starts:
                tokens = self._read(lambda frame: frame.tokens.get(index))
            tokens = tokens or self.fresh()
        self.frame.tokens[index] = tokens
        return tokens

    def leave(self, index: int, tokens: Tokens) -> None:
        """Set what is known about the tokens that leave a block."""
        self.frame.tokens[index + 1] = tokens

    def left_by(self, index: int) -> Tokens:
        """What is known about the tokens that left a block."""
        return self._read(lambda frame: frame.tokens.get(index + 1)) or Tokens()

    def take_projected(self, index: int, part: int = 0) -> Projected:
        """The output of a recorded projection and its mark; read once, to free its memory."""
        # Set to None, not deleted: a graph restores all entries of a dictionary that has lost one.
        key = (index, part)
        found = self.frame.projected.get(key)
        self.frame.projected[key] = None
        if found is None and not torch.compiler.is_compiling():
            found = self._traced.projected.pop(key, None)
        assert found is not None
        return found

    def take_pool(self) -> Tensor | None:
        """The token sizes of the last map; read once, to free their memory."""
        found, self.frame.pool = self.frame.pool, None
        if found is None and not torch.compiler.is_compiling():
            found, self._traced.pool = self._traced.pool, None
        return found

    def last_pool(self) -> Tensor | None:
        """The token sizes of the last map, without removing them."""
        return self._read(lambda frame: frame.pool)

    def remember(self, x: Tensor, tokens: Tokens) -> None:
        """Store what is known under the tensor itself, for as long as the tensor exists."""
        if not torch.compiler.is_compiling():
            self._known[x] = tokens

    def recall(self, x: Tensor) -> Tokens | None:
        """What was stored under a tensor."""
        return None if torch.compiler.is_compiling() else self._known.get(x)

    def give(self, features: Tensor, tokens: Tokens) -> None:
        """Store what is known under features that leave the network."""
        if not torch.compiler.is_compiling():
            self._known[features] = self._thread.returned[features] = tokens

    def known(self, features: Tensor, index: int) -> Tokens:
        """What is known about features: under the tensor itself, else from the last forward.

        Args:
            features: the tokens that a network returned.
            index: the block that they left, if nothing is stored under them.
        """
        found = self.recall(features)
        if found is not None or torch.compiler.is_compiling():
            return found or self.left_by(index)
        last = [id(tokens) for tokens in self._thread.frame.tokens.values()]
        if any(id(tokens) not in last for tokens in self._thread.returned.values()):
            raise ValueError(
                "features: got a tensor that the network did not return itself, such as a cast "
                "copy, while you hold features of an earlier forward, so its token sizes are "
                "unknown; give features as they were returned."
            )
        return self.left_by(index)

    @property
    def inside(self) -> bool:
        """Whether the network's own `forward` is running in this thread."""
        return self._thread.inside

    @contextmanager
    def within(self) -> Iterator[None]:
        """The network's own `forward` runs inside."""
        before, self._thread.inside = self._thread.inside, True
        try:
            yield
        finally:
            self._thread.inside = before

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
        """Merge nothing in forwards and backwards inside."""
        before, self.merging = self.merging, False
        try:
            yield
        finally:
            self.merging = before

    @contextmanager
    def announcing(self, labels: Tensor | None) -> Iterator[None]:
        """Give mergers the true labels in forwards inside."""
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
    """Whether the tokens that enter this block are patches."""
    proportional: bool
    """Whether attention is proportional."""
    counting: float = 1.0
    """The power of the token size in proportional attention."""
    site: Site | None = None
    opens: bool = False
    """Whether a forward begins at this block."""
    last: bool = False
    """Whether the head comes after this block."""
    hands_on: bool = True
    """Whether a later site of the same stage reads what this one passes on."""
    num_projections: int = 1
    """How many projections are recorded for queries and keys."""
    original: dict[str, Any] = field(default_factory=dict)
    """Host attributes to restore when the conversion is undone."""


class MergingMixin(nn.Module):
    """The part of a merging block that does not depend on the family."""

    slot: Slot
    merger: Merger | None
    needs_positions: ClassVar[bool] = False
    """Whether attention depends on positions, so that merged tokens need one."""
    looks_aside: ClassVar[bool] = False
    """Whether `look` may run while attention goes on: it then reads only the projections, as they
    were recorded, and the sizes of the tokens that enter."""

    @property
    def keeps_grid(self) -> bool:
        """Whether tokens that form a grid before the merge form one after it."""
        return self.merger is None or self.merger.keeps_grid

    def entering(self, x: Tensor) -> Tokens:
        """What is known about the tokens that enter."""
        slot = self.slot
        if slot.opens:
            slot.state.open()
        return slot.state.enter(slot.index, x, starts=slot.starts)

    def look(self, *projected: Any, **context: Any) -> dict[str, Tensor]:
        """The hints that a merger needs, from queries and keys.

        `projected` are the outputs of the recorded projections (in most families one, `qkv`), then
        the token sizes and the names of the hints.
        """
        raise NotImplementedError

    def decide(self, z: Tensor, hints: Hints, **context: Any) -> Decision:
        """Call the merger, with the hints that it needs added."""
        merger = cast("Merger", self.merger)
        if merger.needs:
            hints = dataclasses.replace(hints, **self._hints_of(merger, hints.size, **context))
        return merger(z, hints)

    def _hints_of(self, merger: Merger, size: Tensor | None, **context: Any) -> dict[str, Tensor]:
        """What `look` finds.

        The projections, as large as everything that a merger makes, are freed on return.
        """
        slot = self.slot
        taken = [
            slot.state.take_projected(slot.index, part) for part in range(slot.num_projections)
        ]
        place = taken[-1][1] if self.looks_aside else None
        projected = [out for out, _ in taken]
        return alongside(place, lambda: self.look(*projected, size, merger.needs, **context))

    def merge(
        self, z: Tensor, tokens: Tokens, *, grid: Grid | None = None, **context: Any
    ) -> tuple[Tensor, Tokens, Merge | None]:
        """Decide, merge, and leave what is known for the next block."""
        slot, site, merger = self.slot, self.slot.site, self.merger
        hints, decision, merged = None, None, z
        grid = grid if self.keeps_grid else None
        if site is not None and merger is not None and slot.state.merging:
            num_patches = z.shape[1] - site.num_prefix
            merger.require_planned(num_patches, grid, tokens.patches)
            grid_out = None if grid is None else site.grid_for(grid)
            num_out = site.count_for(num_patches) if grid_out is None else grid_out[0] * grid_out[1]
            if num_out < num_patches or merger.own_counts:
                hints = Hints(
                    num_out=num_out,
                    grid_in=grid,
                    grid_out=grid_out,
                    patches=tokens.patches,
                    size=tokens.size,
                    carry=tokens.carry,
                    labels=tokens.labels,
                )
                # Maps of few images are merged as they are, and keep their layout.
                compacted = z if merger.constant else compact(z)
                z = z if stays_map(z) else compacted
                decision = self.decide(compacted, hints, **context)
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


class HalvesMixin(MergingMixin):
    """A block of two halves, attention and MLP, that merges between them."""

    norm1: Any
    norm2: Any
    mlp: Any
    drop_path1: Any
    drop_path2: Any

    def attended(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """The first half without its residual; `attend` is the attention."""
        raise NotImplementedError

    def transformed(self, z: Tensor) -> Tensor:
        """The second half without its residual."""
        raise NotImplementedError


class PreNormMixin(HalvesMixin):
    """Each half normalises its input and scales its output."""

    ls1: Any
    ls2: Any

    def attended(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        return self.drop_path1(self.ls1(attend(self.norm1(x))))

    def transformed(self, z: Tensor) -> Tensor:
        return self.drop_path2(self.ls2(self.mlp(self.norm2(z))))


class GammaMixin(HalvesMixin):
    """Each half normalises its input and scales its output by a parameter, if it has one."""

    gamma_1: Tensor | None
    gamma_2: Tensor | None

    def attended(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        return self.drop_path1(_scaled(attend(self.norm1(x)), self.gamma_1))

    def transformed(self, z: Tensor) -> Tensor:
        return self.drop_path2(_scaled(self.mlp(self.norm2(z)), self.gamma_2))


def _scaled(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else gamma * x


class PostNormMixin(HalvesMixin):
    """Each half normalises its output."""

    def attended(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        return self.drop_path1(self.norm1(attend(x)))

    def transformed(self, z: Tensor) -> Tensor:
        return self.drop_path2(self.norm2(self.mlp(z)))


class SizedMixin(MergingMixin):
    """A block whose attention takes the token sizes as a mask."""

    class_token: bool
    """Whether the first token is a class token; there may be registers without one."""

    def sizes(self, tokens: Tokens, mask: Tensor | None, is_causal: bool) -> Tensor | None:
        """The sizes for attention; after a merge, masks of the original tokens are refused."""
        if (mask is not None or is_causal) and tokens.merges:
            raise ValueError("attn_mask: masks of the original tokens do not fit merged ones.")
        return tokens.size if self.slot.proportional else None


def make_slots(
    config: MethodConfig, sites: Sequence[Site], state: TokenState, starts: Sequence[bool]
) -> list[Slot]:
    """A slot per block; `starts` says at which blocks tokens are patches."""
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
    """For each block, whether a later block of its stage merges."""
    found, later = [], False
    for index in reversed(range(len(starts))):
        found.append(later)
        later = (later or index in merging) and not starts[index]
    return found[::-1]


def become_(module: Any, kind: type[nn.Module]) -> None:
    """Change the class of a module, and nothing else."""
    module.__class__ = kind


class RecordedProjection(nn.Module):
    """A host projection to queries and keys whose output its block may read once."""

    recorded: tuple[TokenState, int, int]
    """The state, the index of the block, and which of its projections this is."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        state, index, part = self.recorded
        if state.merging:
            place = None if self._forward_hooks else mark(out)  # a hook may change the output
            state.frame.projected[index, part] = out, place
        return out


class RecordedLinear(RecordedProjection, nn.Linear):
    """A recorded linear layer."""


class RecordedConv2d(RecordedProjection, nn.Conv2d):
    """A recorded convolution."""


class RecordedIdentity(RecordedProjection, nn.Identity):
    """A recorded identity in place of a norm of queries or keys."""


class RecordedLayerNorm(RecordedProjection, LayerNorm):
    """A recorded norm of queries or keys."""


_RECORDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RecordedLinear,
    nn.Conv2d: RecordedConv2d,
    nn.Identity: RecordedIdentity,
    LayerNorm: RecordedLayerNorm,
}


def record_(projection: nn.Module, state: TokenState, index: int, part: int = 0) -> None:
    """Make a projection of any class, LoRA's included, leave its output in the state."""
    host = type(projection)
    if host not in _RECORDED:
        _RECORDED[host] = type(f"Recorded{host.__name__}", (RecordedProjection, host), {})
    become_(projection, _RECORDED[host])
    cast("RecordedProjection", projection).recorded = (state, index, part)


def stop_recording_(projection: nn.Module) -> tuple[TokenState, int, int] | None:
    """Undo `record_`, and return its arguments; None if it was not recorded."""
    if not isinstance(projection, RecordedProjection):
        return None
    recorded = projection.recorded
    del projection.recorded
    become_(projection, type(projection).__mro__[2])
    return recorded


def convert_block_(
    block: Any, config: MethodConfig, slot: Slot, merging: type[nn.Module], *projections: nn.Module
) -> None:
    """Turn a host block into a merging one, and record its projections if the merger needs them.

    The merger is made on the device of the block's weights.
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


def run_projection_(slot: Slot, attention: Any) -> None:
    """Make timm run `qkv`, which can then be recorded, instead of only reading its weights.

    timm adds the bias in place, so the recorded output has it.
    """
    slot.original["qkv_bias_separate"] = attention.qkv_bias_separate
    attention.qkv_bias_separate = True


def inverted(kinds: dict[type[nn.Module], type[nn.Module]]) -> dict[Any, type[nn.Module]]:
    """The classes to go back to, by the classes that conversion gives."""
    return {merging: host for host, merging in kinds.items()}


def revert_block_(block: Any, host: type[nn.Module], *projections: nn.Module) -> None:
    """Undo `convert_block_`."""
    for projection in projections:
        stop_recording_(projection)
    del block.merger, block.slot
    become_(block, host)

"""Trying schedules out: how far a network that merges so is from the original, image by image.

What comes before the first site that differs from an earlier trial has been computed then: each
block's output is kept, by the settings that led to it, and a trial starts from the last one that
fits. Images come in batches, so that a bad schedule is found out on the first of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, cat, nn

from ltm.adapters.base import Adapter
from ltm.adapters.planning import Planner
from ltm.adapters.state import TokenState
from ltm.calibration.schedules import Schedule, config_of, counts_of
from ltm.core.cost import meta_copy
from ltm.methods import MethodConfig

Divergence = Callable[[Any, Any], Float[Tensor, "b"]]
"""Of outputs from the original's outputs on the same images."""


def kl_divergence(logits: Float[Tensor, "b c"], original: Float[Tensor, "b c"]) -> Tensor:
    """`KL(original || merged)` of the class probabilities, in nats."""
    return F.kl_div(
        logits.float().log_softmax(-1),
        original.float().log_softmax(-1),
        reduction="none",
        log_target=True,
    ).sum(-1)


def cosine_distance(features: Any, original: Any) -> Tensor:
    """One less the cosine of features, or of all feature maps of a network side by side."""
    return 1 - F.cosine_similarity(_flat(features), _flat(original), dim=1)


def _flat(features: Tensor | Sequence[Tensor]) -> Float[Tensor, "b d"]:
    maps = [features] if isinstance(features, Tensor) else features
    return cat([one.float().flatten(1) for one in maps], dim=1)


def choose_divergence(num_classes: int, outputs: Any) -> Divergence:
    """KL divergence where there are classes, cosine distance of features where there are none."""
    scores = isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] == num_classes
    return kl_divergence if scores and num_classes > 1 else cosine_distance


Kept = tuple[Any, Any]
"""A block's output, and what is known about its tokens."""


class Memory:
    """Block outputs by batch and settings; the least recently used go when there are too many."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._kept: OrderedDict[object, Kept] = OrderedDict()
        self._used = 0

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __getitem__(self, key: object) -> Kept:
        self._kept.move_to_end(key)
        return self._kept[key]

    def put(self, key: object, kept: Kept) -> None:
        if key in self._kept:
            return
        self._kept[key] = kept
        self._used += kept[0].nbytes
        while self._used > self.num_bytes:
            _, (output, _) = self._kept.popitem(last=False)
            self._used -= output.nbytes


class Trials:
    """Tries schedules on one network and one set of images. The network is a copy of its own."""

    def __init__(
        self,
        model: nn.Module,
        adapter: Adapter,
        images: Tensor,
        config: MethodConfig,
        *,
        batch_size: int,
        memory_bytes: int,
    ) -> None:
        self.model, self.adapter, self.config = model.eval(), adapter, config
        parameter = next(model.parameters())
        size = (images.shape[-2], images.shape[-1])
        self.batches = [
            part.to(parameter.device, parameter.dtype) for part in images.split(batch_size)
        ]
        everywhere = tuple(range(len(adapter.layout(meta_copy(model), size).blocks)))
        untouched = config.scheduled(ratio=1.0, sites=everywhere)
        self.planner = Planner(model, adapter, untouched, size)
        with torch.no_grad():
            self.reference = [model(batch) for batch in self.batches]
        num_classes = self.planner.layout.num_classes
        self.divergence = choose_divergence(num_classes, self.reference[0])
        self.memory = Memory(memory_bytes)
        self.resumes = self._can_resume()

    @property
    def num_images(self) -> int:
        """Images altogether."""
        return sum(len(batch) for batch in self.batches)

    @torch.no_grad()
    def stream(self, schedule: Schedule) -> Generator[Tensor, None, None]:
        """The divergence of every image under a schedule, batch by batch. Close it when done."""
        with self._converted(schedule) as state:
            for index, reference in enumerate(self.reference):
                outputs = self._run(schedule, index, state)
                yield self.divergence(outputs, reference).double().cpu()

    def tidy_(self) -> None:
        """Leave the network as it was, wherever a trial was interrupted."""
        for module in self.model.modules():
            module.__dict__.pop("forward", None)
        self.adapter.revert_(self.model)

    @contextmanager
    def _converted(self, schedule: Schedule) -> Iterator[TokenState]:
        state = TokenState()
        config = config_of(schedule, self.config)
        sites = self.planner.sites(counts_of(schedule))
        self.adapter.convert_(self.model, config, sites, state)
        try:
            yield state
        finally:
            self.adapter.revert_(self.model)

    def _run(self, schedule: Schedule, index: int, state: TokenState) -> Any:
        if not self.resumes:
            return self.model(self.batches[index])
        units = self._units()
        ends = [_last_block(unit) for unit in units]
        keys = [(index, end, tuple(s for s in schedule if s.block <= end)) for end in ends]
        # The last unit leaves things for the head that are not kept: it always runs.
        known = [n for n, key in enumerate(keys[:-1]) if key in self.memory]
        start = known[-1] if known else -1
        patched: list[nn.Module] = []
        try:
            if start >= 0:
                kept = self.memory[keys[start]]
                patched += _pass_over_(self.model, units[start], kept, state, ends[start])
            for number in range(start + 1, len(units)):
                _remember_(units[number], keys[number], self.memory, state, ends[number])
                patched.append(units[number])
            return self.model(self.batches[index])
        finally:
            for module in patched:
                del module.forward

    def _units(self) -> list[nn.Module]:
        """The modules after which a trial can start: the blocks, or what contains several."""
        paths = [block.path for block in self.planner.layout.blocks]
        return self.adapter.units(self.model) or [self.model.get_submodule(path) for path in paths]

    @torch.no_grad()
    def _can_resume(self) -> bool:
        """Whether starting in the middle gives the same; networks with other habits start over."""
        self.resumes = True
        with self._converted(()) as state:
            first = self._run((), 0, state)
            try:
                again = self._run((), 0, state)
            except (RuntimeError, ValueError, TypeError, AssertionError):
                return False
        reference = self.reference[0]
        close = self.divergence(first, reference).abs().max() < 1e-3
        return bool(close and self.divergence(again, first).abs().max() < 1e-5)


def _last_block(unit: nn.Module) -> int:
    """The last of the network's blocks that belong to a unit."""
    slots: list[Any] = [getattr(module, "slot", None) for module in unit.modules()]
    return max(slot.index for slot in slots if slot is not None)


def _pass_over_(
    model: nn.Module, unit: nn.Module, kept: Kept, state: TokenState, end: int
) -> list[nn.Module]:
    """Make a unit give what it gave before, and everything before it pass its input on."""
    output, tokens = kept
    path = next(name for name, module in model.named_modules() if module is unit).split(".")
    before: list[nn.Module] = []
    for depth in range(1, len(path)):
        parent = model.get_submodule(".".join(path[:depth]))
        names = [name for name, _ in parent.named_children()]
        before += [parent.get_submodule(n) for n in names[: names.index(path[depth])]]

    def give(*_args: object, **_options: object) -> Any:
        state.leave(end, tokens)
        return output

    for module in before:
        module.forward = _pass_on
    unit.forward = give
    return [*before, unit]


def _pass_on(x: Any, *_args: object, **_options: object) -> Any:
    return x


def _remember_(unit: nn.Module, key: object, memory: Memory, state: TokenState, end: int) -> None:
    """Make a unit keep what it gives."""
    forward = unit.forward

    def run(*args: Any, **options: Any) -> Any:
        output = forward(*args, **options)
        memory.put(key, (output, state.left_by(end)))
        return output

    unit.forward = run

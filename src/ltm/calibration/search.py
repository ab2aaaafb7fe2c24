"""Local search for the schedule whose outputs diverge least from the original's.

All schedules see the same images. The difference of two is paired, and so less noisy than either:
one that is worse on the first batches by more than the noise is not tried on the rest. The outputs
of blocks are kept together with the schedule up to there: a trial starts at the first block whose
output is not known.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, cat, nn

from ltm.adapters.base import Adapter
from ltm.adapters.blocks import TokenState
from ltm.adapters.planning import Planner
from ltm.evaluation.accuracy import kl_divergence
from ltm.methods.base import Count, MethodConfig


@dataclass(frozen=True)
class Setting:
    """One site of a schedule."""

    block: int
    count: Count
    """Tokens left, prefix excluded; (height, width) on grids."""
    choice: Hashable = None
    """One of the method's `choices`; None on grids, and if the method has none."""


Schedule = tuple[Setting, ...]
"""The sites of a network in the order of their blocks; every one merges."""


def config_of(schedule: Schedule, base: MethodConfig) -> MethodConfig:
    """The schedule as a plain config; everything else is as in `base`."""
    if not schedule:
        return base.scheduled(ratio=1.0)
    return base.scheduled(
        counts=tuple(setting.count for setting in schedule),
        sites=tuple(setting.block for setting in schedule),
        choices=tuple(setting.choice for setting in schedule),
    )


Cost = Callable[[Schedule], float]
"""Multiply-adds of a schedule, as a share of the original's."""


class CountedCost:
    """The cost of a schedule, counted on `meta` and remembered."""

    def __init__(self, planner: Planner, config: MethodConfig) -> None:
        self._planner, self._config = planner, config
        self._known: dict[Schedule, float] = {}

    def __call__(self, schedule: Schedule) -> float:
        if schedule not in self._known:
            plan = self._planner.with_config(config_of(schedule, self._config)).plan()
            self._known[schedule] = plan.macs_after / plan.macs_before
        return self._known[schedule]


Phase = Literal["sensitivity", "start", "refinement", "settings"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One schedule that was tried."""

    phase: Phase
    schedule: Schedule
    share: float
    """Of the original's multiply-adds, mask modules included."""
    divergence: float
    """From the original's outputs, the mean over `num_images`."""
    num_images: int
    """How many images the schedule was tried on: fewer if it is clearly worse than the best."""
    is_best: bool = False
    """Whether it was the best so far."""


Progress = Callable[[Trial], None]
"""Called after every trial."""

_KICKS = 3
"""Steps of a random walk out of a local optimum."""

_ADJUSTMENTS = 20
"""How many settings of the method to try on one schedule."""
_KEPT_BACK = 0.1
"""At most this share of the trials is kept back, to try settings on the best schedule."""

_Kept = tuple[Any, Any]
"""A block's output, and what is known about its tokens."""


def cosine_distance(features: Any, original: Any) -> Tensor:
    """One minus the cosine of features; the feature maps of a network are concatenated."""
    return 1 - F.cosine_similarity(_flat(features), _flat(original), dim=1)


def _flat(features: Tensor | Sequence[Tensor]) -> Float[Tensor, "b d"]:
    maps = [features] if isinstance(features, Tensor) else features
    return cat([one.float().flatten(1) for one in maps], dim=1)


class _Memory:
    """Block outputs by batch and settings; the least recently used are dropped to save memory.

    The state of tokens counts too, as the merges of long sequences are larger than the outputs.
    Blocks share tensors, so the bytes of each storage are counted once.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._kept: OrderedDict[object, _Kept] = OrderedDict()
        self._users: Counter[int] = Counter()
        self.used = 0

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __getitem__(self, key: object) -> _Kept:
        self._kept.move_to_end(key)
        return self._kept[key]

    def put(self, key: object, kept: _Kept) -> None:
        if key in self._kept:
            return
        self._kept[key] = kept
        for place, num_bytes in _storages(kept).items():
            self.used += 0 if self._users[place] else num_bytes
            self._users[place] += 1
        while self.used > self.num_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, kept = self._kept.popitem(last=False)
        for place, num_bytes in _storages(kept).items():
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                self.used -= num_bytes


def _storages(value: Any) -> dict[int, int]:
    """The storages of the tensors within a value: bytes by address."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    found: dict[int, int] = {}
    for part in cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ():
        found |= _storages(part)
    return found


class Trials:
    """Tries schedules on one set of images and one network, which it converts and reverts."""

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
        self.planner = Planner(model, adapter, config.scheduled(ratio=1.0), size)
        with torch.no_grad():
            self.reference = [model(batch) for batch in self.batches]
        outputs, classes = self.reference[0], self.planner.layout.num_classes
        scores = isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] == classes
        self.divergence = kl_divergence if scores and classes > 1 else cosine_distance
        self.memory = _Memory(memory_bytes)
        self.resumes = self._can_resume()

    @property
    def num_images(self) -> int:
        """Images altogether."""
        return sum(len(batch) for batch in self.batches)

    @torch.no_grad()
    def stream(self, schedule: Schedule) -> Generator[Tensor, None, None]:
        """The divergence of every image, batch by batch; close it to revert the network."""
        with self._converted(schedule) as state:
            for index, reference in enumerate(self.reference):
                outputs = self._run(schedule, index, state)
                yield self.divergence(outputs, reference).double().cpu()

    def tidy_(self) -> None:
        """Revert the network, wherever a trial was interrupted."""
        for module in self.model.modules():
            module.__dict__.pop("forward", None)
        self.adapter.revert_(self.model)

    @contextmanager
    def _converted(self, schedule: Schedule) -> Iterator[TokenState]:
        state = TokenState()
        config = config_of(schedule, self.config)
        counts = {setting.block: setting.count for setting in schedule}
        sites = self.planner.with_config(config).sites(counts)
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
        keys = [
            (self.config, index, end, tuple(s for s in schedule if s.block <= end)) for end in ends
        ]
        # The last unit always runs, as it leaves state for the head that is not kept.
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
        """The modules after which a trial can start: blocks, or modules of several blocks."""
        paths = [block.path for block in self.planner.layout.blocks]
        return self.adapter.units(self.model) or [self.model.get_submodule(path) for path in paths]

    @torch.no_grad()
    def _can_resume(self) -> bool:
        """Whether starting in the middle gives the same outputs; otherwise trials run in full."""
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
    model: nn.Module, unit: nn.Module, kept: _Kept, state: TokenState, end: int
) -> list[nn.Module]:
    """Make a unit return its kept output, and all modules before it return their input."""
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


def _remember_(unit: nn.Module, key: object, memory: _Memory, state: TokenState, end: int) -> None:
    """Make a unit store its output in the memory."""
    forward = unit.forward

    def run(*args: Any, **options: Any) -> Any:
        output = forward(*args, **options)
        memory.put(key, (output, state.left_by(end)))
        return output

    unit.forward = run


class EnoughTrials(Exception):  # noqa: N818 - not an error
    """As many schedules were tried as were asked for."""


class Search:
    """The best schedule so far, and everything that was tried."""

    def __init__(
        self,
        trials: Trials,
        cost: Cost,
        *,
        num_trials: int,
        seed: int,
    ) -> None:
        self.trials, self.cost, self.num_trials = trials, cost, num_trials
        self.progress: Progress = lambda _: None
        self.history: list[Trial] = []
        self.best: Schedule | None = None
        self._best_values: Tensor | None = None
        self.uncalibrated = math.inf
        """The mean divergence of the default schedule, once it was gauged."""
        self._tried: set[Schedule] = set()
        self._probed: dict[tuple[MethodConfig, Schedule], float] = {}
        self._has_result = False
        self._end = num_trials
        self._kept_back = 0
        self._random = random.Random(seed)  # noqa: S311 - not for secrets

    @property
    def divergence(self) -> float:
        """The mean divergence of the best schedule, over all images."""
        return math.inf if self._best_values is None else float(self._best_values.mean())

    def forget(self, *, adjusts: bool = False) -> None:
        """Start over for another budget; the history stays.

        If it `adjusts` the best schedule at last, a few trials are kept back for that.
        """
        self.best, self._best_values, self.uncalibrated = None, None, math.inf
        self._tried.clear()
        self._has_result = False
        self._end = len(self.history) + self.num_trials
        self._kept_back = min(_ADJUSTMENTS, int(_KEPT_BACK * self.num_trials)) if adjusts else 0

    @property
    def _is_over(self) -> bool:
        """Whether as many trials were made as were asked for, but for those kept back."""
        return len(self.history) >= self._end - self._kept_back

    def probe(self, schedule: Schedule) -> float:
        """The divergence on the first batch; the schedule may exceed the budget."""
        key = self.trials.config, schedule
        if key not in self._probed:
            with closing(self.trials.stream(schedule)) as stream:
                values = next(stream)
            self._probed[key] = float(values.mean())
            self._note("sensitivity", schedule, values, is_best=False)
        return self._probed[key]

    def gauge(self, schedule: Schedule, *, is_result: bool) -> Tensor:
        """Measure the default schedule on all images; `is_result`: it may be the result."""
        with closing(self.trials.stream(schedule)) as stream:
            values = torch.cat(list(stream))
        self.uncalibrated = float(values.mean())
        self._has_result = is_result
        self._note("start", schedule, values, is_best=False)
        return values

    def adjust(self, schedule: Schedule, values: Tensor) -> Tensor:
        """Change the method's settings, one at a time, as long as that helps a schedule.

        `values` are its divergences with the current settings; returns those with the last.
        """
        tried = {self.trials.config}
        while not self._is_over and len(tried) <= _ADJUSTMENTS:
            fresh = (c for c in self.trials.config.variations() if c not in tried)
            config = next(fresh, None)
            if config is None:
                break
            tried.add(config)
            found = self._with_settings(config, schedule, values)
            values = values if found is None else found
        return values

    def adopt(self, schedule: Schedule, values: Tensor) -> None:
        """Make a schedule the best so far; `values` are its divergences."""
        self._tried.add(schedule)
        self.best, self._best_values = schedule, values

    def adjust_best(self) -> None:
        """Change the method's settings as long as that helps the best schedule."""
        self._kept_back = 0
        if self.best is not None and self._best_values is not None:
            self._best_values = self.adjust(self.best, self._best_values)

    def _with_settings(
        self, config: MethodConfig, schedule: Schedule, values: Tensor
    ) -> Tensor | None:
        """Adopt other settings if a schedule is better with them; returns its divergences then."""
        before, self.trials.config = self.trials.config, config
        better = False
        try:
            found = self._divergences(schedule, values)
            better = len(found) == len(values) and bool(found.mean() < values.mean())
            self._note("settings", schedule, found, is_best=better)
        finally:
            if not better:
                self.trials.config = before
        return found if better else None

    def consider(self, schedule: Schedule, phase: Phase) -> bool:
        """Try a schedule; returns whether it is the best so far."""
        self._tried.add(schedule)
        values = self._divergences(schedule, self._best_values)
        whole = len(values) == self.trials.num_images
        better = whole and float(values.mean()) < self.divergence
        if better:
            self.best, self._best_values = schedule, values
        self._note(phase, schedule, values, is_best=better)
        return better

    def refine(self, space: Space) -> None:
        """Walk downhill from the best schedule, until nothing is left to try."""
        while self.best is not None:
            if not self._descend(space, self.best) and not self._kick(space):
                return

    def _descend(self, space: Space, schedule: Schedule) -> bool:
        """Try the neighbours until one is better."""
        for candidate in space.neighbours(schedule):
            if candidate not in self._tried and self.consider(candidate, "refinement"):
                return True
        return False

    def _kick(self, space: Space) -> bool:
        """Try the end of a random walk from the best schedule; False if no new one is found."""
        for _ in range(20):
            schedule = self.best or ()
            for _ in range(_KICKS):
                around = list(space.neighbours(schedule))
                schedule = self._random.choice(around) if around else schedule
            if schedule not in self._tried:
                self.consider(schedule, "refinement")
                return True
        return False

    def _divergences(self, schedule: Schedule, others: Tensor | None) -> Tensor:
        """The divergences of a schedule, broken off once it is clearly worse than `others`."""
        parts: list[Tensor] = []
        with closing(self.trials.stream(schedule)) as stream:
            for part in stream:
                parts.append(part)
                if others is not None and _is_beaten(torch.cat(parts), others):
                    break
        return torch.cat(parts)

    def _note(self, phase: Phase, schedule: Schedule, values: Tensor, *, is_best: bool) -> None:
        trial = Trial(
            phase=phase,
            schedule=schedule,
            share=self.cost(schedule),
            divergence=float(values.mean()),
            num_images=len(values),
            is_best=is_best,
        )
        self.history.append(trial)
        self.progress(trial)
        found = self._has_result or self.best is not None
        if found and self._is_over and phase != "settings":  # those end by themselves
            raise EnoughTrials


def _is_beaten(values: Tensor, others: Tensor) -> bool:
    """Whether divergences exceed others, of the same images, by more than the noise."""
    excess = values - others[: len(values)]
    noise = float(excess.std()) / math.sqrt(len(excess)) if len(excess) > 1 else 0.0
    return float(excess.mean()) > noise


class Space(ABC):
    """Schedules within a budget, and which of them are close to each other."""

    budget = 1.0
    num_sites = 1
    """At most so many blocks merge (sequences only)."""

    def __init__(self, search: Search) -> None:
        self.search, self.cost = search, search.cost

    @property
    @abstractmethod
    def floor(self) -> float:
        """The smallest share of the multiply-adds that merging can reach."""

    @abstractmethod
    def starts(self) -> list[Schedule]:
        """Where to begin, the most promising first."""

    @abstractmethod
    def neighbours(self, schedule: Schedule) -> Iterator[Schedule]:
        """What is one step away, the most promising first."""

    def default(self, share: float) -> Schedule | None:
        """The method's own schedule for a share; None if it has none."""
        trials = self.search.trials
        config = trials.config.scheduled(ratio=share)
        try:
            sites = trials.planner.with_config(config).plan().sites
        except ValueError:
            return None
        return tuple(
            Setting(site.block, site.num_out, config.choice_at(site.block))
            if site.grid_out is None
            else Setting(site.block, site.grid_out)
            for site in sites
            if site.merges
        )

    def suited(self, schedule: Schedule) -> Schedule | None:
        """The nearest schedule of this space, if there is one; it may exceed the budget."""
        return schedule

    def without_last(self) -> list[Schedule]:
        """Default schedules of larger budgets, whose excess is saved at the last block."""
        return []

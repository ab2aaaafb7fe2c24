"""Local search over schedules, racing each against the best so far.

Two schedules see the same images, so their difference is paired and far less noisy than either:
one that is worse on the first batch by more than the noise is not tried on the others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Protocol

import torch
from torch import Tensor

from ltm.calibration.costs import Cost
from ltm.calibration.schedules import Phase, Schedule, Trial
from ltm.calibration.trials import Trials

Progress = Callable[[Trial], None]
"""Called after every trial."""

_KICKS = 3
"""Steps of a random walk that leads out of a local optimum."""


class Space(Protocol):
    """Schedules within a budget, and which of them are close to each other."""

    def starts(self) -> list[Schedule]:
        """Where to begin, the most promising first."""
        ...

    def neighbours(self, schedule: Schedule) -> Iterator[Schedule]:
        """What is one step away, the most promising first."""
        ...


class Search:
    """The best schedule so far, and everything that was tried."""

    def __init__(
        self, trials: Trials, cost: Cost, *, seed: int, progress: Progress = lambda _: None
    ) -> None:
        self.trials, self.cost, self.progress = trials, cost, progress
        self.history: list[Trial] = []
        self.best: Schedule | None = None
        self._best_values: Tensor | None = None
        self._tried: set[Schedule] = set()
        self._num_refined = 0
        self._random = random.Random(seed)  # noqa: S311 - not for secrets

    @property
    def divergence(self) -> float:
        """The mean divergence of the best schedule, over all images."""
        return math.inf if self._best_values is None else float(self._best_values.mean())

    def forget(self) -> None:
        """Start anew, for another budget; what was tried stays in the history."""
        self.best, self._best_values = None, None
        self._tried.clear()

    def probe(self, schedule: Schedule) -> float:
        """The divergence on the first batch, whatever the budget; it cannot become the best."""
        with closing(self.trials.stream(schedule)) as stream:
            values = next(stream)
        self._note("sensitivity", schedule, values, is_best=False)
        return float(values.mean())

    def gauge(self, schedule: Schedule) -> float:
        """The divergence on all images, for comparison; it cannot become the best."""
        with closing(self.trials.stream(schedule)) as stream:
            values = torch.cat(list(stream))
        self._note("start", schedule, values, is_best=False)
        return float(values.mean())

    def consider(self, schedule: Schedule, phase: Phase) -> bool:
        """Try a schedule; whether it is the best so far."""
        self._tried.add(schedule)
        self._num_refined += phase == "refinement"
        parts: list[Tensor] = []
        with closing(self.trials.stream(schedule)) as stream:
            for part in stream:
                parts.append(part)
                if self._is_beaten(torch.cat(parts)):
                    break
        values = torch.cat(parts)
        whole = len(values) == self.trials.num_images
        better = whole and float(values.mean()) < self.divergence
        if better:
            self.best, self._best_values = schedule, values
        self._note(phase, schedule, values, is_best=better)
        return better

    def refine(self, space: Space, num_trials: int) -> None:
        """Walk downhill, from the best schedule, for so many trials at most."""
        end = self._num_refined + num_trials
        while self._num_refined < end and self.best is not None:
            if not self._descend(space, self.best, end) and not self._kick(space):
                return

    def _descend(self, space: Space, schedule: Schedule, end: int) -> bool:
        """Try the neighbours until one is better."""
        for candidate in space.neighbours(schedule):
            if self._num_refined >= end:
                return True
            if candidate not in self._tried and self.consider(candidate, "refinement"):
                return True
        return False

    def _kick(self, space: Space) -> bool:
        """Try what a random walk from the best schedule leads to; False where all was tried."""
        for _ in range(20):
            schedule = self.best or ()
            for _ in range(_KICKS):
                around = list(space.neighbours(schedule))
                schedule = self._random.choice(around) if around else schedule
            if schedule not in self._tried:
                self.consider(schedule, "refinement")
                return True
        return False

    def _is_beaten(self, values: Tensor) -> bool:
        """Whether it is worse than the best on the same images by more than the noise."""
        if self._best_values is None:
            return False
        excess = values - self._best_values[: len(values)]
        noise = float(excess.std()) / math.sqrt(len(excess)) if len(excess) > 1 else 0.0
        return float(excess.mean()) > noise

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

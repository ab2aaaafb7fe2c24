"""A schedule (which blocks merge, how many tokens they leave, and how), and what a search found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ltm.adapters.planning import Planner
from ltm.api import merging_copy, save
from ltm.evaluation.environment import describe
from ltm.files import write_metrics
from ltm.methods.base import Count, MethodConfig


@dataclass(frozen=True)
class Setting:
    """One site of a schedule."""

    block: int
    count: Count
    """Tokens left, prefix excluded; (height, width) on grids."""
    choice: Hashable = None
    """One of the method's `choices`; None on grids, and where there is none to make."""


Schedule = tuple[Setting, ...]
"""The sites of a network in the order of their blocks; every one merges."""


def counts_of(schedule: Schedule) -> dict[int, Count]:
    """Tokens left after each site, by block."""
    return {setting.block: setting.count for setting in schedule}


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
    """The cost of a schedule, counted on `meta`, once."""

    def __init__(self, planner: Planner, config: MethodConfig) -> None:
        self._planner, self._config = planner, config
        self._known: dict[Schedule, float] = {}

    def __call__(self, schedule: Schedule) -> float:
        if schedule not in self._known:
            plan = self._planner.with_config(config_of(schedule, self._config)).plan()
            self._known[schedule] = plan.macs_after / plan.macs_before
        return self._known[schedule]


Phase = Literal["sensitivity", "start", "refinement"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One schedule that was tried."""

    phase: Phase
    schedule: Schedule
    share: float
    """Of the original's multiply-adds, the mask modules included."""
    divergence: float
    """From the original's outputs, a mean over the images that were looked at."""
    num_images: int
    """A schedule that is clearly worse than the best is not tried on all of them."""
    is_best: bool = False
    """Whether it was the best so far."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CalibrateResult:
    """The schedule that stays closest to the original within the budget. Print it."""

    config: MethodConfig
    """Give it to `merge_tokens_`, save it, use it on other copies of the network."""
    divergence: float
    """Mean divergence from the original's outputs: KL in nats, or one less cosine of features."""
    uncalibrated: float | None
    """The same of the method's own schedule at that ratio, which knows no images."""
    measure: str
    share: float
    budget: float
    """The share that was allowed; measured milliseconds translate to one."""
    num_images: int
    history: tuple[Trial, ...]
    interrupted: bool = False
    milliseconds: float | None = None
    """Per batch, where the budget was a time."""
    model: nn.Module | None = field(default=None, compare=False)
    """The network, without any merging."""
    image_size: tuple[int, int] | None = None
    data: str = ""
    """Where the images are from."""

    def __repr__(self) -> str:
        sites = zip(self.config.sites or (), self.config.counts or (), strict=True)
        before = "" if self.uncalibrated is None else f" (uncalibrated {self.uncalibrated:.4f})"
        time = "" if self.milliseconds is None else f", {self.milliseconds:.2f} ms a batch"
        headline = (
            f"{self.share:.3f} of the multiply-adds{time}: {self.measure} {self.divergence:.4f}"
            f"{before} on {self.num_images} images, {len(self.history)} trials"
        )
        lines = [f"  block {block:>2}: {self._tokens(block, count)}" for block, count in sites]
        return "\n".join([headline, *lines])

    def _tokens(self, block: int, count: Any) -> str:
        if isinstance(count, tuple):
            return f"{count[0]} x {count[1]} tokens"
        choice = self.config.choice_at(block)
        return f"{count} tokens" if choice is None else f"{count} tokens, {choice}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the history."""
        values = {
            entry.name: getattr(self, entry.name)
            for entry in dataclasses.fields(self)
            if entry.name not in ("config", "history", "model", "image_size", "data")
        }
        return {**values, "num_trials": len(self.history), "config": self.config.to_dict()}

    def save(self, folder: str | Path, **about: object) -> Path:
        """Write the network that merges as found, for `ltm.load` and --run, and metrics.json.

        `about` is added to the metrics.
        """
        if self.model is None:
            raise ValueError("model: this result has no network; merge_tokens_ takes its config")
        device = next(self.model.parameters()).device
        network = merging_copy(self.model, self.config, self.image_size).cpu()
        folder = save(network, folder)
        metrics = {
            "data": self.data,
            **about,
            **self.to_dict(),
            "environment": dataclasses.asdict(describe(device)),
            "history": [dataclasses.asdict(trial) for trial in self.history],
        }
        write_metrics(folder, metrics)
        return folder

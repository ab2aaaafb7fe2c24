"""A budget in milliseconds: what share of the multiply-adds takes that long, here.

Time follows multiply-adds closely where the sites stay few, and not exactly: the share is found
by timing, and corrected by timing what the search within it has found.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor, nn

from ltm.api import freeze_, merge_tokens_
from ltm.calibration.schedules import CalibrateResult
from ltm.evaluation.modes import MODES
from ltm.evaluation.timing import interleaved
from ltm.methods import MethodConfig

_HALVINGS = 5
_CORRECTIONS = 4
_CLOSE = 0.97
"""A time of this share of the budget uses it up."""


class Clock:
    """Milliseconds a batch on this device, the original and the merged network in turn."""

    def __init__(
        self, model: nn.Module, images: Tensor, *, mode: str | None = None, rounds: int = 9
    ) -> None:
        parameter = next(model.parameters())
        self.model, self.rounds = model, rounds
        self.images = images.to(parameter.device, parameter.dtype)
        self.mode = mode or ("cudagraph" if parameter.device.type == "cuda" else "eager")
        if self.mode not in MODES:
            raise ValueError(f"mode: got {self.mode!r}; choose from {', '.join(MODES)}.")
        self._original = self._ready(model)
        self.original = self._times({"original": self._original})["original"]

    def __call__(self, config: MethodConfig) -> float:
        """The time of a network that merges so, corrected for how fast the device is just now."""
        merging = copy.deepcopy(self.model)
        merge_tokens_(merging, config, (self.images.shape[-2], self.images.shape[-1]))
        calls = {"original": self._original, "merging": self._ready(freeze_(merging))}
        times = self._times(calls)
        return times["merging"] / times["original"] * self.original

    def _ready(self, model: nn.Module) -> Callable[[], object]:
        run = MODES[self.mode](model, self.images)
        return lambda: run(self.images)

    @torch.no_grad()
    def _times(self, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        rounds = interleaved(calls, self.images.device, rounds=self.rounds)
        return {name: 1e3 * median(times) for name, times in rounds.items()}


def within_milliseconds(
    search: Callable[[float], CalibrateResult],
    sketch: Callable[[float], MethodConfig | None],
    clock: Callable[[MethodConfig], float],
    *,
    original: float,
    budget_ms: float,
    floor: float,
) -> CalibrateResult:
    """The best schedule that takes no longer than the budget.

    `search` finds the best schedule within a share, `sketch` a plausible one at once; `floor` is
    the smallest share there is.
    """
    if not budget_ms > 0:
        raise ValueError(f"budget_ms: got {budget_ms}; it must be positive.")
    if budget_ms >= original:
        raise ValueError(
            f"budget_ms: got {budget_ms}; the original takes {original:.2f} ms a batch here, so "
            "nothing has to merge."
        )
    share = _share_for(sketch, clock, budget_ms=budget_ms, floor=floor)
    tried: list[CalibrateResult] = []
    try:
        tried.extend(_corrections(search, clock, budget_ms, share, floor))
    except KeyboardInterrupt:
        tried = [dataclasses.replace(found, interrupted=True) for found in tried]
        if not tried:
            raise
    within = [found for found in tried if _time(found) <= budget_ms]
    if not within:
        raise ValueError(
            f"budget_ms: got {budget_ms}; the fastest that was found takes "
            f"{min(map(_time, tried)):.2f} ms a batch here, the original {original:.2f}."
        )
    return min(within, key=lambda found: found.divergence)


def _time(found: CalibrateResult) -> float:
    assert found.milliseconds is not None
    return found.milliseconds


def _corrections(
    search: Callable[[float], CalibrateResult],
    clock: Callable[[MethodConfig], float],
    budget_ms: float,
    share: float,
    floor: float,
) -> Iterator[CalibrateResult]:
    """What is found within a share, timed, and within shares corrected by that time."""
    met = 0.0
    for _ in range(_CORRECTIONS):
        found = search(share)
        time = clock(found.config)
        yield dataclasses.replace(found, milliseconds=time)
        if found.interrupted or _CLOSE * budget_ms <= time <= budget_ms:
            return
        met = max(met, share) if time <= budget_ms else met
        share = min(1.0, max(floor, share * min(budget_ms / time * 0.99, 1.1)))
        if share <= met:
            return


def _share_for(
    sketch: Callable[[float], MethodConfig | None],
    clock: Callable[[MethodConfig], float],
    *,
    budget_ms: float,
    floor: float,
) -> float:
    """The largest share whose sketch keeps to the time, by halving."""
    low, high = floor, 1.0
    fastest = sketch(min(1.0, 1.02 * floor))
    if fastest is not None and (time := clock(fastest)) > budget_ms:
        raise ValueError(
            f"budget_ms: got {budget_ms}; merging tokens cannot go below {time:.2f} ms a batch "
            "here."
        )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        config = sketch(middle)
        if config is None or clock(config) > budget_ms:
            high = middle
        else:
            low = middle
    return low

"""Interleaved timing: calls run in rounds, and a speed-up is the median of the rounds' ratios.

Machines drift: clocks rise and fall, other processes come and go. So everything that is compared
runs in one loop, and ratios are taken within rounds, never between runs. A GPU at its power limit
is faster after light work than after heavy work, so each round has another order: no call always
follows the same one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from ltm.files import shared_lock

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A median with an interval around it."""

    median: float
    low: float
    high: float


def interleaved(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    rounds: int = 15,
    warmup: int = 3,
    least_seconds: float = 0.02,
) -> dict[str, list[float]]:
    """Seconds per call of each, one value a round, in rounds that run all of them in turn.

    Over as many rounds as there are calls (twice as many if odd) each follows each equally often.
    Short calls are repeated within a turn until it lasts about `least_seconds`.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}: at least 1 is needed")
    repeats = {}
    for name, call in calls.items():
        for _ in range(warmup):
            call()
        seconds = max(time_call(call, device), 1e-7)
        repeats[name] = max(1, math.ceil(least_seconds / seconds))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds):
        for name in _order(list(calls), index):
            times[name].append(time_call(calls[name], device, repeats[name]))
    return times


def _order(names: Sequence[str], index: int) -> list[str]:
    """The order of a round: a row of Williams' square, in which each follows each other once.

    The first row goes to and fro, 0, 1, n - 1, 2, n - 2; each further one is that shifted by one.
    For an odd number it takes the mirrored rows too: they alternate.
    """
    number = len(names)
    row = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(number)]
    order = [names[(place + index) % number] for place in row]
    mirrored = number % 2 == 1 and index % 2 == 1
    return order[::-1] if mirrored else order


def time_call(call: Call, device: torch.device, repeats: int = 1) -> float:
    """Seconds per call: CUDA events on a GPU, the processor's clock elsewhere."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / repeats
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def spread(times: Sequence[float]) -> Estimate:
    """Median and quartiles."""
    places = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, median, high = torch.tensor(times, dtype=torch.float64).quantile(places).tolist()
    return Estimate(median=median, low=low, high=high)


def speedup(base: Sequence[float], other: Sequence[float], level: float = 0.95) -> Estimate:
    """How many times faster `other` is: the median of the rounds' ratios, with its interval.

    The interval is that of order statistics: it assumes nothing about how times are distributed.
    With fewer than six rounds it is the whole range, and covers less than `level`.
    """
    ratios = sorted(b / o for b, o in zip(base, other, strict=True))
    rank = _rank(len(ratios), level)
    return Estimate(median=median(ratios), low=ratios[rank], high=ratios[-1 - rank])


def _rank(count: int, level: float) -> int:
    """How many ordered values to leave out on each side, so that the rest holds the median."""
    below, rank = 0.0, 0
    for index in range(count // 2):
        below += math.comb(count, index) / 2**count
        if 2 * below > 1 - level:
            break
        rank = index
    return rank


def verdict(ratio: Estimate) -> str:
    """Say it plainly: a gain, a loss, or neither, where the interval touches 1."""
    if round(ratio.low, 2) > 1:
        return f"{ratio.median:.2f}x"
    if round(ratio.high, 2) < 1:
        return f"{ratio.median:.2f}x, slower"
    return "no gain here"


class TimingLock:
    """Processes that share `path` prepare side by side and are timed one at a time.

    Without a path there is no waiting. The lock is free again when its process ends.
    """

    _SECONDS_TO_END = 1.0
    """How long a process may still be busy after it has left the lock for the last time."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def preparing(self) -> AbstractContextManager[bool]:
        """Any number of processes may be in here while none is timed."""
        return self._held(exclusive=False)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """One process may be in here while no other prepares or is timed."""
        with self._held(exclusive=True) as waited:
            if waited:
                time.sleep(self._SECONDS_TO_END)
            yield

    def _held(self, *, exclusive: bool) -> AbstractContextManager[bool]:
        if self.path is None:
            return nullcontext(False)
        return shared_lock(self.path, exclusive=exclusive)

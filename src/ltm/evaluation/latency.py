"""How long calls and networks take: interleaved rounds, and speed-ups with their intervals.

Machines drift: clocks rise and fall, other processes come and go. So everything that is compared
runs in one loop (`interleaved`), and a speed-up is the median of the ratios within rounds, never
between runs. A GPU at its power limit is faster after light work than after heavy work, so each
round has another order: no call always follows the same one.

`measure_latency` takes candidates (networks) and conditions (batch, precision, device) and returns
one `Timing`, with throughput and memory, for each candidate in each mode of `modes.MODES`.
"""

from __future__ import annotations

import copy
import gc
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ltm.core.cost import channels_of
from ltm.core.validation import require_least
from ltm.evaluation.modes import (
    MODES,
    Mode,
    Runner,
    TrainingStep,
    peak_memory_mib,
    use_fast_paths_,
)
from ltm.evaluation.settings import Scope
from ltm.files import shared_lock

# --- Calls ---------------------------------------------------------------------------------------

Call = Callable[[], object]
Rounds = Callable[[range], Iterator[int]]
"""What goes through rounds of timing, one by one."""


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
    progress: Rounds = iter,
) -> dict[str, list[float]]:
    """Seconds per call, one value a round; in each round all calls take turns.

    Over n rounds of n calls (2n if n is odd) each call follows each other equally often. Short
    calls are repeated until a turn lasts about `least_seconds`. `progress` goes through the
    rounds, and may tell how far it is.
    """
    require_least("rounds", rounds)
    repeats = {}
    for name, call in calls.items():
        for _ in range(warmup):
            call()
        seconds = max(time_call(call, device), 1e-7)
        repeats[name] = max(1, math.ceil(least_seconds / seconds))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in progress(range(rounds)):
        for name in _order(list(calls), index):
            times[name].append(time_call(calls[name], device, repeats[name]))
    return times


def _order(names: Sequence[str], index: int) -> list[str]:
    """The order of a round: a row of Williams' square, in which each follows each other once.

    The first row is 0, 1, n - 1, 2, n - 2 and so on, and each further row is shifted by one. For
    odd n, every second row is reversed.
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


def speedup(base: Sequence[float], other: Sequence[float]) -> Estimate:
    """How many times faster `other` is: the median of the rounds' ratios, with its 95% interval.

    The interval is that of order statistics: it assumes nothing about how times are distributed.
    With fewer than six rounds it is the whole range, and covers less than that.
    """
    ratios = sorted(b / o for b, o in zip(base, other, strict=True))
    rank = _rank(len(ratios))
    return Estimate(median=median(ratios), low=ratios[rank], high=ratios[-1 - rank])


def _rank(count: int) -> int:
    """How many ordered values to leave out on each side; the rest still holds the median."""
    below, rank = 0.0, 0
    for index in range(count // 2):
        below += math.comb(count, index) / 2**count
        if 2 * below > 0.05:
            break
        rank = index
    return rank


def verdict(ratio: Estimate) -> str:
    """A gain, a loss, or neither if the interval touches 1."""
    if round(ratio.low, 2) > 1:
        return f"{ratio.median:.2f}x"
    if round(ratio.high, 2) < 1:
        return f"{ratio.median:.2f}x, slower"
    return "no gain here"


class TimingLock:
    """Processes that share `path` prepare side by side and are timed one at a time.

    Without a path nobody waits. A process that ends releases the lock.
    """

    _SECONDS_TO_END = 1.0
    """How long a process may still be busy after it has left the lock for the last time."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def preparing(self) -> AbstractContextManager[bool]:
        """Enter together with others that prepare, while none is timed."""
        return self._held(exclusive=False)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Enter alone, while no other process prepares or is timed."""
        with self._held(exclusive=True) as waited:
            if waited:
                time.sleep(self._SECONDS_TO_END)
            yield

    def _held(self, *, exclusive: bool) -> AbstractContextManager[bool]:
        if self.path is None:
            return nullcontext(False)
        return shared_lock(self.path, exclusive=exclusive)


# --- Networks ------------------------------------------------------------------------------------

BASE = "base"
"""The method's name of the untouched network."""

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Terminal codes for colours."""


Batches = Sequence[tuple[Tensor, Any]] | DataLoader[Any]
"""Images and labels, as often as asked for."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidate:
    """A network to time. A copy runs: its own weights stay as they are."""

    method: str
    model: nn.Module
    ratio: float | None = None
    gmacs: float | None = None
    note: str = ""
    modes: Mapping[str, Mode] = field(default_factory=dict)
    """Modes that replace those of `MODES` for it, such as an exported file."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What all candidates of a comparison have in common."""

    model: str
    image_size: tuple[int, int]
    batch_size: int
    dtype: str = "fp32"
    scope: Scope = "model"
    device: str = "cpu"
    channels_last: bool = False
    rounds: int = 15
    warmup: int = 3

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype}: it must be one of {', '.join(DTYPES)}")
        require_least("batch_size", self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One candidate in one mode. Times are per batch; intervals of ratios are 95%."""

    model: str
    method: str
    ratio: float | None
    image_size: tuple[int, int]
    batch_size: int
    dtype: str
    mode: str
    scope: str
    device: str
    gmacs: float | None = None
    milliseconds: float | None = None
    quartiles: tuple[float, float] | None = None
    images_per_second: float | None = None
    speedup: float | None = None
    """Against the untouched network in the same mode."""
    speedup_interval: tuple[float, float] | None = None
    best_speedup: float | None = None
    """Against the untouched network in its own fastest mode of this comparison."""
    best_speedup_interval: tuple[float, float] | None = None
    verdict: str = ""
    peak_memory_mib: float | None = None
    rounds: int = 0
    note: str = ""
    error: str = ""


@dataclass(eq=False)
class _Run:
    """A candidate ready to run in one mode, or the reason why it is not."""

    candidate: Candidate
    mode: str
    call: Runner | None = None
    memory: float | None = None
    error: str = ""
    times: list[float] = field(default_factory=list)


def measure_latency(
    candidates: Sequence[Candidate],
    conditions: Conditions,
    modes: Sequence[str] = ("eager",),
    *,
    images: Tensor | None = None,
    loader: Batches | None = None,
    lock: TimingLock | None = None,
    progress: Rounds = iter,
) -> list[Timing]:
    """Time all candidates in all modes in interleaved rounds; one of them must be the `BASE`.

    `images` is the batch that all of them see (noise unless given). For scope "end-to-end" one call
    goes through `loader`, whose batches must all have the size of `conditions`. A candidate that
    cannot run, such as for lack of memory, gets a row that says so; the others go on. Processes
    that share a `lock` prepare side by side and are timed one at a time.
    """
    if not any(candidate.method == BASE for candidate in candidates):
        raise ValueError(f"candidates: one of them must be {BASE!r}, the untouched network")
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"mode is {mode}: it must be one of {', '.join(MODES)}")
    if (conditions.scope == "end-to-end") != (loader is not None):
        raise ValueError("loader: it is needed for scope end-to-end, and for no other")
    lock = lock or TimingLock()
    torch.compiler.reset()
    with lock.preparing():
        if images is None:
            model = candidates[0].model
            images = noise(model, conditions.batch_size, conditions.image_size)
        batch = _batch(conditions, images)
        runs = [run for c in candidates for run in _prepared(c, conditions, modes, batch)]
    calls = {
        str(index): _turn(run.call, batch, loader)
        for index, run in enumerate(runs)
        if run.call is not None
    }
    with lock.timing():
        times = interleaved(
            calls,
            batch.device,
            rounds=conditions.rounds,
            warmup=conditions.warmup,
            progress=progress,
        )
        per_turn = 1 if loader is None else len(loader)
        for index, values in times.items():
            runs[int(index)].times = [value / per_turn for value in values]
        rows = _rows(runs, conditions)
        calls.clear()
        runs.clear()
        _free(batch.device)  # before the next is timed
    return rows


def noise(model: nn.Module, batch_size: int, image_size: tuple[int, int]) -> Tensor:
    """The same images of noise each time, of the channels that the model takes."""
    shape = batch_size, channels_of(model), *image_size
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _batch(conditions: Conditions, images: Tensor) -> Tensor:
    if len(images) != conditions.batch_size:
        raise ValueError(f"images: got {len(images)}; the batch size is {conditions.batch_size}")
    dtype = torch.float32 if conditions.scope == "training" else DTYPES[conditions.dtype]
    images = images.to(conditions.device, dtype)
    if conditions.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return images


def _prepared(
    candidate: Candidate, conditions: Conditions, modes: Sequence[str], batch: Tensor
) -> list[_Run]:
    """Prepare a candidate for every mode, on one copy of its weights."""
    runs, model = [_Run(candidate, mode) for mode in modes], None
    for run in runs:
        try:
            model = _copy(candidate.model, conditions, batch) if model is None else model
            call = _runner(candidate, model, run.mode, conditions, batch)
            call(batch)
            run.memory = peak_memory_mib(getattr(call, "run", call), model, batch)
            run.call = call
        except Exception as error:  # noqa: BLE001 - the rest of a grid still runs
            run.error = _reason(error)
        _free(batch.device)  # for the next, and for other processes
    return runs


def _copy(model: nn.Module, conditions: Conditions, batch: Tensor) -> nn.Module:
    model = copy.deepcopy(model).to(batch.device)
    use_fast_paths_(model)
    if conditions.channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return model.train() if conditions.scope == "training" else model.eval().to(batch.dtype)


def _runner(
    candidate: Candidate, model: nn.Module, mode: str, conditions: Conditions, batch: Tensor
) -> Runner:
    if conditions.scope != "training":
        own = candidate.modes.get(mode)
        return MODES[mode](model, batch) if own is None else own(candidate.model, batch)
    if mode not in ("eager", "compiled"):
        raise ValueError(f"a training step runs eager or compiled, not in mode {mode}")
    with torch.no_grad():
        num_classes = model(batch).shape[-1]
    step = torch.compile(model, dynamic=False) if mode == "compiled" else model
    return TrainingStep(step, num_classes, DTYPES[conditions.dtype])  # pyright: ignore[reportArgumentType]


def _turn(run: Runner, batch: Tensor, loader: Batches | None) -> Callable[[], object]:
    """One turn of a candidate: a batch, or all batches of the loader."""
    if loader is None:
        # A captured graph has an input of its own; passing that one saves a copy per call.
        own = getattr(run, "images", batch)
        return lambda: run(own)

    def go() -> None:
        out = None
        for images, _ in loader:
            out = run(images.to(batch.device, batch.dtype, non_blocking=True))
        # Reading the output waits for the last batch.
        torch.as_tensor(out).cpu()

    return go


def _rows(runs: Sequence[_Run], conditions: Conditions) -> list[Timing]:
    bases = {run.mode: run for run in runs if run.candidate.method == BASE and run.times}
    best = min(bases.values(), key=lambda run: spread(run.times).median, default=None)
    return [_row(run, bases.get(run.mode), best, conditions) for run in runs]


def did_not_run(
    method: str, ratio: float | None, conditions: Conditions, modes: Sequence[str], reason: str
) -> list[Timing]:
    """Rows of a candidate that could not be prepared."""
    known = {"method": method, "ratio": ratio, "verdict": "did not run", "error": reason}
    return [_timing(conditions, mode=mode, **known) for mode in modes]


def _timing(conditions: Conditions, **known: Any) -> Timing:
    shared = ("model", "image_size", "batch_size", "dtype", "scope", "device")
    return Timing(**{name: getattr(conditions, name) for name in shared}, **known)


def _row(run: _Run, base: _Run | None, best: _Run | None, conditions: Conditions) -> Timing:
    candidate = run.candidate
    about = ("method", "ratio", "gmacs", "note")
    known = {"mode": run.mode, **{name: getattr(candidate, name) for name in about}}
    if not run.times:
        return _timing(conditions, **known, verdict="did not run", error=run.error)
    time = spread(run.times)
    same = None if base is None else speedup(base.times, run.times)
    over_best = None if best is None else speedup(best.times, run.times)
    return _timing(
        conditions,
        **known,
        milliseconds=1e3 * time.median,
        quartiles=(1e3 * time.low, 1e3 * time.high),
        images_per_second=conditions.batch_size / time.median,
        speedup=same and same.median,
        speedup_interval=same and (same.low, same.high),
        best_speedup=over_best and over_best.median,
        best_speedup_interval=over_best and (over_best.low, over_best.high),
        verdict=_verdict(candidate, same),
        peak_memory_mib=run.memory,
        rounds=len(run.times),
    )


def _verdict(candidate: Candidate, ratio: Estimate | None) -> str:
    if candidate.method == BASE:
        return "the measure"
    return "no base to compare with" if ratio is None else verdict(ratio)


def _reason(error: BaseException) -> str:
    """The first line of the root cause.

    A ValueError is a sentence for users. Exporters and compilers wrap other causes in advice.
    """
    while error.__cause__ is not None and not isinstance(error, ValueError):
        error = error.__cause__
    lines = [line.strip() for line in _COLOUR.sub("", str(error)).splitlines() if line.strip()]
    kind = "" if isinstance(error, ValueError) and lines else f"{type(error).__name__}: "
    return f"{kind}{lines[0] if lines else 'no reason given'}"[:300]


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

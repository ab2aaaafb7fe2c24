"""`ltm.calibrate`: from a network and unlabelled images to the config of a good schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ltm.adapters import select_adapter
from ltm.adapters.planning import Planner
from ltm.api import (
    conversion_of,
    freeze_,
    image_size_of,
    is_merging,
    merging_copy,
    save,
    unmerged_copy,
)
from ltm.api.folders import require_own
from ltm.calibration.grids import GridSpace
from ltm.calibration.search import (
    CountedCost,
    EnoughTrials,
    Progress,
    Schedule,
    Search,
    Space,
    Trial,
    Trials,
    config_of,
)
from ltm.calibration.sequences import SequenceCost, SequenceSpace
from ltm.calibration.settings import CalibrateSettings
from ltm.core.finite import require_finite_images
from ltm.core.validation import require_least
from ltm.evaluation.images import MIN_IMAGES, open_images, read_images
from ltm.evaluation.latency import interleaved
from ltm.evaluation.modes import MODES
from ltm.evaluation.records import describe
from ltm.files import results_in, write_metrics
from ltm.interruption import in_steps, stop_if_asked, take_press
from ltm.methods import DEFAULT, MethodConfig, methods
from ltm.models import Network, Say, changed, method_config, open_model, silent
from ltm.processes import local_device
from ltm.progress import progress_bar

DEFAULTS = CalibrateSettings()

_FEW_SITES, _MORE_SITES = 4, 6
"""How many blocks merge at most by default: from a budget of `_ADJUSTED_BELOW` on, and below."""
_ADJUSTED_BELOW = 0.5
"""Below this budget the method's own settings are chosen too, by default."""
_ROUNDS, _HALVINGS, _CORRECTIONS = 9, 5, 4
"""For a budget in milliseconds: rounds of timing, sketches to time, searches."""
_CLOSE = 0.97
"""A schedule that takes at least this share of the allowed time is good enough."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CalibrateResult:
    """The schedule that stays closest to the original within the budget. Print it."""

    config: MethodConfig
    """Give it to `merge_tokens_`, save it, use it on other copies of the network."""
    divergence: float
    """Mean divergence from the original's outputs: KL in nats, or the cosine distance of
    features."""
    uncalibrated: float | None
    """The same for the method's default schedule at that budget."""
    measure: str
    share: float
    budget: float
    """The share that was allowed; a budget in milliseconds is translated into one."""
    num_images: int
    history: tuple[Trial, ...]
    interrupted: bool = False
    milliseconds: float | None = None
    """Per batch, where the budget was a time."""
    model: nn.Module | None = field(default=None, compare=False)
    """The network, without merging."""
    image_size: tuple[int, int] | None = None
    data: str = ""
    """Where the images come from."""

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
            for entry in fields(self)
            if entry.name not in ("config", "history", "model", "image_size", "data")
        }
        return {**values, "num_trials": len(self.history), "config": self.config.to_dict()}

    def save(self, folder: str | Path, **about: object) -> Path:
        """Write the network with this schedule, for `ltm.load` and --run, and metrics.json.

        `about` is added to the metrics.
        """
        if self.model is None:
            raise ValueError("model: this result has no network; merge_tokens_ takes its config")
        device = next(self.model.parameters()).device
        network = merging_copy(self.model, self.config, self.image_size).cpu()
        folder = Path(folder)
        require_own(folder)
        metrics = {
            "data": self.data,
            **about,
            **self.to_dict(),
            "environment": asdict(describe(device)),
            "history": [asdict(trial) for trial in self.history],
        }
        with results_in(folder) as aside:
            save(network, aside)
            write_metrics(aside, metrics)
        return folder


def calibrate(
    model: Network,
    data: str | Tensor,
    settings: CalibrateSettings = DEFAULTS,
    *,
    config: MethodConfig | None = None,
    image_size: int | tuple[int, int] | None = None,
    progress: Progress = lambda _: None,
    say: Say = silent,
    **changes: Any,
) -> CalibrateResult:
    """Find the schedule that keeps a network's outputs closest to what they are without merging.

    The network is not changed. Give the result's `config` to `merge_tokens_`, or `save` the result
    to write the merging network.

    Args:
        model: a network, converted or not; or its name.
        data: where images are; or images `b c h w`, normalised as the network expects.
        settings: the budget, and how to search.
        config: the method and its other settings, unless `settings.method` names the method.
        image_size: by default the model's own.
        progress: called after every trial. KeyboardInterrupt, from here or from the keyboard,
            ends the search and keeps the best so far.
        say: called with each line of progress.
        changes: changes of the settings, such as `budget=0.7`.
    """
    settings = changed(settings, changes)
    if (settings.budget is None) == (settings.budget_ms is None):
        raise ValueError(
            "budget and budget_ms: give one of them (in a shell, give --budget or --budget-ms)."
        )
    if settings.method is not None:
        config = method_config(settings.method)
    images = data if isinstance(data, Tensor) else None
    if images is None:
        require_least("images", settings.images, MIN_IMAGES)
    in_place = images is not None and isinstance(model, nn.Module)
    device = None if in_place else local_device(settings.device)
    network = open_model(model, device, merges=True, say=say)
    if images is None:
        dataset = open_images(str(data), settings.split, settings.images, labelled=False)
        images = read_images(dataset, str(data), network, workers=settings.workers)
        image_size = (images.shape[-2], images.shape[-1])
    _check_images(images, image_size_of(network, image_size))
    trials = settings.trials if settings.budget_ms is None else None  # it takes several searches
    calibration = Calibration(network, images, config, settings)
    with _showing(calibration.search, trials, progress, silent=say is silent):
        found = _unless_pressed(_searched(calibration, images))
    return replace(
        found,
        model=calibration.model,
        image_size=calibration.size,
        data=data if isinstance(data, str) else f"{len(data)} images",
    )


@contextmanager
def _showing(
    search: Search, num_trials: int | None, progress: Progress, *, silent: bool
) -> Iterator[None]:
    """Show the progress of a search on a terminal; Ctrl-C ends it after the current trial."""
    with progress_bar("calibration", num_trials, silent=silent) as advance, in_steps():
        best = ""

        def note(trial: Trial) -> None:
            nonlocal best
            if trial.is_best:
                best = f"divergence {trial.divergence:.4f} at {trial.share:.3f}"
            advance(best)
            progress(trial)
            stop_if_asked()

        search.progress = note
        yield


def _unless_pressed(found: CalibrateResult) -> CalibrateResult:
    """The result, marked as interrupted if Ctrl-C came after the last trial."""
    return replace(found, interrupted=True) if take_press() else found


def _check_images(images: Tensor, size: tuple[int, int]) -> None:
    """Refuse too few images, and images that the network does not take."""
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(
            f"images: got {tuple(images.shape)} of {images.dtype}; give normalised images in one "
            "tensor of images x channels x height x width."
        )
    if tuple(images.shape[-2:]) != size:
        raise ValueError(
            f"images: got {images.shape[-2]} x {images.shape[-1]} pixels; the network takes "
            f"{size[0]} x {size[1]} (image_size changes that, where it can be changed)."
        )
    require_finite_images(images, "images")
    if len(images) < MIN_IMAGES:
        raise ValueError(f"images: got {len(images)}; at least {MIN_IMAGES} are needed.")


def _searched(calibration: Calibration, images: Tensor) -> CalibrateResult:
    """The best schedule within the budget of the settings."""
    settings = calibration.settings
    if settings.budget is not None:
        return calibration.within(settings.budget)
    assert settings.budget_ms is not None
    if settings.time_batch > len(images):
        raise ValueError(
            f"time_batch: got {settings.time_batch}, but there are only {len(images)} images."
        )
    clock = _Clock(calibration.model, images[: settings.time_batch], settings.time_mode)
    budget_ms = settings.budget_ms
    return within_milliseconds(calibration, clock, original=clock.original, budget_ms=budget_ms)


class Calibration:
    """One network on one set of images: `within` a budget, as often as needed."""

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        config: MethodConfig | None,
        settings: CalibrateSettings,
    ) -> None:
        self.settings = settings
        self.size = (images.shape[-2], images.shape[-1])
        _check_images(images, self.size)
        self.config = config or _own_config(model)
        self.model = _original(model)
        self.adapter = select_adapter(self.model)
        device = next(self.model.parameters()).device
        batch_size = settings.batch_size or (64 if device.type == "cpu" else 256)
        self.trials = Trials(
            self.model,
            self.adapter,
            images,
            self.config,
            batch_size=batch_size,
            memory_bytes=settings.memory_bytes,
        )
        self._is_sequence = _merges_sequences(self.trials.planner)
        kind = SequenceCost if self._is_sequence else CountedCost
        self.cost = kind(self.trials.planner, self.config)
        self.search = Search(self.trials, self.cost, num_trials=settings.trials, seed=settings.seed)

    @cached_property
    def space(self) -> Space:
        """The schedules to choose from."""
        if self._is_sequence:
            return SequenceSpace(self.search, self._num_sites(1.0), self.settings.multiple)
        return GridSpace(self.search)

    def _num_sites(self, budget: float) -> int:
        """How many blocks may merge; more for small budgets, so that no block merges too much."""
        usual = _FEW_SITES if budget >= _ADJUSTED_BELOW else _MORE_SITES
        return self.settings.sites or usual

    def shown(self, budget: float, *, silent: bool) -> CalibrateResult:
        """`within` a budget, with a progress bar on a terminal; Ctrl-C keeps the best so far."""
        with _showing(self.search, self.search.num_trials, lambda _: None, silent=silent):
            return _unless_pressed(self.within(budget))

    def sketch(self, budget: float) -> MethodConfig | None:
        """A plausible config within a budget, chosen by the sensitivities alone."""
        self.space.budget = budget
        self.search.forget()
        starts = self.space.starts()
        return config_of(starts[0], self.config) if starts else None

    def within(self, budget: float) -> CalibrateResult:
        """The best schedule within a share of the multiply-adds."""
        if budget == 1:
            return self._result((), budget)
        space = self.space
        if budget < space.floor:
            raise ValueError(
                f"budget: got {budget}; merging tokens cannot bring this network below "
                f"{space.floor:.3f} of its multiply-adds."
            )
        space.budget, space.num_sites = budget, self._num_sites(budget)
        self.search.forget(adjusts=self._adjusts)
        self.trials.config = self.config
        default, interrupted = space.default(budget), False
        suits = default is not None and self._suits(default)
        try:
            self._try_schedules(default, suits=suits)
            if self._adjusts:
                self.search.adjust_best()
        except KeyboardInterrupt:
            self.trials.tidy_()
            interrupted = True
        best, divergence = self.search.best, self.search.divergence
        if suits and self.search.uncalibrated < divergence:
            best, divergence = default, self.search.uncalibrated
            self.trials.config = self.config
        if best is None and interrupted:
            raise KeyboardInterrupt
        if best is None:
            raise ValueError(
                f"budget: got {budget}; it cannot be met with at most {self._num_sites(budget)} "
                "sites and such token counts."
            )
        return self._result(best, budget, divergence=divergence, interrupted=interrupted)

    @property
    def _adjusts(self) -> bool:
        """Whether the method's own settings are chosen too."""
        wanted = self.settings.adjust
        return self.space.budget < _ADJUSTED_BELOW if wanted is None else wanted

    def _try_schedules(self, default: Schedule | None, *, suits: bool) -> None:
        """Measure the default schedule, try it and other starts, and refine the best."""
        try:
            if default is not None:
                values = self.search.gauge(default, is_result=suits)
                if self._adjusts:
                    values = self.search.adjust(default, values)
                    if suits:
                        self.search.adopt(default, values)
                self._start_from(self.space.suited(default))
            for schedule in (*self.space.without_last(), *self.space.starts()):
                self._start_from(schedule)
            self.search.refine(self.space)
        except EnoughTrials:
            pass

    def _suits(self, default: Schedule) -> bool:
        """Whether the default schedule meets the budget and the settings of sites and counts."""
        settings, most = self.settings, self.space.budget + 1e-9
        prefix = self.cost.num_prefix if isinstance(self.cost, SequenceCost) else 0
        counts = [s.count + prefix for s in default if isinstance(s.count, int)]
        few = settings.sites is None or len(default) <= settings.sites
        rounded = all(count % (settings.multiple or 1) == 0 for count in counts)
        return few and rounded and self.cost(default) <= most

    def _start_from(self, schedule: Schedule | None) -> None:
        """Try a schedule, unless it exceeds the budget, as a rounded one may."""
        if schedule is not None and self.cost(schedule) <= self.space.budget + 1e-9:
            self.search.consider(schedule, "start")

    def _result(
        self,
        schedule: Schedule,
        budget: float,
        *,
        divergence: float = 0.0,
        interrupted: bool = False,
    ) -> CalibrateResult:
        uncalibrated = self.search.uncalibrated if schedule else math.inf
        config = config_of(schedule, self.trials.config)
        plan = self.trials.planner.with_config(config).plan()
        share = plan.macs_after / plan.macs_before
        if share > budget + 1e-9:
            raise AssertionError(f"budget: {share} of the multiply-adds, {budget} allowed.")
        return CalibrateResult(
            config=config,
            divergence=divergence,
            uncalibrated=uncalibrated if math.isfinite(uncalibrated) else None,
            measure=self.trials.divergence.__name__.replace("_", " "),
            share=share,
            budget=budget,
            num_images=self.trials.num_images,
            history=tuple(self.search.history),
            interrupted=interrupted,
        )


# --- A budget in milliseconds ---------------------------------------------------------------------


class _Clock:
    """Milliseconds per batch on this device; each merged network takes turns with the original."""

    def __init__(self, model: nn.Module, images: Tensor, mode: str | None) -> None:
        parameter = next(model.parameters())
        self.model = model
        self.images = images.to(parameter.device, parameter.dtype)
        self.mode = mode or ("cudagraph" if parameter.device.type == "cuda" else "eager")
        if self.mode not in MODES:
            raise ValueError(f"mode: got {self.mode!r}; choose from {', '.join(MODES)}.")
        self._original = self._ready(model)
        self.original = self._times({"original": self._original})["original"]

    def __call__(self, config: MethodConfig) -> float:
        """The time with this config, corrected for the current speed of the device."""
        merging = merging_copy(self.model, config, (self.images.shape[-2], self.images.shape[-1]))
        calls = {"original": self._original, "merging": self._ready(freeze_(merging))}
        times = self._times(calls)
        return times["merging"] / times["original"] * self.original

    def _ready(self, model: nn.Module) -> Callable[[], object]:
        run = MODES[self.mode](model, self.images)
        return lambda: run(self.images)

    @torch.no_grad()
    def _times(self, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        rounds = interleaved(calls, self.images.device, rounds=_ROUNDS)
        return {name: 1e3 * median(times) for name, times in rounds.items()}


def within_milliseconds(
    calibration: Calibration,
    clock: Callable[[MethodConfig], float],
    *,
    original: float,
    budget_ms: float,
) -> CalibrateResult:
    """The best schedule that takes no longer than the budget; without merging it is `original`.

    A share of the multiply-adds is searched that takes about that time. Networks with sketched
    schedules are timed to find it; then the schedules found within it are timed to correct it.
    """
    if budget_ms >= original:
        raise ValueError(
            f"budget_ms: got {budget_ms}; the original takes {original:.2f} ms a batch here, so "
            "nothing has to merge."
        )
    share = _share_for(calibration, clock, budget_ms)
    tried: list[tuple[float, CalibrateResult]] = []
    try:
        tried.extend(_corrections(calibration, clock, budget_ms, share))
    except KeyboardInterrupt:
        tried = [(time, replace(found, interrupted=True)) for time, found in tried]
        if not tried:
            raise
    within = [found for time, found in tried if time <= budget_ms]
    if not within:
        raise ValueError(
            f"budget_ms: got {budget_ms}; the fastest schedule that was found takes "
            f"{min(time for time, _ in tried):.2f} ms a batch here, the original {original:.2f}."
        )
    return min(within, key=lambda found: found.divergence)


def _corrections(
    calibration: Calibration,
    clock: Callable[[MethodConfig], float],
    budget_ms: float,
    share: float,
) -> Iterator[tuple[float, CalibrateResult]]:
    """Search within a share, time the result, correct the share by that time, and repeat."""
    met = 0.0
    for _ in range(_CORRECTIONS):
        found = calibration.within(share)
        time = clock(found.config)
        yield time, replace(found, milliseconds=time)
        if found.interrupted or _CLOSE * budget_ms <= time <= budget_ms:
            return
        met = max(met, share) if time <= budget_ms else met
        share *= min(budget_ms / time * 0.99, 1.1)
        share = min(1.0, max(calibration.space.floor, share))
        if share <= met:
            return


def _share_for(
    calibration: Calibration, clock: Callable[[MethodConfig], float], budget_ms: float
) -> float:
    """The largest share whose sketched schedule keeps to the time, by bisection."""
    low, high = calibration.space.floor, 1.0
    fastest = calibration.sketch(min(1.0, 1.02 * low))
    if fastest is not None and (time := clock(fastest)) > budget_ms:
        raise ValueError(
            f"budget_ms: got {budget_ms}; merging tokens cannot go below {time:.2f} ms a batch "
            "here."
        )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        config = calibration.sketch(middle)
        if config is None or clock(config) > budget_ms:
            high = middle
        else:
            low = middle
    return low


def _merges_sequences(planner: Planner) -> bool:
    """Whether schedules are token counts of sequences, not sides of grids; others are refused."""
    reason = planner.config.unschedulable(grid=planner.keeps_grid)
    if reason:
        raise ValueError(f"config: {reason}.")
    if planner.keeps_grid:
        return False
    if not planner.layout.is_sequence:
        raise ValueError(
            "config: a method that restores a network's grids has no schedule to search there."
        )
    return True


def _own_config(model: nn.Module) -> MethodConfig:
    return conversion_of(model).config if is_merging(model) else methods()[DEFAULT]()


def _original(model: nn.Module) -> nn.Module:
    """A copy that merges nothing and checkpoints no gradients."""
    original = unmerged_copy(model)
    if hasattr(original, "set_grad_checkpointing"):
        original.set_grad_checkpointing(False)  # pyright: ignore[reportCallIssue]
    return original.eval()

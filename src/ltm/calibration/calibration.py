"""The search for a schedule, from a network and unlabelled images to a plain config."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ltm.adapters import select_adapter
from ltm.adapters.planning import Planner
from ltm.api import conversion_of, image_size_of, is_merging, unmerge_tokens_
from ltm.calibration.costs import CountedCost, SequenceCost
from ltm.calibration.grids import Frame, GridSpace, Point, probe_grids
from ltm.calibration.latency import Clock, within_milliseconds
from ltm.calibration.schedules import CalibrateResult, Schedule, Setting, config_of
from ltm.calibration.search import Progress, Search, Space
from ltm.calibration.sequences import (
    HARMLESS,
    Sensitivity,
    SequenceSpace,
    Variants,
    largest_within,
    probe_blocks,
    token_levels,
)
from ltm.calibration.settings import MIN_IMAGES, CalibrateSettings, check_images
from ltm.calibration.trials import Trials
from ltm.evaluation.images import load_batches, open_images
from ltm.methods import DEFAULT, MethodConfig, methods
from ltm.models import Network, Say, changed, method_config, open_model, require_least, silent
from ltm.processes import local_device

DEFAULTS = CalibrateSettings()


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

    The network itself is not changed: give the result's `config` to `merge_tokens_`, or `save`
    the result, which writes a network that merges so.

    Args:
        model: a network that `merge_tokens_` takes, merging already or not; or its name.
        data: where images are; or some, `b c h w`, normalised as the network expects.
        settings: the budget, and how to search.
        config: everything that is not searched, where `settings.method` does not say it.
        image_size: by default the model's own.
        progress: called after every trial. KeyboardInterrupt, from here or from the keyboard,
            ends the search and keeps the best so far.
        say: told what is done, line by line.
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
        images = _read_images(network, str(data), settings)
        image_size = (images.shape[-2], images.shape[-1])
    check_images(images, image_size_of(network, image_size))
    calibration = Calibration(network, images, config, settings, progress)
    return replace(
        _searched(calibration, images),
        model=calibration.model,
        image_size=calibration.size,
        data=data if isinstance(data, str) else f"{len(data)} images",
    )


def _read_images(model: nn.Module, data: str, settings: CalibrateSettings) -> Tensor:
    """So many images, spread over the data, as the model expects them."""
    dataset = open_images(data, settings.split, settings.images)
    batches = load_batches(
        dataset, data, model, batch_size=64, workers=settings.workers, labelled=False
    )
    return torch.cat([batch[0] for batch in batches])


def _searched(calibration: Calibration, images: Tensor) -> CalibrateResult:
    """The best schedule within the budget of the settings."""
    settings = calibration.settings
    if settings.budget is not None:
        return calibration.within(settings.budget)
    assert settings.budget_ms is not None
    if settings.time_batch > len(images):
        raise ValueError(
            f"time_batch: got {settings.time_batch}, and {len(images)} images; give as many images."
        )
    clock = Clock(calibration.model, images[: settings.time_batch], mode=settings.time_mode)
    return within_milliseconds(
        calibration.within,
        calibration.sketch,
        clock,
        original=clock.original,
        budget_ms=settings.budget_ms,
        floor=calibration.floor,
    )


class Calibration:
    """One network on one set of images: `within` a budget, as often as needed."""

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        config: MethodConfig | None,
        settings: CalibrateSettings,
        progress: Progress = lambda _: None,
    ) -> None:
        self.settings = settings
        self.size = (images.shape[-2], images.shape[-1])
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
        self.on_sequence = _is_sequence(self.trials.planner)
        kind = SequenceCost if self.on_sequence else CountedCost
        self.cost = kind(self.trials.planner, self.config)
        self.search = Search(self.trials, self.cost, seed=settings.seed, progress=progress)

    def within(self, budget: float) -> CalibrateResult:
        """The best schedule within a share of the multiply-adds."""
        if budget == 1:
            return self._result((), budget)
        if budget < self.floor:
            raise ValueError(
                f"budget: got {budget}; merging tokens cannot bring this network below "
                f"{self.floor:.3f} of its multiply-adds."
            )
        self.search.forget()
        uncalibrated, interrupted = None, False
        try:
            uncalibrated = self._default(budget)
            space = self._space(budget)
            for schedule in (*self._without_last(budget), *space.starts()):
                self._start_from(schedule, budget)
            self.search.refine(space, self.settings.trials)
        except KeyboardInterrupt:
            self.trials.tidy_()
            if self.search.best is None:
                raise
            interrupted = True
        if self.search.best is None:
            raise ValueError(
                f"budget: got {budget}; {self.settings.sites} sites at most, and token counts "
                "as asked for, cannot meet it."
            )
        return self._result(
            self.search.best, budget, uncalibrated=uncalibrated, interrupted=interrupted
        )

    def _default(self, budget: float) -> float | None:
        """Start from the default schedule, as far as it suits; its own divergence."""
        schedule = self._uncalibrated(budget)
        if schedule is None:
            return None
        suited = self._suited(schedule)
        if suited is not None:
            self._start_from(suited, budget)
        return self.search.gauge(schedule)

    def _start_from(self, schedule: Schedule, budget: float) -> None:
        """Try a schedule, unless it costs too much, as one that lost a site to its levels may."""
        if self.cost(schedule) <= budget + 1e-9:
            self.search.consider(schedule, "start")

    def _without_last(self, budget: float) -> list[Schedule]:
        """The default schedule of a larger budget, where the last block pays for it."""
        if not self.on_sequence:
            return []
        assert isinstance(self.cost, SequenceCost)
        last = Setting(self.cost.depth - 1, self.levels[0], self.cost.usual)
        if self.search.probe((last,)) > HARMLESS:
            return []

        def default(share: float) -> Schedule | None:
            sites = tuple(s for s in self._uncalibrated(share) or () if s.block < last.block)
            suited = self._suited(sites)
            if not suited or suited[-1].count == last.count:
                return None
            return (*suited, last) if len(suited) < self.settings.sites else None

        found = largest_within(default, self.cost, budget)
        return [] if found is None else [found]

    @cached_property
    def levels(self) -> list[int]:
        """The token counts of a sequence to choose from."""
        assert isinstance(self.cost, SequenceCost)
        levels = token_levels(self.cost.num_in, self.cost.num_prefix, self.settings.multiple)
        if not levels:
            raise ValueError(
                f"multiple: got {self.settings.multiple}; the network has "
                f"{self.cost.num_in + self.cost.num_prefix} tokens."
            )
        return levels

    @cached_property
    def frame(self) -> Frame:
        """The grids to choose from."""
        return Frame.of(self.trials.planner.layout)

    @cached_property
    def floor(self) -> float:
        """The smallest share that merging reaches at all."""
        if self.on_sequence:
            assert isinstance(self.cost, SequenceCost)
            return self.cost((Setting(0, self.levels[0], self.cost.usual),))
        return self.cost(self.frame.schedule({0: (1, 1)}))

    def sketch(self, budget: float) -> MethodConfig | None:
        """A plausible config within a budget, without trying any."""
        starts = self._space(budget).starts()
        return config_of(starts[0], self.config) if starts else None

    def _uncalibrated(self, budget: float) -> Schedule | None:
        """What the method does at that ratio by itself, if it can."""
        config = self.config.scheduled(ratio=budget)
        try:
            plan = self.trials.planner.with_config(config).plan()
        except ValueError:
            return None
        return tuple(
            Setting(
                site.block,
                site.grid_out or site.num_out,
                config.choice_at(site.block) if self.on_sequence else None,
            )
            for site in plan.sites
            if site.merges
        )

    def _suited(self, schedule: Schedule) -> Schedule | None:
        """The schedule with counts rounded down to the levels, where that is one to choose."""
        if not self.on_sequence:
            return schedule
        sites: list[Setting] = []
        for setting in schedule:
            below = [n for n in self.levels if n <= setting.count]  # pyright: ignore[reportOperatorIssue]
            if below and (not sites or below[-1] != sites[-1].count):
                sites.append(dataclasses.replace(setting, count=below[-1]))
        return tuple(sites) if len(sites) <= self.settings.sites else None

    def _space(self, budget: float) -> Space:
        if not self.on_sequence:
            return GridSpace(self.cost, budget, frame=self.frame, points=self._points)
        assert isinstance(self.cost, SequenceCost)
        return SequenceSpace(
            self.cost,
            budget,
            levels=self.levels,
            num_sites=self.settings.sites,
            sensitivity=self._sensitivity,
            variants=self._variants,
        )

    @cached_property
    def _sensitivity(self) -> Sensitivity:
        assert isinstance(self.cost, SequenceCost)
        return probe_blocks(self.search, self.cost)

    @cached_property
    def _variants(self) -> Variants:
        assert isinstance(self.cost, SequenceCost)
        return Variants(self.search, self.cost.num_in, self.config.choices)

    @cached_property
    def _points(self) -> dict[int, list[Point]]:
        return probe_grids(self.search, self.frame)

    def _result(
        self,
        schedule: Schedule,
        budget: float,
        *,
        uncalibrated: float | None = None,
        interrupted: bool = False,
    ) -> CalibrateResult:
        config = config_of(schedule, self.config)
        plan = self.trials.planner.with_config(config).plan()
        share = plan.macs_after / plan.macs_before
        if share > budget + 1e-9:
            raise AssertionError(f"budget: {share} of the multiply-adds, {budget} allowed.")
        return CalibrateResult(
            config=config,
            divergence=self.search.divergence if schedule else 0.0,
            uncalibrated=uncalibrated,
            measure=self.trials.divergence.__name__.replace("_", " "),
            share=share,
            budget=budget,
            num_images=self.trials.num_images,
            history=tuple(self.search.history),
            interrupted=interrupted,
        )


def _is_sequence(planner: Planner) -> bool:
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
    """A copy that merges nothing."""
    original = copy.deepcopy(model)
    if is_merging(original):
        unmerge_tokens_(original)
    if hasattr(original, "set_grad_checkpointing"):
        original.set_grad_checkpointing(False)  # pyright: ignore[reportCallIssue]
    return original.eval()

"""`ltm.compress`: from a trained network and images to a faster one, with a report.

The stages (convert, calibrate, tune, freeze, measure, draw) each add to one comparison. Ctrl-C may
stop a run at any of them: the network is saved as soon as there is one, and what was measured is
kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ltm.adapters import adapter_of
from ltm.api import (
    conversion_of,
    fit_,
    freeze_,
    learns_masks,
    merging_copy,
    report,
    save,
    unmerged_copy,
)
from ltm.api.folders import require_own
from ltm.calibration.calibration import Calibration
from ltm.calibration.settings import CalibrateSettings
from ltm.compression.settings import LEAST_RATIO, NUM_POINTS, CompressSettings
from ltm.core.cost import meta_copy
from ltm.data.config import DataConfig
from ltm.data.datasets import Splits, open_dataset
from ltm.data.images import ImageDataset
from ltm.deployment.forms import ONNX_FILE, OnnxFiles, code_for
from ltm.deployment.information import ModelInformation, describe as inform
from ltm.evaluation.accuracy import PairedDifference, summarise
from ltm.evaluation.images import (
    Partition,
    expected_images,
    load_batches,
    part_images,
    read_images,
    repeated_images,
    sample_images,
)
from ltm.evaluation.latency import BASE, Timing
from ltm.evaluation.measurement import Measurements
from ltm.evaluation.modes import MODES, Mode, usual_modes
from ltm.evaluation.records import describe, points, text_table
from ltm.extras import require
from ltm.files import output_folder, results_in, write_bytes, write_metrics
from ltm.methods import MethodConfig
from ltm.models import (
    Network,
    Say,
    changed,
    check_classes,
    method_config,
    name_of,
    open_model,
    silent,
    source_of,
    split_methods,
)
from ltm.processes import local_device
from ltm.report.comparison import Comparison, CurvePoint, Deployment, block_changes, verdicts
from ltm.report.curves import display_name
from ltm.report.documents import (
    Illustration,
    forms_table,
    illustrate,
    table_of,
    write_card,
    write_report,
)
from ltm.report.pictures import (
    NUM_PICTURES,
    NamedPicture,
    data_pictures,
    generated_pictures,
    prepare,
    read_pictures,
)
from ltm.report.tracing import last_attended_block, trace_models

_DEFAULTS = CompressSettings()
_FITTING_IMAGES = 64
_FILES = ("model.safetensors", "config.json", "report.html", "README.md", "metrics.json", ONNX_FILE)
_SOMEWHERE = "FOLDER"
"""The folder in the deployment's code, while the network is not saved."""
_ROUNDS = 5
"""How many networks are tried to meet a time."""
_AIM = 0.985
"""Aim at this share of the time, as the last measurement may be a little slower."""
_CLOSE = 0.015
"""A time that differs from the aim by no more than this share is close enough."""

_Made = tuple[nn.Module, dict[str, Any] | None]
"""A converted network, and what its calibration found."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CompressResult:
    """The compressed network, and how it compares with the original. Print it."""

    model: nn.Module | None
    """The compressed network; None where the run was stopped before there was one."""
    comparison: Comparison
    """All that was measured."""
    illustrations: tuple[Illustration, ...] = ()
    """What the report shows."""
    class_names: tuple[str, ...] = ()
    origin: dict[str, str] = field(default_factory=dict)
    """Where the weights come from, as far as timm knows."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Exported files, by name."""

    @property
    def deployment(self) -> Deployment | None:
        """The form that is recommended, and the code that runs it."""
        return self.comparison.deployment

    @property
    def interrupted(self) -> str:
        """The stage that Ctrl-C stopped; empty for a complete run."""
        return self.comparison.interrupted

    def save(self, folder: str | Path) -> Path:
        """Write the network, its card, report.html and metrics.json."""
        folder = Path(folder)
        require_own(folder)
        comparison = self._saved_in(folder)
        with results_in(folder, replaced=_FILES) as aside:
            if self.model is not None:
                save(self.model, aside, class_names=self.class_names)
            for name, content in self.files.items():
                write_bytes(aside / name, content)
            write_report(comparison, aside, self.illustrations)
            write_card(comparison, aside, origin=self.origin)
            write_metrics(aside, comparison.to_dict())
        return folder

    def _saved_in(self, folder: Path) -> Comparison:
        """The comparison, with the folder in the code of its deployment."""
        deployed = self.comparison.deployment
        if deployed is None:
            return self.comparison
        code = deployed.code.replace(f'"{_SOMEWHERE}', f'"{folder.as_posix()}')
        return replace(self.comparison, deployment=replace(deployed, code=code))

    def __repr__(self) -> str:
        comparison = self.comparison
        sentences = [f"- {sentence}" for sentence in verdicts(comparison)]
        parts = [comparison.title, text_table(table_of(comparison))]
        if len(forms := forms_table(comparison)) > 1:
            parts.append(text_table(forms))
        parts.append("\n".join(sentences))
        if comparison.deployment is not None:
            parts.append(comparison.deployment.code.rstrip())
        return "\n\n".join(parts)


def compress(
    model: Network,
    data: str,
    settings: CompressSettings = _DEFAULTS,
    *,
    folder: str | Path | None = None,
    name: str | None = None,
    weights: str | None = None,
    command: str | None = None,
    say: Say = silent,
    **changes: Any,
) -> CompressResult:
    """Make a trained network faster, and measure what it gains and loses.

    Converts the network, chooses where to merge on images without labels, tunes it if asked to, and
    freezes it. Then evaluates and times it on other images, together with the original and the
    methods in `compare`. If the images have no labels, agreement with the original takes the place
    of accuracy. Ctrl-C stops it and keeps what is done. The given network is not changed.

    Args:
        model: a network or its name.
        data: folder or .zip of images, in class folders or not, tar shards, hf:NAME, or shapes
            (generated).
        settings: how to merge, what to choose on images, and what to measure.
        folder: where the network is saved as soon as there is one, and where training writes;
            `save` the result to write everything else.
        name: what the report calls the network.
        weights: what the report says about its weights.
        command: the command that the report gives to repeat the run; by default this call.
        say: called with each line of progress.
        changes: changes of the settings, such as `ratio=0.5`.
    """
    settings = changed(settings, changes)
    with output_folder(folder), TemporaryDirectory() as scratch:
        job = _Compression(
            model, data, settings, folder=folder, name=name, say=say, scratch=Path(scratch)
        )
        job.run()
    source, base = job.source, job.models[BASE]
    origin = "given as a network" if source is None else source.origin
    return CompressResult(
        model=job.models.get(job.settings.method),
        comparison=job.comparison(
            weights or origin,
            command or _python_call(model, data, job),
        ),
        illustrations=tuple(job.illustrations),
        class_names=job.class_names,
        files=job.files,
        origin=_known_origin(base) if source is not None and source.pretrained else {},
    )


def _python_call(model: Network, data: str, job: _Compression) -> str:
    """The call that repeats a run, with every setting that differs from its default."""
    settings, name = job.settings, str(model) if isinstance(model, str | Path) else job.name
    given = (f.name for f in fields(settings) if getattr(settings, f.name) != f.default)
    words = [f"{setting}={getattr(settings, setting)!r}" for setting in given]
    return f"ltm.compress({', '.join([repr(name), repr(data), *words])})"


def _known_origin(model: nn.Module) -> dict[str, str]:
    """Where weights come from, as far as timm knows."""
    known: Any = getattr(model, "pretrained_cfg", None) or {}
    found = {"base_model": known.get("hf_hub_id"), "license": known.get("license")}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _open_pictures(pictures: str) -> tuple[NamedPicture, ...] | None:
    """The pictures that the report shows; None if they come from the data."""
    if pictures == "data":
        return None
    if pictures == "generated":
        return tuple(generated_pictures())
    return tuple(read_pictures([pictures], NUM_PICTURES))


class _Compression:
    """A compression under way: `run` it; `comparison` holds what is known so far."""

    def __init__(
        self,
        model: Network,
        data: str,
        settings: CompressSettings,
        *,
        folder: str | Path | None,
        name: str | None,
        say: Say,
        scratch: Path,
    ) -> None:
        """Check the settings and open the data, then load the network."""
        self.data, self.settings, self.say = data, settings, say
        self.folder = None if folder is None else Path(folder)
        self.device = local_device(settings.device)
        self.config = method_config(settings.method, settings.first_ratio)
        self.peers = [text for text in split_methods(settings.compare) if text != settings.method]
        for text in self.peers:
            method_config(text, settings.first_ratio)
        self.forms = _forms(settings, self.device)
        if (settings.num_points or settings.has_goal) and self.config.ratio is None:
            raise ValueError(f"method is {settings.method}: its token counts are given already")
        self.images = part_images(
            data,
            split=settings.split,
            images=settings.images,
            calibration_images=settings.calibration_images,
        )
        if settings.finetune_epochs:
            _require_training_images(self.images, data)
        self.tuning_images = self._tuning_images() if settings.tune else None
        self.pictures = _open_pictures(settings.pictures)
        torch.manual_seed(settings.seed)
        base = open_model(model, self.device, merges=True, say=say)
        base = unmerged_copy(base, share_weights=True)
        if self.images.labelled:
            check_classes(base, self.images.evaluation.class_names, data)
        else:
            say("The images have no labels, so agreement with the original is measured")
        self.source = source_of(model)
        self.name = name or (name_of(model) if self.source is None else self.source.name)
        self.models: dict[str, nn.Module] = {BASE: base}
        self.measured = self._measurements(self.models)
        self.onnx = OnnxFiles(scratch, self._information)
        self.files: dict[str, bytes] = {}
        self.form: str | None = settings.form
        self.curve: list[CurvePoint] = []
        self.notes: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.illustrations: list[Illustration] = []
        self.calibration: dict[str, Any] | None = None
        self.tuning: dict[str, Any] | None = None
        self.interrupted = ""

    @property
    def model(self) -> nn.Module:
        """The compressed model."""
        return self.models[self.settings.method]

    @cached_property
    def calibration_batch(self) -> Tensor:
        """Unlabelled images, none of which is evaluated."""
        workers = self.settings.workers
        return read_images(self.images.calibration, self.data, self.models[BASE], workers=workers)

    def _measurements(self, models: Mapping[str, nn.Module]) -> Measurements:
        quiet = self.say is silent
        return Measurements(models, labelled=self.images.labelled, quiet=quiet)

    def _batches(self, dataset: Any) -> Any:
        return load_batches(
            dataset,
            self.data,
            self.models[BASE],
            batch_size=self.settings.batch_size,
            workers=self.settings.workers,
            labelled=self.images.labelled,
            device=self.device,
        )

    def run(self) -> None:
        """Go through the stages; Ctrl-C stops, and the stage is noted."""
        for doing, stage in self._stages():
            try:
                stage()
            except KeyboardInterrupt:
                self.interrupted = doing
                return

    def _stages(self) -> Iterator[tuple[str, Callable[[], None]]]:
        settings = self.settings
        yield "the conversion", self.convert
        if settings.num_points:
            yield "the choice of a ratio", self.choose_ratio
        elif settings.has_goal:
            yield "the search for a network of that speed", self.meet_goal
        elif settings.calibrate:
            yield "the calibration", self.calibrate
        if settings.finetune_epochs or settings.tune:
            yield "the tuning", self.tune if settings.tune else self.finetune
        yield "freezing", self.freeze
        yield "the conversion of the peers", self.add_peers
        if settings.export:
            yield "the export", self.export
        yield "the evaluation", self.evaluate
        if settings.bottleneck_images:
            yield "the measurement of the information bottleneck", self.measure_bottleneck
        if settings.time:
            yield "timing", self.measure_time
        yield "drawing", self.draw

    def convert(self) -> None:
        """Convert and save, so that there is a result from here on."""
        self.models[self.settings.method] = self._converted(self.config)
        self._save()

    def _converted(self, config: MethodConfig) -> nn.Module:
        model = merging_copy(self.models[BASE], config)
        if config.needs_images():
            if self.images.calibration is None:
                raise ValueError(
                    f"{config.title} needs other images to be fitted on, but {self.images.reason}"
                )
            # The images come class by class, so take one of every few.
            step = -(-len(self.calibration_batch) // _FITTING_IMAGES)
            fit_(model, self.calibration_batch[::step])
        return model

    def calibrate(self) -> None:
        """Choose the schedule on unlabelled images, or say why that cannot be done."""
        if self.calibrator is None:
            return
        assert self.config.ratio is not None
        self._keep(self.config.ratio, self._calibrated(self.config.ratio))

    @cached_property
    def calibrator(self) -> Calibration | None:
        """The search for schedules; what it learns about the blocks is used for every ratio."""
        settings = self.settings
        reason = _why_not_calibrated(self.model, self.images) if settings.calibrate else ""
        if reason:
            self.say(f"The default schedule is kept: {reason}")
        if reason or not settings.calibrate:
            return None
        self.say(f"Calibrating on {len(self.calibration_batch):,} images, without their labels")
        search = CalibrateSettings(trials=settings.calibration_trials, seed=settings.seed)
        return Calibration(self.models[BASE], self.calibration_batch, self.config, search)

    def _calibrated(self, ratio: float) -> _Made:
        """The network at a ratio, with a schedule chosen on images if that can be done."""
        if self.calibrator is None:
            return self._converted(self.config.with_amount(ratio=ratio)), None
        found = self.calibrator.shown(ratio, silent=self.say is silent)
        made = self._converted(found.config), found.to_dict()
        if found.interrupted:
            self._keep(ratio, made)
            raise KeyboardInterrupt
        return made

    def _keep(self, ratio: float, made: _Made) -> None:
        """Make a network of that ratio the result, and save it."""
        method = self.settings.method
        self.config = self.config.with_amount(ratio=ratio)
        self.models[method], self.calibration = made
        if self.calibration is not None:
            self.notes[method] = f"calibrated on {self.calibration['num_images']} images"
        self._save()

    # --- Which network: within a loss, or fast enough --------------------------------------------

    def choose_ratio(self) -> None:
        """Keep the fastest network within the loss; it is chosen on one half of the images."""
        settings = self.settings
        choosing, self.images = _halves(self.images)
        made: dict[str, _Made] = {}
        tried = self._measurements({BASE: self.models[BASE]})
        tried.measure_accuracy(self._batches(choosing))
        # Where there are no labels, the original's predictions take their place.
        choosing = choosing.with_labels(tried.outputs[BASE].label.numpy())
        search = Bisection(settings.allowed_loss) if not settings.ratios else None
        asked = iter(settings.curve)
        while (ratio := search.ratio if search else next(asked, None)) is not None:
            self._share_trials(len(made), settings.num_points)
            network, loss = self._at(ratio), inf
            if network is not None:
                made[f"{ratio:g}"] = network
                loss = self._loss(choosing, tried, f"{ratio:g}", network[0])
            if search:
                search.learn(loss)
        if not made:
            raise ValueError(f"ratios: {next(iter(self.left_out.values()))}")
        frozen = {name: _frozen_copy(model) for name, (model, _) in made.items()}
        networks = {BASE: self.models[BASE], **frozen}
        self._find_form(list(networks.values())[-1])
        timings = {timing.method: timing for timing in self._time(networks)}
        curve = [
            _curve_point(name, tried, timings[name], report(networks[name]).share)
            for name in sorted(made, key=float, reverse=True)
        ]
        best = _chosen(curve, settings.allowed_loss)
        self.curve = [replace(point, chosen=point is best) for point in curve]
        self._keep(best.ratio, made[f"{best.ratio:g}"])

    def _at(self, ratio: float) -> _Made | None:
        """The network at a ratio; None if the method cannot reach that ratio."""
        self.say(f"Converting to {ratio:g} of the multiply-adds")
        try:
            return self._calibrated(ratio)
        except ValueError as error:
            self.left_out[f"{self.settings.method} at {ratio:g}"] = str(error)
            return None

    def _share_trials(self, number: int, total: int) -> None:
        """Spend half of the trials on the first ratio: the sensitivities are used for all."""
        if self.calibrator is not None:
            half = max(1, self.settings.calibration_trials // 2)
            each = max(1, half // max(1, total - 1))
            self.calibrator.search.num_trials = each if number else half

    def _spend_half(self, *, is_last: bool) -> None:
        """Spend half of the trials that are left; the last round takes them all."""
        if self.calibrator is not None:
            search = self.calibrator.search
            left = self.settings.calibration_trials - len(search.history)
            search.num_trials = max(1, left if is_last else left // 2)

    def _loss(
        self, choosing: ImageDataset, tried: Measurements, name: str, model: nn.Module
    ) -> float:
        """How many points a network loses on the images to choose on."""
        tried.add_accuracy(name, model, self._batches(choosing))
        change = tried.difference(name, BASE).difference
        measure = "top-1" if self.images.labelled else "agreement"
        on = f"{len(choosing):,} images"
        self.say(f"At {name} {measure} changes by {points(change)} points on {on}")
        return -100 * change

    def meet_goal(self) -> None:
        """Convert, time, and predict a better ratio from the times so far, a few times."""
        self._find_form(self.model)
        tried: dict[float, float] = {1.0: 1.0}
        made: dict[float, _Made] = {}
        goal, ratio = None, self.config.ratio
        assert ratio is not None
        for number in range(_ROUNDS):
            self._spend_half(is_last=number == _ROUNDS - 1)
            try:
                made[ratio] = self._calibrated(ratio)
            except ValueError as error:  # the network cannot do with so few tokens
                self.left_out[f"{self.settings.method} at {ratio:.2f}"] = str(error)
                ratio = (ratio + min(tried)) / 2
                continue
            networks = {BASE: self.models[BASE], "new": _frozen_copy(made[ratio][0])}
            times = {timing.method: timing for timing in self._time(networks)}
            goal = goal or self._goal(times[BASE])
            tried[ratio] = 1 / _required_speedup(times["new"])
            self.say(
                f"At {ratio:.3f} of the multiply-adds a batch takes {tried[ratio]:.3f} of the "
                f"original's time; the goal is {goal / _AIM:.3f}"
            )
            if abs(tried[ratio] / goal - 1) <= _CLOSE:
                break
            ratio = _predicted(tried, goal)
            if any(abs(ratio - known) < 1e-3 for known in made):
                break
        if not made or goal is None:
            raise ValueError(next(iter(self.left_out.values())))
        within = [ratio for ratio in made if tried[ratio] <= goal * (1 + _CLOSE)]
        best = max(within) if within else min(made, key=tried.__getitem__)
        self._keep(best, made[best])

    def _goal(self, base: Timing) -> float:
        """The share of the original's time to aim at."""
        settings = self.settings
        if settings.speedup is not None:
            return _AIM / settings.speedup
        assert settings.budget_ms is not None
        if base.milliseconds is None:
            raise ValueError(f"the original does not run as {self.form}: {base.error}")
        if settings.budget_ms >= base.milliseconds:
            raise ValueError(
                f"budget_ms is {settings.budget_ms:g}: the original takes "
                f"{base.milliseconds:.2f} ms a batch here, so nothing has to merge"
            )
        return _AIM * settings.budget_ms / base.milliseconds

    # --- Forms -----------------------------------------------------------------------------------

    @property
    def _own_modes(self) -> dict[str, Mode]:
        return {"onnxruntime": self.onnx}

    @property
    def class_names(self) -> tuple[str, ...]:
        """The class names of the data, or those of the network where folders are numbered."""
        names = tuple(self.images.evaluation.class_names)
        known = inform(self.models[BASE]).class_names
        return known if known and all(name.isdigit() for name in names) else names

    def _information(self, model: nn.Module) -> ModelInformation:
        spec = expected_images(model, DataConfig(source=self.data))
        return inform(model, class_names=self.class_names or None, spec=spec)

    def _time(
        self, models: Mapping[str, nn.Module], forms: Sequence[str] | None = None
    ) -> list[Timing]:
        """Time networks in a form at the first batch size, in interleaved rounds."""
        found = self._measurements(models)
        self._measure_time(found, self.settings.time_batches[:1], forms or (self.form or "eager",))
        return found.timings

    def _measure_time(
        self, measured: Measurements, batches: Sequence[int], forms: Sequence[str]
    ) -> None:
        def images(batch_size: int) -> Tensor:
            self.say(f"Timing batches of {batch_size}")
            dataset, base = self.images.evaluation, self.models[BASE]
            return repeated_images(dataset, self.data, base, batch_size)

        measured.measure_time(
            self.name, batches, images, forms, self._own_modes, rounds=self.settings.time_rounds
        )

    def _find_form(self, model: nn.Module) -> None:
        """Choose the form that a search times: the one that was given, or the fastest."""
        if self.form is None and len(self.forms) > 1:
            found = self._time({BASE: self.models[BASE], "new": model}, self.forms)
            self.form = _fastest(found, "new", self.settings.time_batches[0])
        self.form = self.form or next(iter(self.forms))

    def export(self) -> None:
        """Write the ONNX file, which is evaluated together with the networks."""
        self.say("Writing the ONNX file")
        self.files[ONNX_FILE] = self.onnx(self.model).path.read_bytes()

    def finetune(self) -> None:
        """Train the mask modules alone; the best epoch is chosen on images not evaluated."""
        from ltm.training.run import finetune  # noqa: PLC0415 - it needs an extra

        config = conversion_of(self.model).config
        held_out = _require_training_images(self.images, self.data)
        result = finetune(
            self.model,
            Splits(train=open_dataset(self.data, split="train"), val=held_out),
            "general",
            overwrite=True,
            method=config.name,
            ratio=config.ratio,
            source=self.data,
            epochs=self.settings.finetune_epochs,
            **self._training("finetuning"),
        )
        self.models[self.settings.method] = result.model

    def _training(self, folder: str) -> dict[str, Any]:
        """What both kinds of training are told."""
        settings = self.settings
        return {
            "output": None if self.folder is None else self.folder / folder,
            "say": self.say,
            "batch_size": settings.batch_size,
            "workers": settings.workers,
            "seed": settings.seed,
            "device": str(self.device),
        }

    def _tuning_images(self) -> ImageDataset:
        """Unlabelled images, none of which is evaluated."""
        source = self.settings.tune_data or self.data
        found = open_dataset(source, split="train", labelled=False)
        if found.split == "all" and Path(source).resolve() == Path(self.data).resolve():
            raise ValueError(
                f"tune: {source} has no training split, and its images are evaluated; give other "
                "images with --tune-data"
            )
        return found

    def tune(self) -> None:
        """Tune by distillation; if that does not help, the network stays as it was."""
        from ltm.training.tuning import tune_  # noqa: PLC0415 - it needs an extra

        settings, images = self.settings, self.tuning_images
        assert images is not None
        assert settings.tune is not None
        self.say(f"Tuning {settings.trainable} on {len(images):,} images, without their labels")
        result = tune_(
            self.model,
            images,
            settings.tune,
            trainable=settings.trainable,
            source=settings.tune_data or self.data,
            **self._training("tuning"),
        )
        self.models[settings.method] = result.model
        self.tuning = result.metrics
        notes = [self.notes.get(settings.method, ""), _tuning_note(result.metrics)]
        self.notes[settings.method] = ", ".join(note for note in notes if note)
        self._save()

    def freeze(self) -> None:
        """Make the model ready for deployment, and save it."""
        freeze_(self.model)
        self._save()

    def add_peers(self) -> None:
        """Convert the methods to compare; one that cannot reach the ratio is left out."""
        # If the method was given as token counts, its peers get the share that it keeps.
        ratio = self.config.ratio or min(1.0, report(self.model).share)
        for text in self.peers:
            self.say(f"Converting with {text}")
            try:
                peer = self._converted(method_config(text, ratio))
            except ValueError as error:
                self.left_out[text] = str(error)
            else:
                self.models[text] = freeze_(peer)

    def evaluate(self) -> None:
        """Show all networks all images, in an order that mixes the classes."""
        dataset = self.images.evaluation
        self.say(f"Evaluating {len(self.models)} networks on {len(dataset):,} images")
        files = {name: self.onnx(self.model) for name in self.files}
        self.measured.measure_accuracy(self._batches(mixed(dataset)), files)
        self.measured.measure_tokens(self._sample())

    def measure_bottleneck(self) -> None:
        """Information bottleneck by block."""
        dataset = self.images.evaluation.take(self.settings.bottleneck_images)
        self.say(f"Measuring the information bottleneck on {len(dataset):,} images")
        try:
            self.measured.measure_bottleneck(self._batches(dataset))
        except KeyboardInterrupt:
            # Networks must not be compared on different images.
            self.measured.sites = []
            raise

    def measure_time(self) -> None:
        """Time all networks in all forms on real images, and recommend the fastest form."""
        batches = self.settings.time_batches
        self._measure_time(self.measured, batches, self.forms)
        if self.form is None:
            self.form = _fastest(self.measured.timings, self.settings.method, batches[0])

    def draw(self) -> None:
        """Draw which patches become one token."""
        base, named = self.models[BASE], self.pictures
        if named is None:
            labels = self.class_names if self.images.labelled else ()
            named = tuple(data_pictures(self.images.evaluation, labels))
        block = last_attended_block(self.model)
        if not named or block is None:
            return
        spec = expected_images(base, DataConfig(source=self.data))
        names, pictures = zip(*named, strict=True)
        scenes = prepare(pictures, names, spec)
        method = self.settings.method
        peers = [name for name in self.models if name not in (BASE, method)][:1]
        shown = {display_name(name): self.models[name] for name in [*peers, method]}
        self.illustrations = illustrate(scenes, trace_models(shown, scenes.inputs), block)

    def _save(self) -> None:
        # The results of an earlier run are replaced all at once, at the end.
        if self.folder is not None and not (self.folder / "metrics.json").exists():
            save(self.model, self.folder, class_names=self.class_names)

    def comparison(self, weights: str, command: str) -> Comparison:
        """All that is known so far."""
        settings, name = self.settings, self.name
        done = report(self.model) if settings.method in self.models else None
        share = 1.0 if done is None else done.share
        used = self.__dict__.get("calibration_batch")
        return Comparison(
            title=f"{name} at {share:.2f} of its multiply-adds, by {display_name(settings.method)}",
            model=name,
            weights=weights,
            method=settings.method,
            ratio=self.config.ratio,
            data=self.data,
            num_calibration_images=0 if used is None else len(used),
            calibration=self.calibration,
            finetune_epochs=settings.finetune_epochs,
            tuning=self.tuning,
            seed=settings.seed,
            command=command,
            environment=describe(self.device),
            networks=self.measured.rows(self._sample, self.notes),
            lead=self._lead(),
            blocks=() if done is None else block_changes(self.model),
            num_blocks=0 if done is None else done.num_blocks,
            labelled=self.images.labelled,
            num_classes=len(self.images.evaluation.class_names),
            untrained=done is not None and self._is_untrained(),
            preemptions=self.measured.preemptions,
            left_out=self.left_out,
            deployment=None if done is None else self._deployment(),
            curve=tuple(self.curve),
            max_loss=settings.allowed_loss if settings.num_points else None,
            goal_speedup=settings.speedup,
            goal_ms=settings.budget_ms,
            interrupted=self.interrupted,
        )

    def _is_untrained(self) -> bool:
        """Whether masks are learned, and neither fine-tuning nor tuning has trained them."""
        trained = self.settings.finetune_epochs or (
            self.tuning is not None and self.settings.trainable in ("mergers", "all")
        )
        return not trained and learns_masks(self.model)

    def _deployment(self) -> Deployment:
        """How to run the result, and how its file's predictions compare."""
        form = self.form or ("onnxruntime" if self.files else "eager")
        if form == "onnxruntime" and not self.files:
            self.say("model.onnx is not written: give --export for it")
        spec = expected_images(self.model, DataConfig(source=self.data))
        folder = _SOMEWHERE if self.folder is None else self.folder.as_posix()
        of_file = self.measured.outputs.get(ONNX_FILE)
        known: dict[str, int] = {}
        if of_file is not None:
            network = self.measured.outputs[self.settings.method]
            known = {
                "num_images": len(of_file.prediction),
                "num_changed": int((~of_file.agrees).sum()),
                "num_unlike": int((of_file.prediction != network.prediction).sum()),
            }
        return Deployment(
            form=form,
            batch_size=self.settings.time_batches[0],
            code=code_for(form, folder, spec),
            file=ONNX_FILE if self.files else "",
            **known,
        )

    def _sample(self) -> Tensor:
        """Images on which tokens are counted, and MACs that differ from image to image."""
        return sample_images(self.images.evaluation, self.data, self.models[BASE])

    def _lead(self) -> dict[str, PairedDifference]:
        """Accuracy of the compressed network less that of each peer."""
        method, known = self.settings.method, self.measured.outputs
        others = [name for name in self.models if name in known and name not in (BASE, method)]
        return {name: self.measured.difference(method, name) for name in others}


def _forms(settings: CompressSettings, device: torch.device) -> tuple[str, ...]:
    """The forms to time; one that cannot run here is refused."""
    forms = settings.forms or (usual_modes(device) if settings.time else ())
    if settings.form is not None and settings.form not in forms:
        forms = (*forms, settings.form)
    for form in forms:
        if form not in MODES:
            raise ValueError(f"form {form} is not known: choose from {', '.join(MODES)}")
        if "cudagraph" in form and device.type != "cuda":
            raise ValueError(f"form {form} needs an NVIDIA GPU")
    if settings.export or "onnxruntime" in forms:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            require(package)
    return forms


def _frozen_copy(model: nn.Module) -> nn.Module:
    """The network as it will be deployed; the given one can still be tuned."""
    return freeze_(copy.deepcopy(model))


def _halves(images: Partition) -> tuple[ImageDataset, Partition]:
    """Half of the images to choose on, and a partition that evaluates the other half."""
    dataset = images.evaluation
    order = np.random.default_rng(1).permutation(len(dataset)).tolist()
    middle = len(order) // 2
    if middle == 0:
        raise ValueError("images: at least two are needed, to choose on one and report the other")
    choosing, rest = (dataset.select(sorted(part)) for part in (order[:middle], order[middle:]))
    return choosing, replace(images, evaluation=rest)


class Bisection:
    """Finds the smallest ratio within a loss, in a few steps."""

    def __init__(self, allowed: float) -> None:
        self.allowed, self._left = allowed, NUM_POINTS
        self._low, self._high = LEAST_RATIO, 1.0

    @property
    def ratio(self) -> float | None:
        """The next ratio to try; None after the last step."""
        return round((self._low + self._high) / 2, 2) if self._left else None

    def learn(self, loss: float) -> None:
        """Note the loss at `ratio`; the next ratio is smaller if that loss is allowed."""
        assert self.ratio is not None
        if loss <= self.allowed + 1e-9:
            self._high = self.ratio
        else:
            self._low = self.ratio
        self._left -= 1


def _curve_point(name: str, tried: Measurements, timing: Timing, share: float) -> CurvePoint:
    outputs = tried.outputs[name]
    return CurvePoint(
        ratio=float(name),
        share=share,
        loss=tried.difference(name, BASE),
        top1=summarise(outputs).top1,
        num_changed=int((~outputs.agrees).sum()),
        timing=timing,
    )


def _chosen(points: Sequence[CurvePoint], max_loss: float) -> CurvePoint:
    """The fastest point within the loss, or the one that loses least if none is within it."""
    within = [p for p in points if -100 * p.loss.difference <= max_loss + 1e-9 and p.timing.speedup]
    if not within:
        return max(points, key=lambda point: point.loss.difference)
    return max(within, key=lambda point: point.timing.speedup or 0.0)


def _required_speedup(timing: Timing) -> float:
    if not timing.speedup:
        raise ValueError(f"it does not run as {timing.mode}: {timing.error}")
    return timing.speedup


def _predicted(tried: Mapping[float, float], goal: float) -> float:
    """The ratio at which the line through the two nearest times reaches the goal."""
    nearest = sorted(tried, key=lambda ratio: abs(tried[ratio] - goal))[:2]
    low, high = sorted(nearest)
    slope = (tried[high] - tried[low]) / (high - low)
    if slope <= 0:  # noise, or merging does not make this network faster
        return 0.8 * min(tried)
    predicted = low + (goal - tried[low]) / slope
    return min(0.98, max(predicted, 0.6 * min(tried)))


def _fastest(timings: Sequence[Timing], method: str, batch_size: int) -> str | None:
    """The form in which a network takes the least time."""
    ran = {
        timing.mode: timing.milliseconds
        for timing in timings
        if (timing.method, timing.batch_size) == (method, batch_size) and timing.milliseconds
    }
    return min(ran, key=ran.__getitem__) if ran else None


def mixed(dataset: Any) -> Any:
    """The images in random order, so that those seen before Ctrl-C are of all classes."""
    return dataset.select(np.random.default_rng(0).permutation(len(dataset)).tolist())


def _tuning_note(metrics: Mapping[str, Any]) -> str:
    kept = metrics["kept"] == "tuned"
    return f"tuned for {metrics['length']}" if kept else "not tuned, as that did not help"


def _why_not_calibrated(model: nn.Module, images: Partition) -> str:
    """Why the schedule of a converted model cannot be chosen on images; empty if it can."""
    done = conversion_of(model)
    if not adapter_of(done.family).layout(meta_copy(model), done.image_size).is_sequence:
        return f"calibration is for sequences of tokens, and {done.family} has grids"
    reason = done.config.unschedulable(grid=False)
    if reason:
        return reason
    if done.config.ratio in (None, 1) or done.config.sites is not None:
        return "it was given"
    if images.calibration is None:
        return f"there are no images to calibrate on, as {images.reason}"
    return ""


def _require_training_images(parts: Partition, data: str) -> ImageDataset:
    """The images on which the best epoch is chosen."""
    if not parts.labelled:
        raise ValueError(
            f"finetune_epochs: {data} has no labels to train on; --tune trains without labels"
        )
    if parts.calibration is None:
        raise ValueError(
            f"finetune_epochs: it needs calibration images to choose the best epoch on, but "
            f"{parts.reason}"
        )
    if parts.calibration.split == "all":
        raise ValueError(
            f"finetune_epochs: {data} has no training split; give a folder that holds train and val"
        )
    return parts.calibration

"""`ltm.compress`: from a trained network and labelled images to a smaller one, with a report.

The stages (convert, calibrate, tune, freeze, measure, draw) each add to one comparison. A run may
be stopped at any of them: the model is saved as soon as there is one, and measurements that were
made are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ltm.adapters import adapter_of
from ltm.api import (
    conversion_of,
    fit_,
    freeze_,
    merging_copy,
    report,
    save,
    unmerged_copy,
)
from ltm.api.folders import require_own
from ltm.calibration.calibration import calibrate
from ltm.calibration.settings import CalibrateSettings
from ltm.compression.settings import CompressSettings
from ltm.core.cost import meta_copy
from ltm.data.config import DataConfig
from ltm.data.datasets import Splits, open_dataset
from ltm.data.images import ImageDataset
from ltm.evaluation.accuracy import PairedDifference
from ltm.evaluation.images import (
    Partition,
    expected_images,
    load_batches,
    part_images,
    read_images,
    repeated_images,
    sample_images,
)
from ltm.evaluation.latency import BASE
from ltm.evaluation.measurement import Measurements
from ltm.evaluation.records import describe, text_table
from ltm.files import output_folder, results_in, write_metrics
from ltm.methods import MethodConfig
from ltm.models import (
    Network,
    Say,
    changed,
    check_classes,
    method_config,
    name_of,
    open_model,
    require_least,
    silent,
    source_of,
    split_methods,
)
from ltm.processes import local_device
from ltm.report.comparison import Comparison, block_changes, verdicts
from ltm.report.curves import display_name
from ltm.report.documents import Illustration, illustrate, table_of, write_card, write_report
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
_FILES = ("model.safetensors", "config.json", "report.html", "README.md", "metrics.json")


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
    """What timm knows about where the weights come from."""

    @property
    def interrupted(self) -> str:
        """What was going on when Ctrl-C stopped the run; empty for a complete one."""
        return self.comparison.interrupted

    def save(self, folder: str | Path) -> Path:
        """Write the network, its card, report.html and metrics.json."""
        folder = Path(folder)
        require_own(folder)
        with results_in(folder, replaced=_FILES) as aside:
            if self.model is not None:
                save(self.model, aside, class_names=self.class_names)
            write_report(self.comparison, aside, self.illustrations)
            write_card(self.comparison, aside, origin=self.origin)
            write_metrics(aside, self.comparison.to_dict())
        return folder

    def __repr__(self) -> str:
        comparison = self.comparison
        sentences = [f"- {sentence}" for sentence in verdicts(comparison)]
        return "\n".join([comparison.title, "", text_table(table_of(comparison)), "", *sentences])


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
    """Make a trained network smaller and faster, and measure what that gained and lost.

    Converts the network, chooses where to merge on unlabelled images, fine-tunes if asked to and
    freezes it; evaluates it against the original and the methods in `compare` on the same labelled
    images, and times them. Ctrl-C stops, and keeps what is done. The network that was given stays
    as it is.

    Args:
        model: a network or its name.
        data: folder or .zip of class folders, tar shards, hf:NAME, or shapes (generated).
        settings: how to merge, what to choose on images, and what to measure.
        folder: gets the network as soon as there is one, and what fine-tuning leaves; `save` the
            result for all the rest.
        name: what the report calls the network.
        weights: what the report says about its weights.
        command: what the report says repeats the run; by default this call.
        say: told what is done, line by line.
        changes: changes of the settings, such as `ratio=0.5`.
    """
    settings = changed(settings, changes)
    with output_folder(folder):
        job = _Compression(model, data, settings, folder=folder, name=name, say=say)
        job.run()
    source, base = job.source, job.models[BASE]
    origin = "given as a network" if source is None else source.origin
    return CompressResult(
        model=job.models.get(job.settings.method),
        comparison=job.comparison(
            weights or origin, command or _python_call(job.name, data, job.settings)
        ),
        illustrations=tuple(job.illustrations),
        class_names=tuple(job.images.evaluation.class_names),
        origin=_known_origin(base) if source is not None and source.pretrained else {},
    )


def _python_call(name: str, data: str, settings: CompressSettings) -> str:
    """The call that repeats a run: every setting that differs from its default."""
    given = (f.name for f in fields(settings) if getattr(settings, f.name) != f.default)
    words = [f"{setting}={getattr(settings, setting)!r}" for setting in given]
    return f"ltm.compress({', '.join([repr(name), repr(data), *words])})"


def _known_origin(model: nn.Module) -> dict[str, str]:
    """What timm knows about where weights come from."""
    known: Any = getattr(model, "pretrained_cfg", None) or {}
    found = {"base_model": known.get("hf_hub_id"), "license": known.get("license")}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _open_pictures(pictures: str) -> tuple[NamedPicture, ...] | None:
    """The pictures that the report shows; None takes them from the data."""
    if pictures == "data":
        return None
    if pictures == "generated":
        return tuple(generated_pictures())
    return tuple(read_pictures([pictures], NUM_PICTURES))


class _Compression:
    """A compression under way. `run` it; `comparison` tells what is known so far."""

    def __init__(
        self,
        model: Network,
        data: str,
        settings: CompressSettings,
        *,
        folder: str | Path | None,
        name: str | None,
        say: Say,
    ) -> None:
        """Refuse what cannot work, then load the network."""
        self.data, self.settings, self.say = data, settings, say
        self.folder = None if folder is None else Path(folder)
        self.device = local_device(settings.device)
        self.config = method_config(settings.method, settings.ratio)
        self.peers = [text for text in split_methods(settings.compare) if text != settings.method]
        for text in self.peers:
            method_config(text, settings.ratio)
        require_least("bottleneck-images", settings.bottleneck_images, 0)
        self.images = part_images(
            data,
            split=settings.split,
            images=settings.images,
            calibration_images=settings.calibration_images,
        )
        if settings.finetune_epochs:
            _require_training_images(self.images, data)
        self.pictures = _open_pictures(settings.pictures)
        torch.manual_seed(settings.seed)
        base = open_model(model, self.device, merges=True, say=say)
        base = unmerged_copy(base, share_weights=True)
        check_classes(base, self.images.evaluation.class_names, data)
        self.source = source_of(model)
        self.name = name or (name_of(model) if self.source is None else self.source.name)
        self.models: dict[str, nn.Module] = {BASE: base}
        self.measured = Measurements(self.models, quiet=say is silent)
        self.notes: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.illustrations: list[Illustration] = []
        self.calibration: dict[str, Any] | None = None
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

    def _batches(self, dataset: Any) -> Any:
        return load_batches(
            dataset,
            self.data,
            self.models[BASE],
            batch_size=self.settings.batch_size,
            workers=self.settings.workers,
            device=self.device,
        )

    def run(self) -> None:
        """Go through the stages; on Ctrl-C stop, and remember where."""
        for doing, stage in self._stages():
            try:
                stage()
            except KeyboardInterrupt:
                self.interrupted = doing
                return

    def _stages(self) -> Iterator[tuple[str, Callable[[], None]]]:
        settings = self.settings
        yield "the conversion", self.convert
        if settings.calibrate:
            yield "the calibration", self.calibrate
        if settings.finetune_epochs:
            yield "the fine-tuning", self.finetune
        yield "freezing", self.freeze
        yield "the conversion of the peers", self.add_peers
        yield "the evaluation", self.evaluate
        if settings.bottleneck_images:
            yield "the measurement of the information bottleneck", self.measure_bottleneck
        if settings.time:
            yield "timing", self.measure_time
        yield "drawing", self.draw

    def convert(self) -> None:
        """Convert, and save at once: from here on there is a result."""
        self.models[self.settings.method] = self._converted(self.config)
        self._save()

    def _converted(self, config: MethodConfig) -> nn.Module:
        model = merging_copy(self.models[BASE], config)
        if config.needs_images():
            if self.images.calibration is None:
                raise ValueError(
                    f"{config.title} needs other images to be fitted on, but {self.images.reason}"
                )
            # One of several: images come class by class.
            step = -(-len(self.calibration_batch) // _FITTING_IMAGES)
            fit_(model, self.calibration_batch[::step])
        return model

    def calibrate(self) -> None:
        """Choose the schedule on unlabelled images; where that cannot be done, say why."""
        settings = self.settings
        reason = _why_not_calibrated(self.model, self.images)
        if reason:
            self.say(f"The default schedule is kept: {reason}")
            return
        self.say(f"Calibrating on {len(self.calibration_batch):,} images, without their labels")
        search = CalibrateSettings(
            budget=self.config.ratio, trials=settings.calibration_trials, seed=settings.seed
        )
        found = calibrate(
            self.models[BASE], self.calibration_batch, search, config=self.config, say=self.say
        )
        self.calibration = found.to_dict()
        self.notes[settings.method] = f"calibrated on {found.num_images} images"
        self.models[settings.method] = self._converted(found.config)
        self._save()
        if found.interrupted:
            raise KeyboardInterrupt

    def finetune(self) -> None:
        """Train the mask modules alone; the best epoch is chosen on images not evaluated."""
        from ltm.training.recipes import FINETUNE  # noqa: PLC0415 - it needs an extra
        from ltm.training.run import train  # noqa: PLC0415

        settings, config = self.settings, conversion_of(self.model).config
        held_out = _require_training_images(self.images, self.data)
        splits = Splits(train=open_dataset(self.data, split="train"), val=held_out)
        train(
            self.model,
            splits,
            FINETUNE["general"],
            output=None if self.folder is None else self.folder / "finetuning",
            overwrite=True,
            say=self.say,
            method=config.name,
            ratio=config.ratio,
            source=self.data,
            batch_size=settings.batch_size,
            workers=settings.workers,
            epochs=settings.finetune_epochs,
            seed=settings.seed,
            device=str(self.device),
        )

    def freeze(self) -> None:
        """Make the model ready for deployment, and save it."""
        freeze_(self.model)
        self._save()

    def add_peers(self) -> None:
        """Convert what is compared; what cannot do this ratio is left out, with the reason."""
        # A method that was given as token counts has no ratio: its peers keep what it keeps.
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
        self.measured.measure_accuracy(self._batches(mixed(dataset)))

    def measure_bottleneck(self) -> None:
        """Information bottleneck by block."""
        dataset = self.images.evaluation.take(self.settings.bottleneck_images)
        self.say(f"Measuring the information bottleneck on {len(dataset):,} images")
        try:
            self.measured.measure_bottleneck(self._batches(dataset))
        except KeyboardInterrupt:
            # Numbers of fewer images would not match the curves beside them.
            self.measured.sites = []
            raise

    def measure_time(self) -> None:
        """Time all networks on real images."""

        def images(batch_size: int) -> Tensor:
            self.say(f"Timing batches of {batch_size}")
            dataset, base = self.images.evaluation, self.models[BASE]
            return repeated_images(dataset, self.data, base, batch_size)

        self.measured.measure_time(self.name, self.settings.time_batches, images)

    def draw(self) -> None:
        """Pictures of what becomes one token."""
        base, named = self.models[BASE], self.pictures
        if named is None:
            named = tuple(data_pictures(self.images.evaluation))
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
        # Results of an earlier run are replaced as a whole, at the end.
        if self.folder is not None and not (self.folder / "metrics.json").exists():
            save(self.model, self.folder, class_names=self.images.evaluation.class_names)

    def comparison(self, weights: str, command: str) -> Comparison:
        """What is known so far."""
        settings, name = self.settings, self.name
        done = report(self.model) if settings.method in self.models else None
        share = 1.0 if done is None else done.share
        used = self.__dict__.get("calibration_batch")
        if self.measured.outputs:
            self.measured.measure_tokens(self._sample())
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
            seed=settings.seed,
            command=command,
            environment=describe(self.device),
            networks=self.measured.rows(self._sample, self.notes),
            lead=self._lead(),
            blocks=() if done is None else block_changes(self.model),
            num_blocks=0 if done is None else done.num_blocks,
            left_out=self.left_out,
            interrupted=self.interrupted,
        )

    def _sample(self) -> Tensor:
        """Images on which tokens are counted, and MACs that differ from image to image."""
        return sample_images(self.images.evaluation, self.data, self.models[BASE])

    def _lead(self) -> dict[str, PairedDifference]:
        """Accuracy of the compressed network less that of each peer."""
        method, known = self.settings.method, self.measured.outputs
        others = [name for name in known if name not in (BASE, method)]
        return {name: self.measured.difference(method, name) for name in others}


def mixed(dataset: Any) -> Any:
    """The same images in another order: those seen before Ctrl-C are then of all classes."""
    return dataset.select(np.random.default_rng(0).permutation(len(dataset)).tolist())


def _why_not_calibrated(model: nn.Module, images: Partition) -> str:
    """What keeps a converted model's schedule from being chosen on images; empty for nothing."""
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
    """The images on which the best epoch is chosen; a ValueError where nothing can train."""
    if parts.calibration is None:
        raise ValueError(
            f"finetune_epochs: the best epoch is chosen on calibration images, but {parts.reason}"
        )
    if parts.calibration.split == "all":
        raise ValueError(
            f"finetune_epochs: {data} has no training split; give a folder that holds train and val"
        )
    return parts.calibration

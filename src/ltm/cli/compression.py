"""The stages of `ltm compress`: each adds to one comparison, and what is there can be written.

A run may be stopped at any stage: the model is saved as soon as there is one, and measurements
that were made are kept.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltm.cli.measurements import BASE, Measurements
from ltm.evaluation.images import Partition, expected_images, load_batches
from ltm.files import write_metrics
from ltm.models import method_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ltm.methods import MethodConfig
    from ltm.report.comparison import Comparison
    from ltm.report.documents import Illustration
    from ltm.report.pictures import NamedPicture

_FITTING_IMAGES = 64


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a compression is asked to do."""

    model: str
    weights: str
    method: str
    config: MethodConfig
    data: str
    output: Path
    command: str
    device: torch.device
    compare: tuple[str, ...] = ()
    calibrate: bool = True
    calibration_trials: int = 100
    finetune_epochs: int = 0
    time_batches: tuple[int, ...] = (1, 8)
    bottleneck_images: int = 1000
    batch_size: int = 64
    workers: int = 2
    seed: int = 0
    pictures: tuple[NamedPicture, ...] | None = None
    """Pictures to show; None takes some of the data."""
    model_args: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)


class Compression:
    """A compression under way. `run` it; `write` writes what is known so far."""

    def __init__(
        self,
        base: nn.Module,
        images: Partition,
        options: Options,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.options, self.images, self.say = options, images, say
        self.models: dict[str, nn.Module] = {BASE: base.to(options.device)}
        self.measured = Measurements(self.models, images.evaluation, self._batches, say)
        self.notes: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.illustrations: list[Illustration] = []
        self.calibration: dict[str, Any] | None = None
        self.stopped = False
        self.interrupted = ""

    @property
    def model(self) -> nn.Module:
        """The compressed model."""
        return self.models[self.options.method]

    @cached_property
    def calibration_batch(self) -> Tensor:
        """Unlabelled images, none of which is evaluated."""
        import torch

        return torch.cat([images for images, _ in self._batches(self.images.calibration)])

    def _batches(self, dataset: Any) -> Any:
        options = self.options
        return load_batches(
            dataset,
            options.data,
            self.models[BASE],
            batch_size=options.batch_size,
            workers=options.workers,
            device=options.device,
        )

    def run(self) -> None:
        """Go through the stages; on Ctrl-C stop, and remember where."""
        doing = ""
        try:
            for doing, stage in self._stages():
                stage()
                if self.stopped or self.measured.interrupted:
                    self.interrupted = doing
                    return
        except KeyboardInterrupt:
            self.interrupted = doing

    def _stages(self) -> Iterator[tuple[str, Callable[[], None]]]:
        options, measured = self.options, self.measured
        yield "the conversion", self.convert
        if options.calibrate:
            yield "the calibration", self.calibrate
        if options.finetune_epochs:
            yield "the fine-tuning", self.finetune
        yield "freezing", self.freeze
        yield "the conversion of the peers", self.add_peers
        yield "the evaluation", measured.evaluate
        if options.bottleneck_images:
            yield (
                "the measurement of the information bottleneck",
                lambda: measured.measure_bottleneck(options.bottleneck_images),
            )
        if options.time_batches:
            yield "timing", lambda: measured.measure_time(options.model, options.time_batches)
        yield "drawing", self.draw

    def convert(self) -> None:
        """Convert, and save at once: from here on there is a result."""
        self.models[self.options.method] = self._converted(self.options.config)
        self.save()

    def _converted(self, config: MethodConfig) -> nn.Module:
        from ltm.api import fit_, merge_tokens_

        model = copy.deepcopy(self.models[BASE])
        merge_tokens_(model, config)
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
        from ltm.cli.scheduling import choose_schedule, why_not_calibrated

        options = self.options
        reason = why_not_calibrated(self.model, self.images)
        if reason:
            self.say(f"The default schedule is kept: {reason}")
            return
        self.say(f"Calibrating on {len(self.calibration_batch):,} images, without their labels")
        found = choose_schedule(
            self.models[BASE],
            self.calibration_batch,
            options.config,
            trials=options.calibration_trials,
            seed=options.seed,
        )
        self.calibration = found.to_dict()
        self.notes[options.method] = f"calibrated on {found.num_images} images"
        self.models[options.method] = self._converted(found.config)
        self.save()
        self.stopped = found.interrupted

    def finetune(self) -> None:
        """Train the mask modules."""
        from ltm.cli.tuning import require_training_images, tune_mergers_

        options = self.options
        tune_mergers_(
            self.model,
            options.data,
            require_training_images(self.images, options.data),
            epochs=options.finetune_epochs,
            batch_size=options.batch_size,
            workers=options.workers,
            seed=options.seed,
            folder=options.output / "finetuning",
        )

    def freeze(self) -> None:
        """Make the model ready for deployment, and save it."""
        from ltm.api import freeze_

        freeze_(self.model)
        self.save()

    def add_peers(self) -> None:
        """Convert what is compared; what cannot do this ratio is left out, with the reason."""
        from ltm.api import freeze_, report

        # A method that was given as token counts has no ratio: its peers keep what it keeps.
        ratio = self.options.config.ratio or min(1.0, report(self.model).share)
        for text in self.options.compare:
            self.say(f"Converting with {text}")
            try:
                peer = self._converted(method_config(text, ratio))
            except ValueError as error:
                self.left_out[text] = str(error)
            else:
                self.models[text] = freeze_(peer)

    def draw(self) -> None:
        """Pictures of what becomes one token."""
        from ltm.data.config import DataConfig
        from ltm.report.curves import display_name
        from ltm.report.documents import illustrate
        from ltm.report.pictures import data_pictures, prepare
        from ltm.report.tracing import last_attended_block, trace_models

        base, named = self.models[BASE], self.options.pictures
        if named is None:
            named = tuple(data_pictures(self.images.evaluation))
        block = last_attended_block(self.model)
        if not named or block is None:
            return
        spec = expected_images(base, DataConfig(source=self.options.data))
        names, pictures = zip(*named, strict=True)
        scenes = prepare(pictures, names, spec)
        peers = [name for name in self.models if name not in (BASE, self.options.method)][:1]
        shown = {display_name(name): self.models[name] for name in [*peers, self.options.method]}
        self.illustrations = illustrate(scenes, trace_models(shown, scenes.inputs), block)

    def save(self) -> None:
        """Write the model in the layout of timm on the hub, class names included."""
        from ltm.api import save

        names = self.images.evaluation.class_names
        folder = save(self.model, self.options.output, class_names=names)
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        # timm does not remember all arguments that a model was made with.
        config["model_args"] = {**self.options.model_args, **config["model_args"]}
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def write(self) -> Comparison:
        """Write what is known: metrics.json, report.html and the model card."""
        from ltm.report.documents import write_card, write_report

        comparison = self.comparison()
        write_metrics(self.options.output, comparison.to_dict())
        write_report(comparison, self.options.output, self.illustrations)
        write_card(comparison, self.options.output, origin=self.options.origin)
        return comparison

    def comparison(self) -> Comparison:
        """What is known so far."""
        from ltm.api import report
        from ltm.evaluation.environment import describe
        from ltm.report.comparison import Comparison, block_changes
        from ltm.report.curves import display_name

        options = self.options
        done = report(self.model) if options.method in self.models else None
        share = 1.0 if done is None else done.share
        used = self.__dict__.get("calibration_batch")
        return Comparison(
            title=f"{options.model} at {share:.2f} of its multiply-adds, by "
            f"{display_name(options.method)}",
            model=options.model,
            weights=options.weights,
            method=options.method,
            ratio=options.config.ratio,
            data=options.data,
            num_calibration_images=0 if used is None else len(used),
            calibration=self.calibration,
            finetune_epochs=options.finetune_epochs,
            seed=options.seed,
            command=options.command,
            environment=describe(options.device),
            networks=self.measured.networks(self.notes),
            lead=self.measured.lead(options.method),
            blocks=() if done is None else block_changes(self.model),
            num_blocks=0 if done is None else done.num_blocks,
            left_out=self.left_out,
            interrupted=self.interrupted,
        )

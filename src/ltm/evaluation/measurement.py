"""Networks measured side by side on the same images: cost, accuracy, bottleneck, tokens, time.

`Measurements` takes the networks, one of them the base. Each `measure_...` is one pass over images.
If images have no labels, the base's predictions take their place: accuracy is agreement with it.
`rows` returns what is known so far, one `Measurement` for each network.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ltm.api import conversion_of, image_size_of, mergers, watching
from ltm.core.bottleneck import BETA
from ltm.core.cost import (
    count_macs,
    evaluating,
    measured_gmacs,
    meta_copy,
    meta_images,
    num_parameters,
)
from ltm.evaluation.accuracy import (
    Accuracy,
    Outputs,
    PairedDifference,
    evaluate,
    paired_interval,
    summarise,
)
from ltm.evaluation.bottleneck import SiteBottleneck, measure_bottleneck, watchable
from ltm.evaluation.latency import BASE, Candidate, Conditions, Timing, measure_latency
from ltm.evaluation.modes import Mode
from ltm.models import num_classes_of
from ltm.progress import Progress, in_lines


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Cost, accuracy and speed of one network. What was not measured is empty."""

    method: str
    parameters: int
    gmacs: float
    share: float
    """Of the original's multiply-adds; a mean over images where tokens differ per image."""
    accuracy: Accuracy | None = None
    against_base: PairedDifference | None = None
    timings: tuple[Timing, ...] = ()
    tokens: dict[int, float] = field(default_factory=dict)
    """Tokens after each block, prefix tokens excluded."""
    bottleneck: tuple[SiteBottleneck, ...] = ()
    note: str = ""

    def timing(self, batch_size: int, mode: str = "eager") -> Timing | None:
        """The time of a batch in a mode, if it was measured."""
        found = (t for t in self.timings if (t.batch_size, t.mode) == (batch_size, mode))
        return next(found, None)


class Measurements:
    """Measures `models` by name, one of which is the `BASE`; more may join until the first pass.

    Ctrl-C ends a pass with KeyboardInterrupt, and the images seen so far count.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], *, labelled: bool = True, quiet: bool = True
    ) -> None:
        self.models, self.labelled, self.quiet = models, labelled, quiet
        self.outputs: dict[str, Outputs] = {}
        self.sites: list[SiteBottleneck] = []
        self.tokens: dict[str, dict[int, float]] = {}
        self.timings: list[Timing] = []
        self.preemptions = 0.0
        """How often other processes took a core while networks were timed, per second of work."""

    def measure_accuracy(
        self, batches: Iterable[Any], files: Mapping[str, nn.Module] | None = None
    ) -> None:
        """Show all images to all networks, and to exported `files`."""
        shown = {**self.models, **(files or {})}
        with self._until_pressed("accuracy") as loop:
            self.outputs = evaluate(
                shown, batches, original=BASE, labelled=self.labelled, progress=loop
            )

    def add_accuracy(self, name: str, model: nn.Module, batches: Iterable[Any]) -> None:
        """Show the same images to one more network; the original is not shown them again."""
        with self._until_pressed("accuracy") as loop:
            found = evaluate({name: model}, batches, progress=loop)[name]
        agrees = found.prediction == self.outputs[BASE].prediction
        self.outputs[name] = replace(found, agrees=agrees)

    @contextmanager
    def _until_pressed(self, title: str) -> Iterator[Progress]:
        """The progress of a pass over images; Ctrl-C ends it with KeyboardInterrupt."""
        loop = Progress(title, silent=self.quiet)
        try:
            yield loop
        except ValueError:
            if not loop.interrupted:  # Otherwise not one batch was done.
                raise
        if loop.interrupted:
            raise KeyboardInterrupt

    def measure_bottleneck(self, batches: Iterable[Any], *, beta: float = BETA) -> None:
        """Information bottleneck, block by block."""
        loop = Progress("information bottleneck", silent=self.quiet)
        classes = num_classes_of(self.models[BASE])
        batches = batches if self.labelled else _Answered(batches, self.models[BASE])
        self.sites = measure_bottleneck(self.models, batches, classes, beta=beta, progress=loop)
        if loop.interrupted:
            raise KeyboardInterrupt

    def measure_tokens(self, images: Tensor) -> None:
        """Count the tokens after each block, also where nothing merges."""
        for name, model in self.models.items():
            with watchable(model) as watched:
                self.tokens[name] = tokens_by_block(watched, images)

    def measure_time(
        self,
        name: str,
        batch_sizes: Sequence[int],
        images: Callable[[int], Tensor],
        modes: Sequence[str] = ("eager",),
        own: Mapping[str, Mode] | None = None,
        *,
        rounds: int = 15,
    ) -> None:
        """Time all networks in all modes, in interleaved rounds; `images` gives a batch by size.

        `name` is what the rows call the network; `own` are modes in place of those of `MODES`.
        """
        base = self.models[BASE]
        device = str(next(base.parameters()).device)
        candidates = [
            Candidate(method=method, model=model, modes=own or {})
            for method, model in self.models.items()
        ]
        for batch_size in batch_sizes:
            conditions = Conditions(
                model=name,
                image_size=image_size_of(base),
                batch_size=batch_size,
                device=device,
                rounds=rounds,
            )
            batch = images(batch_size)
            lines = partial(in_lines, f"timing batches of {batch_size}", silent=self.quiet)
            switches, work = _forced_switches(), time.process_time()
            self.timings += measure_latency(
                candidates, conditions, modes, images=batch, progress=lines
            )
            seconds = max(1.0, time.process_time() - work)  # less tells nothing
            rate = (_forced_switches() - switches) / seconds
            self.preemptions = max(self.preemptions, rate)

    def difference(self, method: str, other: str) -> PairedDifference:
        """Accuracy of one network less that of another, image by image."""
        return paired_interval(self.outputs[method].correct, self.outputs[other].correct)

    def rows(
        self, sample: Callable[[], Tensor], notes: Mapping[str, str] | None = None
    ) -> tuple[Measurement, ...]:
        """What is known of each network; `sample` gives images to count multiply-adds on."""
        sample = cache(sample)
        base_gmacs = mean_gmacs(self.models[BASE], sample)
        return tuple(
            self._row(name, base_gmacs, sample, (notes or {}).get(name, "")) for name in self.models
        )

    def _row(
        self, name: str, base_gmacs: float, sample: Callable[[], Tensor], note: str
    ) -> Measurement:
        model, outputs = self.models[name], self.outputs.get(name)
        gmacs = mean_gmacs(model, sample)
        return Measurement(
            method=name,
            parameters=num_parameters(model),
            gmacs=gmacs,
            share=gmacs / base_gmacs,
            accuracy=None if outputs is None else summarise(outputs),
            against_base=None if outputs is None or name == BASE else self.difference(name, BASE),
            timings=tuple(timing for timing in self.timings if timing.method == name),
            tokens=self.tokens.get(name, {}),
            bottleneck=tuple(site for site in self.sites if site.model == name),
            note=note,
        )


class _Answered:
    """Batches of images without labels; the predictions of a network take their place."""

    def __init__(self, batches: Any, model: nn.Module) -> None:
        self._batches, self._model = batches, model

    def __len__(self) -> int:
        return len(self._batches)

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        weight = next(self._model.parameters())
        for images, _ in self._batches:
            yield images, self._model(images.to(weight.device, weight.dtype)).argmax(1)


def varies(model: nn.Module) -> bool:
    """Whether every image keeps a number of tokens of its own."""
    return any(merger.own_counts for _, merger in mergers(model))


def mean_gmacs(model: nn.Module, sample: Callable[[], Tensor]) -> float:
    """Billions of multiply-adds per image that are really done; idle modules do not count.

    If every image keeps a number of tokens of its own, this is the mean over the sample. Otherwise
    nothing runs.
    """
    if varies(model):
        return measured_gmacs(model, sample())
    shadow = meta_copy(model)
    return count_macs(shadow, meta_images(shadow, image_size_of(model))) / 1e9


@torch.no_grad()
def tokens_by_block(model: nn.Module, images: Tensor) -> dict[int, float]:
    """Tokens that leave each block of a converted model on average, prefix tokens excluded."""
    prefix = max((site.num_prefix for site in conversion_of(model).sites), default=0)
    with evaluating(model), watching(model) as records:
        model(images.to(next(model.parameters()).device))
    counts: dict[int, float] = {}
    for record in records:
        counts[record.block] = float(record.merged.shape[1] - prefix)
        if record.size is not None:
            counts[record.block] = float((record.size[:, prefix:] > 0).sum(1).float().mean())
    return counts


def _forced_switches() -> int:
    """How often the system gave a core of this process to another; 0 where it does not say."""
    if sys.platform == "win32":
        return 0
    import resource  # noqa: PLC0415 - Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

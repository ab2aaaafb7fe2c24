"""Networks measured side by side on the same images; Ctrl-C stops, and keeps what is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ltm.api import gmacs as count_gmacs, image_size_of, measure_share, mergers
from ltm.core.cost import num_parameters
from ltm.evaluation import accuracy
from ltm.evaluation.accuracy import Outputs, PairedDifference, paired_interval, summarise
from ltm.evaluation.bottleneck import SiteBottleneck, measure_bottleneck, watchable
from ltm.evaluation.latency import BASE, Candidate, Conditions, Timing, measure_latency
from ltm.models import Say, num_classes_of, silent
from ltm.progress import Progress
from ltm.report.comparison import Network
from ltm.report.tracing import tokens_by_block

_SAMPLE = 64
"""Images on which tokens are counted, and shares of MACs that differ from image to image."""


class Measurements:
    """Accuracy, information bottleneck, time and tokens of `models`, one of which is the base.

    `load` makes batches of a data set. Models may be added until the first measurement.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        dataset: Any,
        load: Callable[[Any], Any],
        say: Say,
    ) -> None:
        self.models, self.dataset, self.load, self.say = models, dataset, load, say
        self.outputs: dict[str, Outputs] = {}
        self.sites: list[SiteBottleneck] = []
        self.timings: list[Timing] = []

    def evaluate(self) -> None:
        """Show all networks all images."""
        self.say(f"Evaluating {len(self.models)} networks on {len(self.dataset):,} images")
        loop = Progress("accuracy", silent=self.say is silent)
        try:
            self.outputs = accuracy.evaluate(
                self.models, self.load(mixed(self.dataset)), original=BASE, progress=loop
            )
        except ValueError:
            if not loop.interrupted:  # Otherwise not one batch was done.
                raise
        if loop.interrupted:
            raise KeyboardInterrupt

    def measure_bottleneck(self, num_images: int) -> None:
        """Information bottleneck by block, on at most so many images."""
        dataset = self.dataset.take(num_images)
        self.say(f"Measuring the information bottleneck on {len(dataset):,} images")
        loop = Progress("information bottleneck", silent=self.say is silent)
        classes = num_classes_of(self.models[BASE])
        sites = measure_bottleneck(self.models, self.load(dataset), classes, progress=loop)
        # Numbers of fewer images would not match the curves beside them.
        if loop.interrupted:
            raise KeyboardInterrupt
        self.sites = sites

    def measure_time(self, name: str, batch_sizes: Sequence[int]) -> None:
        """Time all networks in interleaved rounds, on real images."""
        weight = next(self.models[BASE].parameters())
        candidates = [Candidate(method=name, model=model) for name, model in self.models.items()]
        for batch_size in batch_sizes:
            self.say(f"Timing batches of {batch_size}")
            conditions = Conditions(
                model=name,
                image_size=image_size_of(self.models[BASE]),
                batch_size=batch_size,
                device=str(weight.device),
            )
            images = self.sample(batch_size)
            images = images.repeat(-(-batch_size // len(images)), 1, 1, 1)[:batch_size]
            self.timings += measure_latency(candidates, conditions, images=images)

    def sample(self, number: int) -> Tensor:
        """Images that are spread over the data."""
        return torch.cat([images for images, _ in self.load(self.dataset.take(number))])

    def networks(self, notes: Mapping[str, str]) -> tuple[Network, ...]:
        """One row per network of all that was measured."""
        sample = cache(lambda: self.sample(_SAMPLE))
        base, base_gmacs = self.outputs.get(BASE), _gmacs(self.models[BASE], 0.0, sample)
        rows: list[Network] = []
        for name, model in self.models.items():
            outputs, gmacs = self.outputs.get(name), _gmacs(model, base_gmacs, sample)
            row = Network(
                method=name,
                parameters=num_parameters(model),
                gmacs=gmacs,
                share=gmacs / base_gmacs,
                accuracy=None if outputs is None else summarise(outputs),
                against_base=paired_interval(outputs.correct, base.correct)
                if outputs and base and name != BASE
                else None,
                timings=tuple(timing for timing in self.timings if timing.method == name),
                tokens=_tokens(model, sample()) if self.outputs else {},
                bottleneck=tuple(site for site in self.sites if site.model == name),
                note=notes.get(name, ""),
            )
            rows.append(row)
        return tuple(rows)

    def lead(self, method: str) -> dict[str, PairedDifference]:
        """Accuracy of one method minus that of each peer."""
        if method not in self.outputs:
            return {}
        own = self.outputs[method].correct
        return {
            other: paired_interval(own, outputs.correct)
            for other, outputs in self.outputs.items()
            if other not in (BASE, method)
        }


def _gmacs(model: nn.Module, base_gmacs: float, sample: Callable[[], Tensor]) -> float:
    """Billions of multiply-adds an image; a mean where the tokens differ between images."""
    if any(merger.own_counts for _, merger in mergers(model)):
        return measure_share(model, sample()) * base_gmacs
    return count_gmacs(model)


def _tokens(model: nn.Module, images: Tensor) -> dict[int, float]:
    """Tokens after each block, also of a network that merges nothing."""
    with watchable(model) as watched:
        return tokens_by_block(watched, images)


def mixed(dataset: Any) -> Any:
    """The same images in another order: those seen before Ctrl-C are then of all classes."""
    return dataset.select(np.random.default_rng(0).permutation(len(dataset)).tolist())

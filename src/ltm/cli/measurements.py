"""Networks measured side by side on the same images; Ctrl-C stops, and keeps what is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ltm.models import num_classes_of
from ltm.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ltm.evaluation.accuracy import Outputs, PairedDifference
    from ltm.evaluation.bottleneck import SiteBottleneck
    from ltm.evaluation.latency import Timing
    from ltm.report.comparison import Network

BASE = "base"
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
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.models, self.dataset, self.load, self.say = models, dataset, load, say
        self.outputs: dict[str, Outputs] = {}
        self.sites: list[SiteBottleneck] = []
        self.timings: list[Timing] = []
        self.interrupted = False

    def evaluate(self) -> None:
        """Show all networks all images."""
        from ltm.evaluation import accuracy

        self.say(f"Evaluating {len(self.models)} networks on {len(self.dataset):,} images")
        loop = Progress("accuracy")
        try:
            self.outputs = accuracy.evaluate(
                self.models, self.load(mixed(self.dataset)), original=BASE, progress=loop
            )
        except ValueError:
            if not loop.interrupted:  # Otherwise not one batch was done.
                raise
        self.interrupted = loop.interrupted

    def measure_bottleneck(self, num_images: int) -> None:
        """Information bottleneck by block, on at most so many images."""
        from ltm.evaluation.bottleneck import measure_bottleneck

        dataset = self.dataset.take(num_images)
        self.say(f"Measuring the information bottleneck on {len(dataset):,} images")
        loop = Progress("information bottleneck")
        classes = num_classes_of(self.models[BASE])
        sites = measure_bottleneck(self.models, self.load(dataset), classes, progress=loop)
        # Tables of the images so far would be right, but not those of the curves beside them.
        self.sites = [] if loop.interrupted else sites
        self.interrupted = loop.interrupted

    def measure_time(self, name: str, batch_sizes: Sequence[int]) -> None:
        """Race all networks, on real images."""
        from ltm.api import image_size_of
        from ltm.evaluation.latency import Candidate, Conditions, measure_latency

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
        """The first images of a selection that is spread over the data."""
        import torch

        batches = self.load(self.dataset.take(number))
        found: list[Tensor] = []
        for images, _ in batches:
            found.append(images)
            if sum(map(len, found)) >= number:
                break
        return torch.cat(found)[:number]

    def networks(self, notes: Mapping[str, str]) -> tuple[Network, ...]:
        """One row per network of all that was measured."""
        from ltm.evaluation.accuracy import paired_interval, summarise
        from ltm.evaluation.cost import num_parameters
        from ltm.report.comparison import Network

        sample = cache(lambda: self.sample(_SAMPLE))
        base, base_gmacs = self.outputs.get(BASE), gmacs_of(self.models[BASE], 0.0, sample)
        rows: list[Network] = []
        for name, model in self.models.items():
            outputs, gmacs = self.outputs.get(name), gmacs_of(model, base_gmacs, sample)
            row = Network(
                method=name,
                parameters=num_parameters(model),
                gmacs=gmacs,
                share=gmacs / base_gmacs,
                accuracy=None if outputs is None else summarise(outputs),
                against_base=None
                if outputs is None or base is None or name == BASE
                else paired_interval(outputs.correct, base.correct),
                timings=tuple(timing for timing in self.timings if timing.method == name),
                tokens=tokens_of(model, sample()) if self.outputs else {},
                bottleneck=tuple(site for site in self.sites if site.model == name),
                note=notes.get(name, ""),
            )
            rows.append(row)
        return tuple(rows)

    def lead(self, method: str) -> dict[str, PairedDifference]:
        """Accuracy of one method less that of each other, but for the base."""
        from ltm.evaluation.accuracy import paired_interval

        if method not in self.outputs:
            return {}
        own = self.outputs[method].correct
        return {
            other: paired_interval(own, outputs.correct)
            for other, outputs in self.outputs.items()
            if other not in (BASE, method)
        }


def gmacs_of(model: nn.Module, base_gmacs: float, sample: Callable[[], Tensor]) -> float:
    """Billions of multiply-adds an image; a mean where the tokens differ between images."""
    from ltm.api import gmacs, measure_share, mergers

    if any(merger.own_counts for _, merger in mergers(model)):
        return measure_share(model, sample()) * base_gmacs
    return gmacs(model)


def tokens_of(model: nn.Module, images: Tensor) -> dict[int, float]:
    """Tokens after each block, also of a network that merges nothing."""
    from ltm.evaluation.bottleneck import watchable
    from ltm.report.tracing import tokens_by_block

    with watchable(model) as watched:
        return tokens_by_block(watched, images)


def mixed(dataset: Any) -> Any:
    """The same images in another order: those seen before Ctrl-C are then of all classes."""
    import numpy as np

    return dataset.select(np.random.default_rng(0).permutation(len(dataset)).tolist())

"""Networks made ready to be compared: converted, with statistics and thresholds set, frozen."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ltm.evaluation.images import load_batches, open_images
from ltm.models import method_config, num_classes_of, require_method

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ltm.evaluation.latency import Candidate
    from ltm.methods import MethodConfig

PUBLISHED_TOME = "tome-reference"
"""ToMe's published algorithm in plain torch, on plain ViTs: in benchmarks only."""

_SAMPLE, _COUNTED = 16, 8
"""Images on which thresholds and statistics are set, and on which what they leave is counted."""


def check_methods(methods: Sequence[str], ratio: float) -> None:
    """Refuse what is no method, before anything is made."""
    for method in methods:
        require_method(method, PUBLISHED_TOME)
        _config(method, ratio)


def _config(method: str, ratio: float) -> MethodConfig:
    """The config of a method; a published algorithm has that of ours."""
    ours = PUBLISHED_TOME.removesuffix("-reference")
    return method_config(method.replace(PUBLISHED_TOME, ours, 1), ratio)


def base_candidate(model: nn.Module, images: Tensor) -> Candidate:
    """The untouched network, which all others are measured against."""
    from ltm.evaluation.latency import BASE, Candidate

    return Candidate(method=BASE, model=model, gmacs=_gmacs(model, images))


def _gmacs(model: nn.Module, images: Tensor) -> float:
    """Counted without values, unless every image keeps a number of tokens of its own."""
    from ltm.api import gmacs, mergers
    from ltm.evaluation.cost import measured_gmacs

    if any(merger.own_counts for _, merger in mergers(model)):
        return measured_gmacs(model, images[:_COUNTED])
    return gmacs(model, (images.shape[-2], images.shape[-1]))


def timed_candidate(
    model: nn.Module, method: str, ratio: float, images: Tensor, *, training: bool = False
) -> Candidate:
    """A copy of the untouched `model`, merging: as it is deployed, or as it is trained.

    It is fitted on `images`: informative weights get class statistics of random labels, so that
    they cost what they do after training; a ratio that holds as a mean holds on them.
    """
    from ltm.evaluation.latency import Candidate

    model = copy.deepcopy(model)
    if method.partition(":")[0] == PUBLISHED_TOME:
        from ltm.evaluation.cost import measured_gmacs

        model, ratio = _published_tome(model, method, ratio)
        note = "published algorithm in plain torch, fused attention"
        return Candidate(
            method=PUBLISHED_TOME,
            model=model,
            ratio=ratio,
            gmacs=measured_gmacs(model, images[:1]),
            note=note,
        )
    config = method_config(method, ratio)
    prepare_(model, config, images)
    gmacs = _gmacs(model, images)
    if not training:
        from ltm.api import freeze_

        freeze_(model)
    note = config.timing_note
    return Candidate(method=method, model=model, ratio=config.ratio, gmacs=gmacs, note=note)


def prepare_(model: nn.Module, config: MethodConfig, images: Tensor) -> None:
    """Convert, and give the method what it would have learned from data."""
    import torch

    from ltm.api import fit_, merge_tokens_

    merge_tokens_(model, config, (images.shape[-2], images.shape[-1]))
    few = images[:_SAMPLE]
    labels = torch.arange(len(few)) % num_classes_of(model)
    fit_(model, [(few, labels)], tolerance=0.02)


def _published_tome(model: nn.Module, method: str, ratio: float) -> tuple[nn.Module, float]:
    """As many tokens leave in each block as with our ToMe at the same ratio."""
    from ltm.api import merge_tokens_, token_counts, unmerge_tokens_
    from ltm.evaluation.reference_tome import ReferenceToMe

    config = _config(method, ratio)
    report = merge_tokens_(model, config)
    counts = [report.sites[0].num_in, *token_counts(model)]
    unmerge_tokens_(model)
    pairs = pairwise(count for count in counts if isinstance(count, int))
    leaving = [before - after for before, after in pairs]
    return ReferenceToMe(model, leaving), config.ratio or ratio


class Images:
    """Real images to run on."""

    def __init__(self, source: str, split: str, workers: int) -> None:
        self.source, self.split, self.workers = source, split, workers
        self.number = len(open_images(source, split))

    def loader(self, model: nn.Module, batch_size: int, batches: int) -> Any:
        """At most so many full batches, to be gone through again and again."""
        whole = min(batches, self.number // batch_size) * batch_size
        if whole == 0:
            raise ValueError(f"{self.source} has {self.number} images, fewer than {batch_size}")
        return load_batches(
            open_images(self.source, self.split, whole),
            self.source,
            model,
            batch_size=batch_size,
            workers=self.workers,
            labelled=False,
        )


class Paddock:
    """One model's candidates, each made when it is first needed."""

    def __init__(
        self,
        model: nn.Module,
        methods: Sequence[str],
        ratio: float,
        device: Any,
        images: Images | None,
    ) -> None:
        from ltm.api import image_size_of, is_merging

        self.model, self.ratio, self.images = model.to(device), ratio, images
        self.saved = is_merging(model)
        self.methods = ["saved"] if self.saved else list(methods)
        self.image_size = image_size_of(model)
        self._made: dict[tuple[str, bool], Candidate | ValueError] = {}

    def ratio_of(self, method: str) -> float | None:
        """The share of multiply-adds that a method is to keep."""
        return _config(method, self.ratio).ratio

    def candidate(self, method: str, *, training: bool) -> Candidate:
        """An candidate; one that cannot be made raises the same ValueError each time."""
        key = method, training
        if key not in self._made:
            try:
                self._made[key] = self._make(method, training)
            except ValueError as error:
                self._made[key] = error
        made = self._made[key]
        if isinstance(made, ValueError):
            raise made
        return made

    def _make(self, method: str, training: bool) -> Candidate:
        from ltm.api import unmerge_tokens_
        from ltm.evaluation.cost import measured_gmacs
        from ltm.evaluation.latency import BASE, Candidate

        images = self.batch(_SAMPLE).to(next(self.model.parameters()).device)
        if self.saved and method == BASE:
            base = copy.deepcopy(self.model)
            unmerge_tokens_(base)
            return base_candidate(base, images)
        if method == BASE:
            return base_candidate(self.model, images)
        if self.saved:  # as it was saved: what rests in it is not counted
            gmacs = measured_gmacs(self.model, images[:_COUNTED])
            return Candidate(method=method, model=self.model, gmacs=gmacs)
        return timed_candidate(self.model, method, self.ratio, images, training=training)

    def batch(self, batch_size: int) -> Tensor:
        """Images to run on: real ones, repeated where there are too few, or noise."""
        import torch

        from ltm.core.cost import channels_of

        if self.images is None:
            generator = torch.Generator().manual_seed(0)
            shape = batch_size, channels_of(self.model), *self.image_size
            return torch.randn(shape, generator=generator)
        few = min(batch_size, 64, self.images.number)
        found = next(iter(self.images.loader(self.model, few, 1)))[0]
        return found.repeat(-(-batch_size // few), 1, 1, 1)[:batch_size]

    def loader(self, batch_size: int, batches: int = 4) -> Any:
        assert self.images is not None
        return self.images.loader(self.model, batch_size, batches)

"""Networks prepared for a benchmark: converted by a method, fitted on a few images, frozen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ltm.api import (
    conversion_of,
    fit_,
    freeze_,
    image_size_of,
    is_merging,
    merging_copy,
    token_counts,
    unmerged_copy,
)
from ltm.evaluation.images import load_batches, repeated_images
from ltm.evaluation.latency import BASE, Candidate, noise
from ltm.evaluation.measurement import mean_gmacs, varies
from ltm.evaluation.reference_tome import ReferenceToMe
from ltm.evaluation.settings import BenchmarkSettings
from ltm.methods import MethodConfig
from ltm.models import method_config, num_classes_of, require_method

PUBLISHED_TOME = "tome-reference"
"""ToMe's published algorithm in plain torch, on plain ViTs: in benchmarks only."""

SAVED = "saved"
"""The method's name of a network that merges already."""

_SAMPLE, _COUNTED = 16, 8
"""Images that methods are fitted on, and images on which multiply-adds are counted."""
_BATCHES = 4
"""Batches that one call goes through, end to end."""
_VARYING = "fitted on the timed images; batches padded to the longest image, masked when compiled"


def check_methods(methods: Sequence[str], ratio: float) -> None:
    """Refuse what is no method, before anything is made."""
    for method in methods:
        require_method(method, PUBLISHED_TOME)
        config_of(method, ratio)


def config_of(method: str, ratio: float) -> MethodConfig:
    """The config of a method; the published ToMe has that of ours."""
    ours = PUBLISHED_TOME.removesuffix("-reference")
    return method_config(method.replace(PUBLISHED_TOME, ours, 1), ratio)


def merging_candidate(
    model: nn.Module, method: str, ratio: float, images: Tensor, *, training: bool = False
) -> Candidate:
    """A copy of the untouched `model`, merging: as it is deployed, or as it is trained.

    It is fitted on `images`: informative weights get class statistics of random labels, so that
    they cost what they do after training; a ratio that holds as a mean holds on these images.
    """
    if method.partition(":")[0] == PUBLISHED_TOME:
        return _published_tome(model, method, ratio, images)
    config = method_config(method, ratio)
    model = merging_copy(model, config, (images.shape[-2], images.shape[-1]))
    few = images[:_SAMPLE]
    labels = torch.arange(len(few)) % num_classes_of(model)
    fit_(model, [(few, labels)], tolerance=0.02)
    cost = mean_gmacs(model, lambda: images[:_COUNTED])
    if not training:
        freeze_(model)
    note = _VARYING if varies(model) else ""
    return Candidate(method=method, model=model, ratio=config.ratio, gmacs=cost, note=note)


def _published_tome(model: nn.Module, method: str, ratio: float, images: Tensor) -> Candidate:
    """As many tokens leave in each block as with our ToMe at the same ratio."""
    config = config_of(method, ratio)
    ours = merging_copy(model, config)
    counts = [conversion_of(ours).sites[0].num_in, *token_counts(ours)]
    pairs = pairwise(count for count in counts if isinstance(count, int))
    published = ReferenceToMe(unmerged_copy(model), [before - after for before, after in pairs])
    return Candidate(
        method=PUBLISHED_TOME,
        model=published,
        ratio=config.ratio or ratio,
        gmacs=mean_gmacs(published, lambda: images),
        note="published algorithm in plain torch, fused attention",
    )


class Candidates:
    """One network's candidates, each made when it is first needed.

    A network that merges already is compared with itself without merging. `images` is the data
    set of the settings.
    """

    def __init__(
        self,
        model: nn.Module,
        methods: Sequence[str],
        ratio: float,
        settings: BenchmarkSettings,
        images: Any = None,
    ) -> None:
        self.model, self.ratio, self.settings, self.images = model, ratio, settings, images
        self.saved = is_merging(model)
        self.methods = [SAVED] if self.saved else list(methods)
        self.image_size = image_size_of(model)
        self._made: dict[tuple[str, bool], Candidate] = {}

    def candidate(self, method: str, *, training: bool) -> Candidate:
        """A candidate; a ValueError says why it cannot be made."""
        key = method, training
        if key not in self._made:
            self._made[key] = self._make(method, training)
        return self._made[key]

    def _make(self, method: str, training: bool) -> Candidate:
        images = self.batch(_SAMPLE).to(next(self.model.parameters()).device)
        if method not in (BASE, SAVED):
            return merging_candidate(self.model, method, self.ratio, images, training=training)
        model = unmerged_copy(self.model) if self.saved and method == BASE else self.model
        cost = mean_gmacs(model, lambda: images[:_COUNTED])
        return Candidate(method=method, model=model, gmacs=cost)

    def batch(self, batch_size: int) -> Tensor:
        """Images to run on: real ones, repeated where there are too few, or noise."""
        if self.images is None:
            return noise(self.model, batch_size, self.image_size)
        return repeated_images(self.images, str(self.settings.data), self.model, batch_size)

    def loader(self, batch_size: int) -> Any:
        """A few full batches of the data set, as often as asked for."""
        number, source = len(self.images), str(self.settings.data)
        whole = min(_BATCHES, number // batch_size) * batch_size
        if whole == 0:
            raise ValueError(f"{source} has {number} images, fewer than {batch_size}")
        few, workers = self.images.take(whole), self.settings.workers
        return load_batches(
            few, source, self.model, batch_size=batch_size, workers=workers, labelled=False
        )

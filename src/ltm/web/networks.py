"""The networks of the page, those of the package (`ltm.zoo`) and the user's, and merging copies.

Merging copies are made when they are asked for, and a few of them are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import timm
import torch
from torch import Tensor, nn

from ltm.adapters import select_adapter
from ltm.adapters.base import Layout
from ltm.api import (
    conversion_of,
    fit_,
    image_size_of,
    is_merging,
    merging_copy,
    report,
    unmerged_copy,
)
from ltm.core.cost import meta_copy
from ltm.data.config import DataConfig
from ltm.data.datasets import open_dataset
from ltm.data.shapes import Picture
from ltm.data.transforms import ImageSpec
from ltm.deployment.information import known_about
from ltm.deployment.settings import InputSettings
from ltm.evaluation.images import expected_images, open_images, sample_images
from ltm.methods import MethodConfig, methods
from ltm.models import ModelSource, name_of, num_classes_of
from ltm.zoo import DEMO_CLASSES, DEMO_DATA, DEMO_MODELS

SAVED = "as saved"
KEPT = 12
"""Merging copies that are kept; they share their weights with the original."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ShownNetwork:
    """A network that merges nothing yet, its images and its classes."""

    name: str
    model: nn.Module
    spec: ImageSpec
    class_names: tuple[str, ...]
    sample: Tensor | None = None
    """Images of the kind it was trained on, for methods that are fitted on some."""
    saved: nn.Module | None = None
    """A merging network as it was saved."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that can be chosen for it."""
        known = [
            config.title
            for config in methods().values()
            if self.sample is not None or not config(ratio=0.5).needs_images()
        ]
        return (*((SAVED,) if self.saved is not None else ()), *known)

    @property
    def own_method(self) -> str | None:
        """The method of a saved network, if another ratio can be chosen for it."""
        title = None if self.saved is None else conversion_of(self.saved).config.title
        return title if title in self.methods else None

    def config(self, method: str, ratio: float) -> MethodConfig:
        """A method at a ratio, with its saved settings or the default ones."""
        if self.saved is not None and method == self.own_method:
            return conversion_of(self.saved).config.scheduled(ratio=ratio)
        return next(kind for kind in methods().values() if kind.title == method)(ratio=ratio)

    @cached_property
    def saved_share(self) -> float:
        """Share of the multiply-adds that the saved network needs."""
        return 1.0 if self.saved is None else report(self.saved).share

    @cached_property
    def layout(self) -> Layout:
        """Its blocks, and the tokens that flow through them."""
        shadow = meta_copy(self.model)
        return select_adapter(shadow).layout(shadow, self.spec.size)


def own_network(model: nn.Module, source: ModelSource, given: InputSettings) -> ShownNetwork:
    """The user's own network, with what is known about its images and classes."""
    known = known_about(model, given, run=source.run)
    return as_network(name_of(source), model, known.spec, known.class_names)


def as_network(
    name: str,
    model: nn.Module,
    spec: ImageSpec,
    class_names: tuple[str, ...] | None,
    sample: Tensor | None = None,
) -> ShownNetwork:
    """A network for the page, converted or not."""
    names = class_names or tuple(f"class {index}" for index in range(num_classes_of(model)))
    saved, original = None, model
    if is_merging(model):
        saved, original = model.eval(), unmerged_copy(model, share_weights=True)
    return ShownNetwork(
        name=name,
        model=original.eval(),
        spec=spec,
        class_names=names,
        sample=sample,
        saved=saved,
    )


class Networks:
    """The networks of a page by name, and their merging copies; threads may share it."""

    def __init__(self, by_name: Mapping[str, ShownNetwork], kept: int = KEPT) -> None:
        self.by_name = by_name
        self._lock = threading.Lock()
        self._made = lru_cache(kept)(self._make)

    def merging(self, name: str, method: str, ratio: float) -> nn.Module:
        """A merging copy; a ratio that cannot be met is a ValueError."""
        network = self[name]
        if method not in network.methods:
            raise ValueError(f"method: got {method}; known are {', '.join(network.methods)}.")
        if method == SAVED and network.saved is not None:
            return network.saved
        with self._lock:
            return self._made(name, method, round(ratio, 3))

    @torch.no_grad()
    def _make(self, name: str, method: str, ratio: float) -> nn.Module:
        network = self[name]
        config = network.config(method, ratio)
        size = image_size_of(network.model, network.spec.size)
        model = merging_copy(network.model, config, size, share_weights=True)
        if network.sample is not None and config.needs_images():
            fit_(model, network.sample, tolerance=0.03)
        return model

    def __getitem__(self, name: str) -> ShownNetwork:
        if name not in self.by_name:
            raise ValueError(f"model: got {name}; known are {', '.join(self.by_name)}.")
        return self.by_name[name]


# --- Networks that come with the package ---------------------------------------------------------

_SAMPLE = 16
"""Images for methods that are fitted on some."""


def embedded_title(name: str) -> str:
    """The name of an embedded network on the page: it knows shapes, not photographs."""
    return f"{name} (generated shapes)"


def embedded_network(name: str) -> ShownNetwork:
    """A network of the package, by its name in timm's registry."""
    if name not in DEMO_MODELS:
        raise ValueError(f"embedded is {name}: known are {', '.join(DEMO_MODELS)}")
    model = timm.create_model(name, pretrained=True).requires_grad_(False)
    spec = expected_images(model, DataConfig(source=DEMO_DATA))
    images = open_images(DEMO_DATA, "train")
    sample = sample_images(images, DEMO_DATA, model, _SAMPLE)
    return as_network(embedded_title(name), model, spec, images.class_names, sample)


def embedded_pictures(number: int) -> list[Picture]:
    """Pictures of the kind that the embedded networks know; they were not trained on these."""
    images = open_dataset(DEMO_DATA, split="test")
    # Neighbours differ in class, and these in shape and texture too.
    chosen = [index * (DEMO_CLASSES // 2 + 1) for index in range(number)]
    found = (images[index] for index in chosen)
    return [Picture(images.class_names[label], image) for image, label in found]

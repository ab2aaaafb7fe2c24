"""The networks of the page: those that come with the package, one's own, and their merging copies.

The embedded ones are small, trained on generated shapes, and kept in half precision;
`reproduction/benchmarks/embedded_networks.py` trains them anew. Merging copies are made when they
are asked for, and a few of them are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ltm.adapters import select_adapter
from ltm.adapters.base import Layout
from ltm.api import fit_, image_size_of, is_merging, merging_copy, unmerged_copy
from ltm.core.cost import meta_copy
from ltm.data.config import DataConfig
from ltm.data.shapes import ShapesClassification
from ltm.data.transforms import ImageSpec, evaluation_transform, image_spec
from ltm.deployment.information import known_about
from ltm.deployment.settings import InputSettings
from ltm.methods import methods
from ltm.models import ModelSource, name_of, num_classes_of

SAVED = "as saved"
_FITTED = 32
"""Images on which a method is fitted that meets its ratio as a mean."""
KEPT = 12
"""Merging copies that are kept; they share their weights with the original."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ShownNetwork:
    """A network that merges nothing yet, and what it takes and says."""

    name: str
    model: nn.Module
    spec: ImageSpec
    class_names: tuple[str, ...]
    sample: Tensor | None = None
    """Images of the kind it was trained on: for class statistics and thresholds."""
    saved: nn.Module | None = None
    """A merging network as it was saved."""

    @property
    def methods(self) -> tuple[str, ...]:
        """What can be chosen for it."""
        known = [
            config.title
            for config in methods().values()
            if self.sample is not None or not config(ratio=0.5).needs_images()
        ]
        return (*((SAVED,) if self.saved is not None else ()), *known)

    @cached_property
    def layout(self) -> Layout:
        """Its blocks, and the tokens that flow through them."""
        shadow = meta_copy(self.model)
        return select_adapter(shadow).layout(shadow, self.spec.size)


def own_network(model: nn.Module, source: ModelSource, given: InputSettings) -> ShownNetwork:
    """A network that somebody brought, with what is known about its images and classes."""
    known = known_about(model, given, run=source.run)
    return as_network(name_of(source), model, known.spec, known.class_names)


def as_network(
    name: str,
    model: nn.Module,
    spec: ImageSpec,
    class_names: tuple[str, ...] | None,
    sample: Tensor | None = None,
) -> ShownNetwork:
    """A network of one's own, converted or not."""
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
        config = next(kind for kind in methods().values() if kind.title == method)(ratio=ratio)
        size = image_size_of(network.model, network.spec.size)
        model = merging_copy(network.model, config, size, share_weights=True)
        if network.sample is not None:
            number = _FITTED if config.needs_images() else len(network.sample)
            fit_(model, network.sample[:number], tolerance=0.03)
        return model

    def __getitem__(self, name: str) -> ShownNetwork:
        if name not in self.by_name:
            raise ValueError(f"model: got {name}; known are {', '.join(self.by_name)}.")
        return self.by_name[name]

    @property
    def num_kept(self) -> int:
        return self._made.cache_info().currsize


# --- Networks that come with the package ---------------------------------------------------------

SIDE, CLASSES = 96, 20
_SAMPLE = 64
"""Images for class statistics and thresholds."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """timm's name of a network, and the arguments that make it small."""

    model: str
    arguments: Mapping[str, Any]

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments as settings of a training write them."""
        return tuple(f"{name}={value}".replace(" ", "") for name, value in self.arguments.items())


EMBEDDED = {
    "ViT": Architecture(
        model="vit_tiny_patch16_224",
        arguments={
            "img_size": SIDE,
            "patch_size": 8,
            "embed_dim": 64,
            "depth": 6,
            "num_heads": 2,
        },
    ),
    "Swin": Architecture(
        model="swin_tiny_patch4_window7_224",
        arguments={
            "img_size": SIDE,
            "patch_size": 4,
            "window_size": 6,
            "embed_dim": 32,
            "depths": (2, 2),
            "num_heads": (2, 4),
        },
    ),
}
"""By short names."""


def embedded_title(name: str) -> str:
    """What the page calls an embedded network: it knows shapes, not photographs."""
    return f"{name} (generated shapes)"


def weights_path(name: str) -> Path:
    """Where the package keeps a network's weights."""
    return Path(__file__).with_name("weights") / f"{name.lower()}.safetensors"


def embedded_network(name: str) -> ShownNetwork:
    """A network of the package, by its short name."""
    if name not in EMBEDDED:
        raise ValueError(f"embedded is {name}: known are {', '.join(EMBEDDED)}")
    found = EMBEDDED[name]
    model = timm.create_model(found.model, num_classes=CLASSES, **found.arguments)
    weights = load_file(weights_path(name))
    model.load_state_dict({key: value.float() for key, value in weights.items()}, strict=True)
    spec = image_spec(DataConfig(source="shapes"), model)
    transform = evaluation_transform(spec, normalize=True)
    images = ShapesClassification("train", _SAMPLE, SIDE, CLASSES, transform=transform)
    sample = torch.stack([images[index][0] for index in range(len(images))])
    names = tuple(images.class_names)
    return as_network(embedded_title(name), model.requires_grad_(False), spec, names, sample)

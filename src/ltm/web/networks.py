"""Networks to look at, and their merging copies: made when asked for, a few of them kept."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ltm.api import (
    fit_,
    image_size_of,
    is_merging,
    merge_tokens_,
    unmerge_tokens_,
)
from ltm.data.transforms import ImageSpec
from ltm.methods import MethodConfig, methods

SAVED = "as saved"
_FITTED = 32
"""Images on which a method is fitted that meets its ratio as a mean."""
KEPT = 12
"""Merging copies that are kept; they share their weights with the original."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Network:
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


def as_network(
    name: str,
    model: nn.Module,
    spec: ImageSpec,
    class_names: tuple[str, ...] | None,
    sample: Tensor | None = None,
) -> Network:
    """A network of one's own, converted or not."""
    number = int(getattr(model, "num_classes", 0) or 0)
    if number == 0:
        raise ValueError("model: it has no classes to predict; take one with a head")
    names = class_names or tuple(f"class {index}" for index in range(number))
    saved = model.eval() if is_merging(model) else None
    original = model.eval()
    if saved is not None:
        original = sharing_copy(saved)
        unmerge_tokens_(original)
    return Network(
        name=name, model=original, spec=spec, class_names=names, sample=sample, saved=saved
    )


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy that shares all weights: merging changes what a network does, not what it knows."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


@dataclass(eq=False)
class Gallery:
    """The networks of a page, by name. Safe to ask from several threads."""

    networks: Mapping[str, Network]
    kept: int = KEPT
    _made: OrderedDict[tuple[str, str, float], nn.Module] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def merging(self, name: str, method: str, ratio: float) -> nn.Module:
        """A merging copy; a ratio that cannot be met is a ValueError."""
        network = self[name]
        if method not in network.methods:
            raise ValueError(f"method: got {method}; known are {', '.join(network.methods)}.")
        if method == SAVED and network.saved is not None:
            return network.saved
        key = name, method, round(ratio, 3)
        with self._lock:
            if key not in self._made:
                self._made[key] = _merging_copy(network, _titled(method)(ratio=key[2]))
            self._made.move_to_end(key)
            while len(self._made) > self.kept:
                self._made.popitem(last=False)
            return self._made[key]

    def __getitem__(self, name: str) -> Network:
        if name not in self.networks:
            raise ValueError(f"model: got {name}; known are {', '.join(self.networks)}.")
        return self.networks[name]

    @property
    def num_kept(self) -> int:
        return len(self._made)


@torch.no_grad()
def _merging_copy(network: Network, config: MethodConfig) -> nn.Module:
    model = sharing_copy(network.model)
    merge_tokens_(model, config, image_size_of(model, network.spec.size))
    if network.sample is None:
        return model
    number = _FITTED if config.needs_images() else len(network.sample)
    fit_(model, network.sample[:number], tolerance=0.03)
    return model


def _titled(title: str) -> type[MethodConfig]:
    return next(config for config in methods().values() if config.title == title)

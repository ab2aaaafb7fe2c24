"""How a network is built, in a short word: what the shapes of its weights do not tell."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from torch import nn

from ltm.adapters.conversion import revert_
from ltm.api.conversion import is_merging
from ltm.core.cost import meta_copy

_TELLING = ("num_heads", "eps")
"""Settings that change outputs and no shape."""
# What rests in evaluation, or does nothing.
_IDLE = ("Identity", "Dropout", "Dropout1d", "Dropout2d", "DropPath", "PatchDropout")


def fingerprint(model: nn.Module) -> str:
    """A hash of the place, kind and telling settings of every layer, before any conversion."""
    shadow = meta_copy(model)
    if is_merging(shadow):
        revert_(shadow)
    layers = sorted(_layers(shadow, ""))
    return hashlib.sha256(json.dumps(layers).encode()).hexdigest()[:16]


def _layers(module: nn.Module, path: str) -> Iterator[tuple[str, str, str]]:
    children = list(module.named_children())
    # Blocks are told by what they hold: versions of timm name them differently.
    kind = "" if children else _kind(module)
    settings = " ".join(f"{n}={getattr(module, n)}" for n in _TELLING if hasattr(module, n))
    if kind not in _IDLE and (kind or settings):
        yield path, kind, settings
    for name, child in children:
        yield from _layers(child, f"{path}.{name}")


def _kind(module: nn.Module) -> str:
    """The name of a layer's class, torch's own where it derives from one."""
    kinds = type(module).__mro__
    known = (kind for kind in kinds if kind.__module__.startswith("torch.nn.modules"))
    found = next(known)
    return type(module).__name__ if found is nn.Module else found.__name__

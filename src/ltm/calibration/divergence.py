"""How far a network's outputs are from the original's, image by image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, cat

Divergence = Callable[[Any, Any], Float[Tensor, "b"]]
"""Of outputs from the original's outputs on the same images."""


def kl_divergence(logits: Float[Tensor, "b c"], original: Float[Tensor, "b c"]) -> Tensor:
    """`KL(original || merged)` of the class probabilities, in nats."""
    return F.kl_div(
        logits.float().log_softmax(-1),
        original.float().log_softmax(-1),
        reduction="none",
        log_target=True,
    ).sum(-1)


def cosine_distance(features: Any, original: Any) -> Tensor:
    """One less the cosine of features, or of all feature maps of a network side by side."""
    return 1 - F.cosine_similarity(_flat(features), _flat(original), dim=1)


def _flat(features: Tensor | Sequence[Tensor]) -> Float[Tensor, "b d"]:
    maps = [features] if isinstance(features, Tensor) else features
    return cat([one.float().flatten(1) for one in maps], dim=1)


def choose_divergence(num_classes: int, outputs: Any) -> Divergence:
    """KL divergence where there are classes, cosine distance of features where there are none."""
    scores = isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] == num_classes
    return kl_divergence if scores and num_classes > 1 else cosine_distance

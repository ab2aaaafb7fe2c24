"""SAViT, as we read it: one importance for all components, weighed by what they cost.

The paper ranks the structures of different components together, by a second-order Taylor estimate
of the loss that their removal adds, per cost that it saves. Here the structures are the hidden
channels of all MBConv blocks, the estimate is half the squared gradient of a channel's gate (the
Fisher approximation of its curvature), and the cost is its MACs.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltm.core.cost import evaluating
from reproduction.pruning.channels import (
    LEAST,
    Hiddens,
    find_hiddens,
    gated,
    remove_channels_,
)


def savit_(
    model: nn.Module,
    batches: Any,
    share: float,
    *,
    image_size: tuple[int, int],
    steps: int,
    lr: float,
) -> None:
    """Prune a network to a share of its MACs; `batches` are for importances, nothing trains."""
    del lr
    hiddens = find_hiddens(model, image_size)
    hiddens.excess(share)
    scores = importances(model, hiddens, batches, steps)
    remove_channels_(model, choose(scores, hiddens, share), image_size)


def importances(model: nn.Module, hiddens: Hiddens, batches: Any, steps: int) -> dict[str, Tensor]:
    """Mean squared gradient of every gate over batches, halved: the loss that removal adds."""
    with gated(model, hiddens) as gates, evaluating(model):
        sums = {name: torch.zeros_like(gate) for name, gate in gates.items()}
        count = 0
        for images, labels in islice(iter(batches), steps):
            loss = F.cross_entropy(model(images), labels)
            gradients = torch.autograd.grad(loss, list(gates.values()))
            for name, gradient in zip(gates, gradients, strict=True):
                sums[name] += gradient.square()
            count += 1
    if count == 0:
        raise ValueError("batches: importances need at least one")
    return {name: total / (2 * count) for name, total in sums.items()}


def choose(scores: dict[str, Tensor], hiddens: Hiddens, share: float) -> dict[str, Tensor]:
    """Channels to keep: the least important per MAC go first, wherever they are."""
    excess = hiddens.excess(share)
    keep = {block.name: torch.ones(block.count, dtype=torch.bool) for block in hiddens.blocks}
    left = {block.name: block.count for block in hiddens.blocks}
    ranked = sorted(
        (float(score) / block.macs, block.name, place, block.macs)
        for block in hiddens.blocks
        for place, score in enumerate(scores[block.name].tolist())
    )
    for _, name, place, macs in ranked:
        if excess <= 0:
            break
        if left[name] > LEAST:
            keep[name][place] = False
            left[name] -= 1
            excess -= macs
    return keep

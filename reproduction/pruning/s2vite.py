"""S2ViTE, as we read it: structured sparse training, in which channels leave and come back.

The paper trains under a fixed structured sparsity and from time to time drops the structures of
least Taylor importance and grows those with the largest gradient. Here the structures are the
hidden channels of MBConv blocks, every block keeps the same share of them, and the network trains
on under its masks before the masked channels are taken away for good.
"""

from __future__ import annotations

from itertools import chain, islice, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduction.pruning.channels import (
    LEAST,
    Hiddens,
    find_hiddens,
    gated,
    remove_channels_,
)

_UPDATES = 10
"""Times that channels are exchanged."""
_EXCHANGED = 0.1
"""Share of the kept channels that is exchanged at first; it falls to nothing."""


def s2vite_(
    model: nn.Module,
    batches: Any,
    share: float,
    *,
    image_size: tuple[int, int],
    steps: int,
    lr: float,
) -> None:
    """Train a network under exchanging masks, then prune it to a share of its MACs."""
    hiddens = find_hiddens(model, image_size)
    counts = kept_counts(hiddens, share)
    with gated(model, hiddens) as gates:
        _start(model, gates, counts)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        every = max(1, steps // _UPDATES)
        sums = {name: torch.zeros_like(gate) for name, gate in gates.items()}
        model.train()
        endless = chain.from_iterable(repeat(batches))
        for step, (images, labels) in enumerate(islice(endless, steps), 1):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            for gate in gates.values():
                gate.grad = None
            loss.backward()
            optimizer.step()
            for name, gate in gates.items():
                assert gate.grad is not None
                sums[name] += gate.grad.abs()
            if step % every == 0:
                share_left = _EXCHANGED * (1 - step / steps)
                exchange_(gates, sums, counts, share_left)
        keep = {name: (gate.detach() > 0).cpu() for name, gate in gates.items()}
    remove_channels_(model, keep, image_size)


def kept_counts(hiddens: Hiddens, share: float) -> dict[str, int]:
    """Channels that each block keeps: the same share of them in all."""
    total = sum(block.count * block.macs for block in hiddens.blocks)
    kept = 1 - hiddens.excess(share) / total
    return {
        block.name: max(min(LEAST, block.count), int(block.count * kept))
        for block in hiddens.blocks
    }


@torch.no_grad()
def _start(model: nn.Module, gates: dict[str, nn.Parameter], counts: dict[str, int]) -> None:
    """Keep the channels with the largest weights."""
    for name, gate in gates.items():
        weight: Any = model.get_submodule(f"{name}.inverted_conv.conv").weight
        largest = weight.flatten(1).norm(dim=1).topk(counts[name]).indices
        gate.zero_()
        gate[largest] = 1.0


@torch.no_grad()
def exchange_(
    gates: dict[str, nn.Parameter], sums: dict[str, Tensor], counts: dict[str, int], share: float
) -> None:
    """Drop the kept channels of least importance, grow as many with the largest gradient."""
    for name, gate in gates.items():
        kept = gate > 0
        number = min(int(share * counts[name]), int((~kept).sum()))
        if number:
            drop = sums[name].masked_fill(~kept, torch.inf).topk(number, largest=False).indices
            grow = sums[name].masked_fill(kept, -torch.inf).topk(number).indices
            gate[drop] = 0.0
            gate[grow] = 1.0
        sums[name].zero_()

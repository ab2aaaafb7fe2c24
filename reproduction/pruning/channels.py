"""Hidden channels of MBConv blocks: their gates, what each costs, and their removal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.efficientvit_mit import MBConv
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ltm.core.cost import meta_copy, meta_images, run_on_meta
from ltm.extras import require

LEAST = 4
"""Channels that every block keeps."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Hidden:
    """The hidden channels of one block: how many, and the MACs that each of them costs."""

    name: str
    count: int
    macs: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Hiddens:
    """All blocks of a network whose hidden channels can go, and the MACs of the whole."""

    blocks: tuple[Hidden, ...]
    macs: int

    def excess(self, share: float) -> float:
        """MACs that have to go; a ValueError where hidden channels alone cannot do it."""
        most = sum((block.count - min(LEAST, block.count)) * block.macs for block in self.blocks)
        wanted = (1 - share) * self.macs
        if wanted > most:
            floor = 1 - most / self.macs
            raise ValueError(f"share is {share}: hidden channels alone reach {floor:.3f}")
        return wanted


def find_hiddens(model: nn.Module, image_size: tuple[int, int]) -> Hiddens:
    """Look at a network's MBConv blocks; a ValueError where it has none."""
    shadow = meta_copy(model)
    with FlopCounterMode(display=False, depth=100) as counter:
        run_on_meta(shadow, meta_images(shadow, image_size))
    counts: dict[str, Any] = counter.get_flop_counts()
    root = type(shadow).__name__
    blocks = []
    for name, module in model.named_modules():
        if isinstance(module, MBConv):
            hidden: Any = module.depth_conv.conv
            macs = sum(counts[f"{root}.{name}"].values()) / 2
            width = int(hidden.out_channels)
            blocks.append(Hidden(name=name, count=width, macs=macs / width))
    if not blocks:
        raise ValueError("model: it has no MBConv blocks, which the pruning peers work on")
    return Hiddens(blocks=tuple(blocks), macs=counter.get_total_flops() // 2)


@contextmanager
def gated(model: nn.Module, hiddens: Hiddens) -> Iterator[dict[str, nn.Parameter]]:
    """A gate on every hidden channel, by block; a gate's gradient is the channel's Taylor term.

    Gates are last before the projection: a closed one is the same as no channel.
    """
    device = next(model.parameters()).device
    gates = {
        block.name: nn.Parameter(torch.ones(block.count, device=device)) for block in hiddens.blocks
    }
    hooks = [
        model.get_submodule(f"{name}.depth_conv").register_forward_hook(_multiply(gate))
        for name, gate in gates.items()
    ]
    try:
        yield gates
    finally:
        for hook in hooks:
            hook.remove()


def _multiply(gate: nn.Parameter) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return output * gate[:, None, None]

    return hook


def remove_channels_(
    model: nn.Module, keep: dict[str, Tensor], image_size: tuple[int, int]
) -> None:
    """Take hidden channels away for good, with torch-pruning's dependency graph."""
    pruning = require("torch_pruning")
    device = next(model.parameters()).device
    example = torch.zeros(2, 3, *image_size, device=device)
    model.eval()
    graph = pruning.DependencyGraph().build_dependency(model, example_inputs=example)
    for name, kept in keep.items():
        gone = (~kept).nonzero()[:, 0].tolist()
        if gone:
            conv = model.get_submodule(f"{name}.inverted_conv.conv")
            graph.get_pruning_group(conv, pruning.prune_conv_out_channels, idxs=gone).prune()

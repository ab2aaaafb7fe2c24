"""A control: as many tokens merge in the same blocks, but which ones is drawn at random.

If a method keeps more accuracy than this, the choice of tokens matters on the task.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ltm.core.merge import MatchedMerge, token_sizes
from ltm.methods.base import Decision, Hints, Merger, Site


class _RandomMerger(Merger):
    """Every token that stays is joined by tokens drawn at random, anew for every image."""

    def __init__(self, site: Site, seed: int) -> None:
        super().__init__(site)
        self.generator = torch.Generator().manual_seed(seed + site.block)

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        batch, prefix, kept = len(tokens), self.site.num_prefix, hints.num_out
        drawn = torch.rand(batch, tokens.shape[1] - prefix, generator=self.generator)
        places = drawn.argsort(1).remainder(kept).to(tokens.device) + prefix
        prefix_places = torch.arange(prefix, device=tokens.device).expand(batch, -1)
        merge = MatchedMerge(
            assignment=torch.cat([prefix_places, places], 1),
            weight=token_sizes(tokens, hints.size),
            num_places=prefix + kept,
            num_prefix=prefix,
        )
        return Decision(merge=merge)


def merge_at_random_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Let a converted sequence network merge tokens at random, by its own schedule, in place."""
    block: Any
    for block in model.modules():
        merger = getattr(block, "merger", None)
        if isinstance(merger, Merger):
            block.merger = _RandomMerger(merger.site, seed)
    return model

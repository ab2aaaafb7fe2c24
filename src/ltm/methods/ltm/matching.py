"""LTM with a matched support: per image, redundant tokens join, informative ones are protected."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ltm.core.matching import Match, match_most_similar, merge_in_order
from ltm.methods.base import Decision, Hints, token_size
from ltm.methods.ltm.step import LTMMerger, carried


class MatchingMerger(LTMMerger):
    """Per image, the most redundant tokens join their nearest, informative ones protected."""

    needs = frozenset({"keys", "importance"})

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        k = self.site.num_prefix
        match = self.match(tokens, hints)
        weight = size = token_size(tokens, hints)
        logits = hints.carry
        if self.informative is not None:
            labels = self.true_labels(hints)
            logits = self.informative(tokens[:, k:], size[:, k:], labels, hints.carry)
        if logits is not None:
            weight = torch.cat([size[:, :k], size[:, k:] * logits.exp()], dim=1)
        merge = merge_in_order(match, weight, keep_norm=self.config.keep_norm)
        return Decision(merge=merge, carry=None if logits is None else carried(merge, logits))

    def match(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Match:
        k = self.site.num_prefix
        num_leaving = tokens.shape[1] - k - hints.num_out
        metric = tokens if hints.keys is None else hints.keys
        penalty = None
        if hints.importance is not None:
            penalty = self.config.protection * relative_importance(hints.importance, k)
        return match_most_similar(metric, num_leaving, num_prefix=k, penalty=penalty)


def relative_importance(importance: Float[Tensor, "b t"], num_prefix: int) -> Float[Tensor, "b t"]:
    """Attention received over the mean of the patches; what is clearly above it counts alike."""
    patches = importance[:, num_prefix:]
    return (importance / patches.mean(dim=1, keepdim=True).clamp_min(1e-12)).clamp(max=1.5)

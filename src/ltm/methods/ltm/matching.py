"""LTM with a matched support: per image, redundant tokens join, informative ones are protected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from ltm.core import fused, operators
from ltm.core.groups import MatchedMerge
from ltm.core.matching import Match, merge_in_order
from ltm.methods.base import Decision, Hints, Site, token_size
from ltm.methods.ltm.harm import Patches, match_least_harm, match_unimportant
from ltm.methods.ltm.step import LTMMerger

if TYPE_CHECKING:
    from ltm.methods.ltm.config import LTM

Operator = Literal["merge", "norm", "prune_redundant", "prune_unimportant", "none"]
"""What happens to the tokens that leave a site:

merge: they join the token nearest to them, by a weighted mean.
norm: the same, and the merged token keeps the largest norm of its group.
prune_redundant: they are dropped; the token nearest to them stays as it is.
prune_unimportant: those that receive least attention are dropped, whatever they are like.
none: nothing leaves.
"""

OPERATORS: tuple[Operator, ...] = get_args(Operator)

_LEAST_SHARE = 1e-4
"""Attention below this part of an even share counts as this much, so that no weight vanishes."""


class MatchingMerger(LTMMerger):
    """Per image, the tokens whose merge does least harm leave."""

    def __init__(self, site: Site, config: LTM) -> None:
        super().__init__(site, config)
        self.operator = config.operator_at(site.block)
        self.protection = config.protection_at(site.block)
        if self.operator == "none":
            raise ValueError(
                f"operators: got 'none' for block {site.block}, where {site.num_in} tokens are to "
                f"become {site.num_out}."
            )
        if self.protection > 0:
            self.needs = frozenset({"importance"})

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        logits, weight = self.weigh(tokens, hints)
        return Decision(merge=self.merge(tokens, hints, weight), values=logits)

    def weigh(
        self, tokens: Float[Tensor, "b t c"], hints: Hints
    ) -> tuple[Float[Tensor, "_ n"] | None, Float[Tensor, "b t"] | None]:
        """The logits of the patches, and what every token weighs; None: as much as its size."""
        k, step, labels = self.site.num_prefix, self.informative, self.true_labels(hints)
        if step is not None and labels is None and step.has_kernel(tokens, hints.carry):
            return step.weigh(tokens, hints.size, hints.carry, k)
        logits = hints.carry
        if step is not None and step.active:
            logits = step(tokens[:, k:], token_size(tokens, hints)[:, k:], labels, hints.carry)
        if logits is None:
            return None, None
        size = token_size(tokens, hints)
        return logits, torch.cat([size[:, :k], size[:, k:] * logits.exp()], dim=1)

    def by_attention(self, weight: Float[Tensor, "b t"], hints: Hints) -> Float[Tensor, "b t"]:
        """Weights times the attention that each patch of a token receives, to a power.

        Attention is taken against an even share of it; only its ratios within a group matter.
        """
        power, received = self.config.attended, hints.importance
        if power == 0 or received is None:
            return weight
        k = self.site.num_prefix
        each = received.float() if hints.size is None else received / hints.size.clamp_min(1)
        share = each * each.shape[1]
        # What is no number counts least as well: who goes where has to be known in any case.
        factor = torch.where(share > _LEAST_SHARE, share, _LEAST_SHARE) ** power
        return torch.cat(
            [weight[:, :k].expand(factor.shape[0], -1), (weight * factor)[:, k:]], dim=1
        )

    def merge(
        self, tokens: Float[Tensor, "b t c"], hints: Hints, weight: Float[Tensor, "b t"] | None
    ) -> MatchedMerge:
        """The tokens that leave join, or are dropped; all others keep their order."""
        prune, keep_norm = self.operator.startswith("prune"), self.operator == "norm"
        if self.config.matching == "free" and fused.takes_match(tokens.detach()):
            return self._fused(tokens, hints, weight, prune, keep_norm)
        match, weight = self.match(tokens, hints), self._attended(tokens, hints, weight)
        return merge_in_order(match, weight, prune=prune, keep_norm=keep_norm)

    def _attended(self, tokens: Tensor, hints: Hints, weight: Tensor | None) -> Tensor:
        """What tokens weigh in the end, also where that has a gradient."""
        return self.by_attention(token_size(tokens, hints) if weight is None else weight, hints)

    def _fused(
        self, tokens: Tensor, hints: Hints, weight: Tensor | None, prune: bool, keep_norm: bool
    ) -> MatchedMerge:
        """Who leaves has no gradient: a kernel finds it in training too, but no weights then."""
        k, known = self.site.num_prefix, (hints.size, hints.importance, weight)
        num_leaving = tokens.shape[1] - k - hints.num_out
        size, attention, given = (x if x is None else x.detach() for x in known)
        assignment, stays, leaves, weighed = operators.assign(
            tokens.detach(), size, attention, given, num_leaving, k, self.protection,
            self.config.attended, _LEAST_SHARE, prune,
        )  # fmt: skip
        if not fused.takes(tokens.detach(), *known):
            weighed = self._attended(tokens, hints, weight)
            weighed = weighed.scatter(1, leaves.long(), 0.0) if prune else weighed
        return MatchedMerge(
            assignment=assignment,
            weight=weighed,
            num_places=k + hints.num_out,
            keep_norm=keep_norm,
            num_prefix=k,
            order=(stays, leaves),
        )

    def match(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Match:
        """Who leaves, and where to."""
        k = self.site.num_prefix
        num_leaving = tokens.shape[1] - k - hints.num_out
        attention = None if hints.importance is None else hints.importance[:, k:]
        size = None if hints.size is None else hints.size[:, k:]
        patches = Patches(tokens=tokens[:, k:], size=size, attention=attention)
        return match_least_harm(
            patches,
            num_leaving,
            protection=self.protection,
            alternate=self.config.matching == "alternate",
            num_prefix=k,
        )


class UnimportantMerger(MatchingMerger):
    """Per image, the tokens that receive least attention are dropped."""

    def __init__(self, site: Site, config: LTM) -> None:
        super().__init__(site, config)
        self.needs = frozenset({"importance"})

    def merge(
        self, tokens: Float[Tensor, "b t c"], hints: Hints, weight: Float[Tensor, "b t"] | None
    ) -> MatchedMerge:
        # Who stays is alone in its group: how much attention it receives changes nothing.
        weight = token_size(tokens, hints) if weight is None else weight
        return merge_in_order(self.match(tokens, hints), weight, prune=True)

    def match(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Match:
        k = self.site.num_prefix
        assert hints.importance is not None
        num_leaving = tokens.shape[1] - k - hints.num_out
        return match_unimportant(hints.importance[:, k:], num_leaving, num_prefix=k)

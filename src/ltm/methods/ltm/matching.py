"""LTM with a matched support: per image, redundant tokens join, informative ones are protected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from ltm.core.groups import MatchedMerge
from ltm.core.matching import Match, merge_in_order
from ltm.kernels import fused, operators
from ltm.methods.base import Decision, Hints, Site, token_size
from ltm.methods.ltm.harm import Patches, match_least_harm, match_unimportant
from ltm.methods.ltm.step import InformativeStep, LTMMerger

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
        self.prunes, self.keeps_norm = self.operator.startswith("prune"), self.operator == "norm"
        self.protection = config.protection_at(site.block)
        if self.operator == "none":
            raise ValueError(
                f"operators: got 'none' for block {site.block}, where {site.num_in} tokens are to "
                f"become {site.num_out}."
            )
        if self.protection > 0:
            self.needs = frozenset({"importance"})

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        step = self._kernel_step(tokens, hints)
        if step is not None and self.has_kernel(tokens, hints.size, hints.importance):
            known = tokens, hints.size, hints.importance, hints.carry, *step.for_kernels()
            *found, logits = operators.inform_and_assign(*known, *self._leaving(tokens, hints))
            return Decision(merge=self._in_order(found, hints), values=logits)
        logits, weight = self.weigh(tokens, hints)
        return Decision(merge=self.merge(tokens, hints, weight), values=logits)

    def has_kernel(self, tokens: Tensor, *others: Tensor | None) -> bool:
        """Whether a kernel finds who leaves, where to, and what everybody weighs."""
        return self.config.matching == "free" and fused.takes_match(tokens, *others)

    def _kernel_step(self, tokens: Tensor, hints: Hints) -> InformativeStep | None:
        """The informative step, where kernels can take it."""
        step = self.informative
        if step is None or self.true_labels(hints) is not None:
            return None
        return step if step.has_kernel(tokens, hints.carry) else None

    def weigh(
        self, tokens: Float[Tensor, "b t c"], hints: Hints
    ) -> tuple[Float[Tensor, "_ n"] | None, Float[Tensor, "b t"] | None]:
        """The logits of the patches, and what every token weighs; None: as much as its size."""
        k, step, logits = self.site.num_prefix, self._kernel_step(tokens, hints), hints.carry
        if step is not None:
            return step.weigh(tokens, hints.size, hints.carry, k)
        if self.informative is not None and self.informative.active:
            size, labels = token_size(tokens, hints)[:, k:], self.true_labels(hints)
            logits = self.informative(tokens[:, k:], size, labels, hints.carry)
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
        if self.has_kernel(tokens.detach()):
            return self._fused(tokens, hints, weight)
        match, weight = self.match(tokens, hints), self._attended(tokens, hints, weight)
        return merge_in_order(match, weight, prune=self.prunes, keep_norm=self.keeps_norm)

    def _attended(self, tokens: Tensor, hints: Hints, weight: Tensor | None) -> Tensor:
        """What tokens weigh in the end, also where that has a gradient."""
        return self.by_attention(token_size(tokens, hints) if weight is None else weight, hints)

    def _fused(self, tokens: Tensor, hints: Hints, weight: Tensor | None) -> MatchedMerge:
        """Who leaves has no gradient: a kernel finds it in training too, but no weights then."""
        known = hints.size, hints.importance, weight
        size, attention, given = (None if x is None else x.detach() for x in known)
        assignment, stays, leaves, weighed = operators.assign(
            tokens.detach(), size, attention, given, *self._leaving(tokens, hints)
        )
        if not fused.takes(tokens.detach(), *known):
            weighed = self._attended(tokens, hints, weight)
            if self.prunes:
                weighed = weighed.scatter(1, leaves.long(), 0.0)
        return self._in_order((assignment, stays, leaves, weighed), hints)

    def _leaving(self, tokens: Tensor, hints: Hints) -> tuple[int, int, float, float, float, bool]:
        """What kernels have to know of those that leave."""
        k, attended = self.site.num_prefix, self.config.attended
        num_leaving = tokens.shape[1] - k - hints.num_out
        return num_leaving, k, self.protection, attended, _LEAST_SHARE, self.prunes

    def _in_order(self, found: Sequence[Tensor], hints: Hints) -> MatchedMerge:
        """The merge that a kernel found."""
        assignment, stays, leaves, weighed = found
        return MatchedMerge(
            assignment=assignment,
            weight=weighed,
            num_places=self.site.num_prefix + hints.num_out,
            keep_norm=self.keeps_norm,
            num_prefix=self.site.num_prefix,
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

    def has_kernel(self, tokens: Tensor, *others: Tensor | None) -> bool:
        return False

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

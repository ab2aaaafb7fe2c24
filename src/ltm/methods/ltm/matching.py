"""LTM with a matched support: per image, redundant tokens join, informative ones are protected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from jaxtyping import Float
from torch import Tensor

from ltm import kernels
from ltm.core.matching import merge_in_order
from ltm.core.merge import MatchedMerge
from ltm.kernels.matching import match_unimportant
from ltm.methods.base import Decision, Hints, Site, token_size
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
        found = kernels.match(
            tokens,
            self.rule(tokens, hints),
            size=hints.size,
            attention=hints.importance,
            carry=hints.carry,
            step=self.step(hints),
        )
        merge = MatchedMerge(
            assignment=found.assignment,
            weight=found.weight,
            num_places=self.site.num_prefix + hints.num_out,
            keep_norm=self.keeps_norm,
            num_prefix=self.site.num_prefix,
            order=found.order,
        )
        return Decision(merge=merge, values=found.logits)

    def rule(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> kernels.Rule:
        """How many of the tokens leave, and by what rule."""
        k = self.site.num_prefix
        return kernels.Rule(
            num_leaving=tokens.shape[1] - k - hints.num_out,
            num_prefix=k,
            protection=self.protection,
            attended=self.config.attended,
            prune=self.prunes,
            alternate=self.config.matching == "alternate",
        )


class UnimportantMerger(MatchingMerger):
    """Per image, the tokens that receive least attention are dropped."""

    def __init__(self, site: Site, config: LTM) -> None:
        super().__init__(site, config)
        self.needs = frozenset({"importance"})

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        k = self.site.num_prefix
        assert hints.importance is not None
        num_leaving = tokens.shape[1] - k - hints.num_out
        match = match_unimportant(hints.importance[:, k:], num_leaving, num_prefix=k)
        logits, weight = kernels.weigh(tokens, hints.size, hints.carry, self.step(hints), k)
        # Who stays is alone in its group: how much attention it receives changes nothing.
        weight = token_size(tokens, hints) if weight is None else weight
        return Decision(merge=merge_in_order(match, weight, prune=True), values=logits)

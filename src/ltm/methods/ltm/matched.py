"""LTM with a matched support: per image, redundant tokens merge, informative ones are protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxtyping import Float
from torch import Tensor

from ltm.core.mask_gradient import weigh
from ltm.core.matching import Rule, match, match_unimportant, merge_in_order
from ltm.core.merge import token_sizes
from ltm.core.validation import Within, settle
from ltm.methods.base import Decision, Hints, Site
from ltm.methods.ltm.step import Informative, LTMMerger

Operator = Literal["merge", "norm", "prune_redundant", "prune_unimportant", "none"]
"""What happens to the tokens that leave a site:

merge: each joins its nearest token by a weighted mean.
norm: the same, and the merged token keeps the largest norm of its group.
prune_redundant: tokens close to another are dropped; the other stays as it is.
prune_unimportant: the tokens that receive least attention are dropped, however unique they are.
none: no token leaves.
"""
_Power = Annotated[float, Within(0, 8)]
"""Larger powers of attention exceed the range of single precision."""
_COSTLY = 0.1
"""The share of a block's multiply-adds above which "auto" does not compare all pairs."""


@dataclass(frozen=True)
class Choice:
    """What a site does, as calibration chooses it."""

    operator: Operator = "norm"
    protection: float = 1.0

    def __str__(self) -> str:
        protected = f", protection {self.protection:g}" if self.protection else ""
        return f"{self.operator}{protected}"


@dataclass(frozen=True, kw_only=True)
class Matched:
    """A support found per image: redundant tokens merge, informative ones are protected."""

    matching: Literal["free", "alternate", "auto"] = "free"
    """Which tokens may join which. free: any token any other. alternate: even-indexed tokens
    odd-indexed ones, a quarter of the comparisons. auto: "free" where that costs little, else
    "alternate"."""
    protection: _Power = 1.0
    """How strongly informative tokens are kept from leaving: the power of the attention they
    receive."""
    attended: _Power = 0.5
    """How much attention counts in the mean of matched tokens, at sites with protection: the power
    of the attention per patch. With 0 only the number of patches counts."""
    size_power: _Power = 0.9
    """The power of the token size in proportional attention, on sequences; a little less than 1
    stays closer to the original network."""
    keep_norm: bool = True
    """Merged tokens keep the largest norm of their group."""
    operators: tuple[Operator, ...] | None = None
    """What each site does with the tokens that leave it, in place of `keep_norm`: "merge", "norm",
    "prune_redundant", "prune_unimportant" or "none"."""
    protections: tuple[_Power, ...] | None = None
    """The protection of each site, in place of `protection`."""

    def __post_init__(self) -> None:
        settle(self)
        if self.size_power == 0:
            raise ValueError("size_power: got 0; proportional_attention=False ignores sizes.")


class MatchingMerger(LTMMerger):
    """In each image, merges the tokens whose merge does the least harm."""

    def __init__(
        self, site: Site, settings: Matched, weights: Informative | None, choice: Choice
    ) -> None:
        super().__init__(site, weights)
        self.settings, self.operator = settings, choice.operator
        self.alternate = settings.matching == "alternate" or (
            settings.matching == "auto" and _share_of_pairs(site) > _COSTLY
        )
        self.protection = choice.protection
        if self.operator == "none":
            raise ValueError(
                f"operators: got 'none' for block {site.block}, where {site.num_in} tokens are to "
                f"become {site.num_out}."
            )
        if self.protection > 0:
            self.needs = frozenset({"importance"})

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        rule = Rule(
            num_leaving=self.num_leaving(tokens, hints),
            num_prefix=self.site.num_prefix,
            protection=self.protection,
            attended=self.settings.attended,
            prune=self.operator == "prune_redundant",
            keep_norm=self.operator == "norm",
            alternate=self.alternate,
        )
        merge, logits = match(
            tokens,
            rule,
            size=hints.size,
            attention=hints.importance,
            carry=hints.carry,
            step=self.step(hints),
        )
        return Decision(merge=merge, values=logits)


def _share_of_pairs(site: Site) -> float:
    """MACs of comparing all pairs, `n^2 c`, over those of a block, `12 n c^2 + 2 n^2 c`."""
    return site.num_in / (12 * site.width + 2 * site.num_in)


class UnimportantMerger(MatchingMerger):
    """In each image, drops the tokens that receive the least attention."""

    needs = frozenset({"importance"})

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        k = self.site.num_prefix
        assert hints.importance is not None
        num_leaving = self.num_leaving(tokens, hints)
        found = match_unimportant(hints.importance[:, k:], num_leaving, num_prefix=k)
        logits, weight = weigh(tokens, hints.size, hints.carry, self.step(hints), k)
        # Every token that stays is alone in its group, so its attention makes no difference.
        weight = token_sizes(tokens, hints.size) if weight is None else weight
        return Decision(merge=merge_in_order(found, weight, prune=True), values=logits)

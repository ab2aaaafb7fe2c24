"""LTM with a matched support: per image, redundant tokens join, informative ones are protected."""

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

merge: they join the token nearest to them, by a weighted mean.
norm: the same, and the merged token keeps the largest norm of its group.
prune_redundant: they are dropped; the token nearest to them stays as it is.
prune_unimportant: those that receive least attention are dropped, whatever they are like.
none: nothing leaves.
"""
Power = Annotated[float, Within(0, 8)]
"""Larger powers of attention leave the range of single precision."""


_DEAR = 0.1
"""The share of a block's multiply-adds above which "auto" does not compare all pairs."""


@dataclass(frozen=True)
class Choice:
    """What a site does, as a calibration chooses it."""

    operator: Operator = "norm"
    protection: float = 1.0

    def __str__(self) -> str:
        protected = f", protection {self.protection:g}" if self.protection else ""
        return f"{self.operator}{protected}"


@dataclass(frozen=True, kw_only=True)
class Matched:
    """A support found per image: redundant tokens join, informative ones are protected."""

    matching: Literal["free", "alternate", "auto"] = "free"
    """Any token may join any other, or only even-indexed tokens odd-indexed ones: a quarter of the
    comparisons. "auto" compares all pairs at sites where that costs little, else two sides."""
    protection: Power = 1.0
    """How strongly informative tokens are kept from leaving: the power of the attention they
    receive."""
    attended: Power = 0.5
    """How much attention counts in the mean of matched tokens, at sites that protect: the power of
    what each of a token's patches receives; 0 counts patches alone."""
    size_power: Power = 0.9
    """The power of a token's size that the attention counts after a matching on sequences; a little
    less than 1 stays closer to the original network."""
    keep_norm: bool = True
    """Matched tokens keep the largest norm of their group."""
    operators: tuple[Operator, ...] | None = None
    """What each site does with the tokens that leave it, in place of `keep_norm`: "merge", "norm",
    "prune_redundant", "prune_unimportant" or "none"."""
    protections: tuple[Power, ...] | None = None
    """The protection of each site, in place of `protection`."""

    def __post_init__(self) -> None:
        settle(self)
        if self.size_power == 0:
            raise ValueError("size_power: got 0; proportional_attention=False ignores sizes.")


class MatchingMerger(LTMMerger):
    """Per image, the tokens whose merge does least harm leave."""

    def __init__(
        self, site: Site, settings: Matched, weights: Informative | None, choice: Choice
    ) -> None:
        super().__init__(site, weights)
        self.settings, self.operator = settings, choice.operator
        self.alternate = settings.matching == "alternate" or (
            settings.matching == "auto" and _share_of_pairs(site) > _DEAR
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
        k = self.site.num_prefix
        rule = Rule(
            num_leaving=tokens.shape[1] - k - hints.num_out,
            num_prefix=k,
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
    """Multiply-adds of all pairs, `n^2 c`, over those of a block, `12 n c^2 + 2 n^2 c`."""
    return site.num_in / (12 * site.width + 2 * site.num_in)


class UnimportantMerger(MatchingMerger):
    """Per image, the tokens that receive least attention are dropped."""

    needs = frozenset({"importance"})

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        k = self.site.num_prefix
        assert hints.importance is not None
        num_leaving = tokens.shape[1] - k - hints.num_out
        found = match_unimportant(hints.importance[:, k:], num_leaving, num_prefix=k)
        logits, weight = weigh(tokens, hints.size, hints.carry, self.step(hints), k)
        # Who stays is alone in its group: how much attention it receives changes nothing.
        weight = token_sizes(tokens, hints.size) if weight is None else weight
        return Decision(merge=merge_in_order(found, weight, prune=True), values=logits)

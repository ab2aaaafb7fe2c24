"""PiToMe: merge tokens of high energy, which are similar to many others (Tran et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ltm.core.matching import Match, merge_in_order
from ltm.core.merge import token_sizes
from ltm.core.schedule import constant_rate
from ltm.core.validation import Within
from ltm.methods.base import Decision, Hints, Merger, MethodConfig, Site


@dataclass(frozen=True, kw_only=True)
class PiToMe(MethodConfig):
    """Energy-based merging: tokens similar to many others are paired, the rest are protected."""

    margin: Annotated[float, Within(0, 1)] = 0.9
    """The similarity above which tokens attract each other in the first block; it falls linearly to
    0 over the depth."""
    alpha: Annotated[float, Within(0, 10)] = 1.0
    """How strongly less similar tokens repel each other."""

    name: ClassVar[str] = "pitome"
    description: ClassVar[str] = "tokens that are like many others pair up and become their mean"
    colour: ClassVar[str | None] = "#e69f00"
    marker: ClassVar[str | None] = "P"
    sequences_only: ClassVar[bool] = True

    def build(self, site: Site) -> Merger:
        return PiToMeMerger(site, self.margin * (1 - site.block / site.depth), self.alpha)

    def spread(
        self, strength: float, num_in: int, sites: tuple[int, ...], depth: int | None
    ) -> list[int]:
        return constant_rate(strength, num_in, len(sites))


class PiToMeMerger(Merger):
    """Of the tokens with the highest energy, merges every other one into the most similar rest."""

    needs = frozenset({"keys"})

    def __init__(self, site: Site, margin: float, alpha: float) -> None:
        super().__init__(site)
        self.margin, self.alpha = margin, alpha

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        assert hints.keys is not None
        k = self.site.num_prefix
        unit = torch.nn.functional.normalize(hints.keys[:, k:].float(), dim=-1)
        found = match_by_energy(
            unit @ unit.mT,
            self.num_leaving(tokens, hints),
            margin=self.margin,
            alpha=self.alpha,
            num_prefix=k,
        )
        return Decision(merge=merge_in_order(found, token_sizes(tokens, hints.size)))


def energy(similarity: Float[Tensor, "b n n"], margin: float, alpha: float) -> Float[Tensor, "b n"]:
    """Equation 4: the mean of `x - m` above the margin, of `alpha (exp(x - m) - 1)` below it."""
    return torch.nn.functional.elu(similarity - margin, alpha=alpha).mean(dim=-1)


def match_by_energy(
    similarity: Float[Tensor, "b n n"],
    num_leaving: int,
    *,
    margin: float,
    alpha: float,
    num_prefix: int = 0,
) -> Match:
    """Sort tokens by falling energy; of the first `2 num_leaving`, every other one leaves.

    Each joins the most similar of those in between. If more than half of the tokens leave, those
    with the highest energy do, and each may join any other.
    """
    order = energy(similarity, margin, alpha).argsort(dim=1, descending=True, stable=True)
    num_tokens = order.shape[1]
    pairs = 2 * num_leaving <= num_tokens
    leaving = order[:, : 2 * num_leaving : 2] if pairs else order[:, :num_leaving]
    taking = order[:, 1 : 2 * num_leaving : 2] if pairs else order[:, num_leaving:]
    absent = torch.zeros_like(order, dtype=torch.bool)
    leaves = absent.scatter(1, leaving, value=True)
    takes = absent.scatter(1, taking, value=True)
    target = similarity.masked_fill(~takes[:, None], -torch.inf).argmax(dim=-1)
    return Match.of_patches(leaves, target, num_leaving, num_prefix)

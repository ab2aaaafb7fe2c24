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
    protect_from: Annotated[float, Within(0, 1)] = 0.5
    """The share of the depth from which tokens of low energy are protected. Before it all tokens
    may pair up, and the most similar pairs merge, as in the authors' code."""

    name: ClassVar[str] = "pitome"
    description: ClassVar[str] = "tokens that are like many others pair up and become their mean"
    colour: ClassVar[str | None] = "#e69f00"
    marker: ClassVar[str | None] = "P"
    sequences_only: ClassVar[bool] = True

    def build(self, site: Site) -> Merger:
        margin = self.margin * (1 - site.block / site.depth)
        protects = site.block >= self.protect_from * site.depth
        return PiToMeMerger(site, margin, self.alpha, protects=protects)

    def spread(
        self, strength: float, num_in: int, sites: tuple[int, ...], depth: int | None
    ) -> list[int]:
        return constant_rate(strength, num_in, len(sites))


class PiToMeMerger(Merger):
    """Of the tokens with the highest energy, merges every other one into the most similar rest."""

    needs = frozenset({"keys"})

    def __init__(self, site: Site, margin: float, alpha: float, *, protects: bool) -> None:
        super().__init__(site)
        self.margin, self.alpha, self.protects = margin, alpha, protects

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        assert hints.keys is not None
        k = self.site.num_prefix
        unit = torch.nn.functional.normalize(hints.keys[:, k:].float(), dim=-1)
        found = match_by_energy(
            unit @ unit.mT,
            self.num_leaving(tokens, hints),
            margin=self.margin,
            alpha=self.alpha,
            protects=self.protects,
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
    protects: bool,
    num_prefix: int = 0,
) -> Match:
    """In the order of falling energy, every other token may leave, to the most similar of the rest.

    If low energy protects, twice as many tokens as leave take part, those of highest energy. Else
    all take part, and the most similar pairs merge. Where more than half of the tokens leave, it is
    those of highest energy, and all others may take them in.
    """
    order = energy(similarity, margin, alpha).argsort(dim=1, descending=True, stable=True)
    num_tokens = order.shape[1]
    absent = torch.zeros_like(order, dtype=torch.bool)
    if 2 * num_leaving > num_tokens:
        sources, takes = order[:, :num_leaving], order[:, num_leaving:]
    else:
        part = order[:, : 2 * num_leaving] if protects else order
        sources, takes = part[:, ::2], part[:, 1::2]
    open_to = absent.scatter(1, takes, value=True)
    best, target = similarity.masked_fill(~open_to[:, None], -torch.inf).max(dim=-1)
    first = best.gather(1, sources).topk(num_leaving, dim=1).indices
    leaves = absent.scatter(1, sources.gather(1, first), value=True)
    return Match.of_patches(leaves, target, num_leaving, num_prefix)

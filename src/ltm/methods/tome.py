"""ToMe: merge the most similar pairs of tokens, by size-weighted means (Bolya et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from ltm.core.matching import merge_most_similar
from ltm.core.merge import token_sizes
from ltm.core.schedule import constant_number, falling_number
from ltm.methods.base import Decision, Hints, Merger, MethodConfig, Site


@dataclass(frozen=True, kw_only=True)
class ToMe(MethodConfig):
    """Bipartite soft matching on the mean attention key, with equally many pairs in every block."""

    schedule: Literal["constant", "decreasing"] = "constant"
    """Remove equally many tokens in every block, or fewer from block to block. The latter is the
    paper's other schedule, and better below 0.5 of the multiply-adds."""

    name: ClassVar[str] = "tome"
    description: ClassVar[str] = "the most similar pairs become their mean"
    colour: ClassVar[str | None] = "#0072b2"
    marker: ClassVar[str | None] = "^"
    later: ClassVar[frozenset[str]] = MethodConfig.later | {"schedule"}

    def spread(
        self, strength: float, num_in: int, sites: tuple[int, ...], depth: int | None
    ) -> list[int]:
        form = constant_number if self.schedule == "constant" else falling_number
        return form(strength, num_in, len(sites))

    def build(self, site: Site) -> Merger:
        return ToMeMerger(site, in_order=self.num_tokens is not None)


class ToMeMerger(Merger):
    """Merges the pairs with the most similar keys; nothing is learned."""

    needs = frozenset({"keys"})

    def __init__(self, site: Site, *, in_order: bool) -> None:
        super().__init__(site)
        self.in_order = in_order

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        assert hints.keys is not None
        merge = merge_most_similar(
            hints.keys,
            token_sizes(tokens, hints.size),
            self.num_leaving(tokens, hints),
            num_prefix=self.site.num_prefix,
            in_order=self.in_order,
        )
        return Decision(merge=merge)

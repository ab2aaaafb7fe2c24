"""ToMe: merge the most similar pairs of tokens, by size-weighted means (Bolya et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from ltm.core.matching import match_most_similar, merge_in_order, merge_sides_apart
from ltm.core.merge import token_sizes
from ltm.core.schedule import constant_number, falling_number
from ltm.methods.base import Decision, Hints, Merger, MethodConfig, Site


@dataclass(frozen=True, kw_only=True)
class ToMe(MethodConfig):
    """Bipartite soft matching on the mean attention key, as many pairs in every block."""

    schedule: Literal["constant", "decreasing"] = "constant"
    """As many tokens leave every block; or ever fewer, which is the paper's other schedule and
    better below 0.5 of the multiply-adds."""

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
    """The pairs of the most similar keys join; nothing is learned."""

    needs = frozenset({"keys"})

    def __init__(self, site: Site, *, in_order: bool = False) -> None:
        super().__init__(site)
        self.in_order = in_order

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        prefix = self.site.num_prefix
        num_leaving = tokens.shape[1] - prefix - hints.num_out
        metric = tokens if hints.keys is None else hints.keys
        match = match_most_similar(metric, num_leaving, num_prefix=prefix)
        put = merge_in_order if self.in_order else merge_sides_apart
        return Decision(merge=put(match, token_sizes(tokens, hints.size)))

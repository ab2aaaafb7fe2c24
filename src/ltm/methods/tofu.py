"""ToFu: prune one of a pair early, fuse it with its norm kept later (Kim et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float
from torch import Tensor

from ltm.core.matching import match_most_similar, merge_in_order, merge_sides_apart
from ltm.core.merge import token_sizes
from ltm.core.validation import Within
from ltm.methods.base import Decision, Hints, Merger, MethodConfig, Site


@dataclass(frozen=True, kw_only=True)
class ToFu(MethodConfig):
    """ToMe's matching; the source of a pair is dropped early and fused (MLERP) later."""

    switch: Annotated[float, Within(0, 1)] = 0.5
    """The share of the depth at which dropping gives way to fusing."""

    name: ClassVar[str] = "tofu"
    description: ClassVar[str] = (
        "of the most similar pairs one is dropped early, both are fused later"
    )
    colour: ClassVar[str | None] = "#009e73"
    marker: ClassVar[str | None] = "D"

    def build(self, site: Site) -> Merger:
        prune = site.block < self.switch * site.depth
        return ToFuMerger(site, prune=prune, in_order=self.num_tokens is not None)


class ToFuMerger(Merger):
    """The pairs of the most similar keys lose their source, or become one direction.

    The direction is their mean, and its length the larger of their norms (MLERP).
    """

    needs = frozenset({"keys"})

    def __init__(self, site: Site, *, prune: bool, in_order: bool = False) -> None:
        super().__init__(site)
        self.prune, self.in_order = prune, in_order

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        prefix = self.site.num_prefix
        num_leaving = tokens.shape[1] - prefix - hints.num_out
        metric = tokens if hints.keys is None else hints.keys
        match = match_most_similar(metric, num_leaving, num_prefix=prefix)
        size = token_sizes(tokens, hints.size)
        put = merge_in_order if self.in_order else merge_sides_apart
        return Decision(merge=put(match, size, prune=self.prune, keep_norm=not self.prune))

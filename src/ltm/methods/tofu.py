"""ToFu: early blocks drop one token of a pair, later ones fuse both (Kim et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float
from torch import Tensor

from ltm.core.matching import merge_most_similar
from ltm.core.merge import token_sizes
from ltm.core.validation import Within
from ltm.methods.base import Decision, Hints, Merger, MethodConfig, Site


@dataclass(frozen=True, kw_only=True)
class ToFu(MethodConfig):
    """ToMe's matching; early blocks drop one token of a pair, later ones fuse both (MLERP)."""

    switch: Annotated[float, Within(0, 1)] = 0.5
    """The share of the depth after which tokens are fused instead of dropped."""

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
    """Of the pairs with the most similar keys, drops one token or fuses both.

    Fused tokens have the direction of their mean and the larger of their norms (MLERP).
    """

    needs = frozenset({"keys"})

    def __init__(self, site: Site, *, prune: bool, in_order: bool) -> None:
        super().__init__(site)
        self.prune, self.in_order = prune, in_order

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        assert hints.keys is not None
        merge = merge_most_similar(
            hints.keys,
            token_sizes(tokens, hints.size),
            self.num_leaving(tokens, hints),
            num_prefix=self.site.num_prefix,
            in_order=self.in_order,
            prune=self.prune,
            keep_norm=not self.prune,
        )
        return Decision(merge=merge)

"""DTEM: ToMe in a learned embedding of the tokens (Lee and Hong, 2024).

The embedding is decoupled from the network: it is used to choose pairs and for nothing else. It
trains through a soft relaxation of that choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ltm.core.matching import merge_most_similar
from ltm.core.merge import token_sizes
from ltm.core.relaxation import SoftMerge, continuous_top_k
from ltm.core.validation import Within
from ltm.methods.base import Decision, Hints, Merger, MethodConfig, Site


@dataclass(frozen=True, kw_only=True)
class DTEM(MethodConfig):
    """ToMe's pairs in a learned embedding; before training they are almost the same as ToMe's."""

    width: Annotated[int, Within(1, 4096)] = 64
    """Channels of the embedding."""
    neighbours: Annotated[int, Within(1, 4096)] = 3
    """In training, how many of the most similar tokens a token may join."""
    temperature: Annotated[float, Within(0, 10, above=True)] = 0.1
    """In training, the temperature of the choice of pairs; smaller is closer to a hard choice."""

    name: ClassVar[str] = "dtem"
    description: ClassVar[str] = "the most similar pairs of a learned embedding become their mean"
    colour: ClassVar[str | None] = "#999933"
    marker: ClassVar[str | None] = "h"
    sequences_only: ClassVar[bool] = True

    def build(self, site: Site) -> Merger:
        return DTEMMerger(site, self)


class DTEMMerger(Merger):
    """Compares the keys together with a learned embedding, which starts close to zero."""

    needs = frozenset({"keys"})

    def __init__(self, site: Site, config: DTEM) -> None:
        super().__init__(site)
        self.config = config
        self.embedding = nn.Linear(site.width, config.width)
        nn.init.normal_(self.embedding.weight, std=1e-3)  # zeros would have no gradient
        nn.init.zeros_(self.embedding.bias)

    @property
    def own_counts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """In training all tokens are kept."""
        return self.training

    def metric(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Float[Tensor, "b t d"]:
        """Unit keys, concatenated with the embedding of the normalised tokens."""
        assert hints.keys is not None
        keys = torch.nn.functional.normalize(hints.keys.detach().float(), dim=-1)
        plain = torch.nn.functional.layer_norm(tokens.detach().float(), tokens.shape[-1:])
        embedded = self.embedding(plain.to(self.embedding.weight.dtype))
        return torch.cat([keys, embedded.float()], dim=-1)

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        k, metric = self.site.num_prefix, self.metric(tokens, hints)
        size = token_sizes(tokens, hints.size)
        if self.training and not tokens.is_meta:
            mass = size[:, k:]
            alive = _heaviest(mass, mass.shape[1]) if hints.carry is None else hints.carry
            left = self.site.count_for(alive.shape[1])
            merge = self._soft(metric[:, k:], mass, alive, alive.shape[1] - left)
            return Decision(merge=merge, carry=_heaviest(merge.sizes(size)[:, k:], left))
        merge = merge_most_similar(
            metric,
            size,
            self.num_leaving(tokens, hints),
            num_prefix=k,
            in_order=self.config.num_tokens is not None,
        )
        return Decision(merge=merge)

    def _soft(
        self,
        metric: Float[Tensor, "b n d"],
        mass: Float[Tensor, "b n"],
        alive: Int[Tensor, "b left"],
        leaving: int,
    ) -> SoftMerge:
        """Soft pairs among the tokens that would enter this site at inference.

        As in ToMe, tokens at even positions may join those at odd ones.
        """
        first, second = alive[:, ::2], alive[:, 1::2]
        unit = torch.nn.functional.normalize(metric, dim=-1)
        sides = [
            unit.gather(1, at[..., None].expand(-1, -1, unit.shape[2])) for at in (first, second)
        ]
        scores = sides[0] @ sides[1].mT
        few = min(self.config.neighbours, scores.shape[2])
        best, places = scores.topk(few, dim=2)
        part = continuous_top_k(best, min(leaving, first.shape[1]), self.config.temperature**2)
        pairs = torch.zeros_like(scores).scatter(2, places, part.to(scores.dtype))
        n = metric.shape[1]
        rows = pairs.new_zeros(len(pairs), first.shape[1], n)
        rows = rows.scatter(2, second[:, None].expand(-1, first.shape[1], -1), pairs)
        moved = rows.new_zeros(len(pairs), n, n)
        moved = moved.scatter(1, first[..., None].expand(-1, -1, n), rows)
        return SoftMerge(moved=moved, mass=mass, num_prefix=self.site.num_prefix)


def _heaviest(mass: Float[Tensor, "b n"], number: int) -> Int[Tensor, "b left"]:
    """The tokens of most mass, in order: at inference only as many are left."""
    heaviest = mass.argsort(dim=1, descending=True, stable=True)[:, :number]
    return heaviest.sort(dim=1).values

"""DiffRate: drop or merge the least important tokens (Chen et al., 2023).

The paper learns by gradient how many tokens each block drops and merges. Here `ltm.calibrate`
searches for these numbers on unlabelled images, within the budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ltm.core.matching import Match, merge_in_order
from ltm.core.merge import MatchedMerge
from ltm.core.schedule import weighted_rate
from ltm.core.validation import Within
from ltm.methods.base import Decision, Hints, Merger, MethodConfig, Site

Share = Annotated[float, Within(0, 1)]

# Shares that leave by depth, as the authors learned them for DeiT-Ti at 0.7 GFLOPs. The first block
# keeps all tokens. Theirs drops almost all in the last block, which saves one percent.
PROFILE_DEPTH = (1 / 12, 2 / 12, 3 / 12)
PROFILE_LEAVING = (0.01, 0.02, 0.16)


@dataclass(frozen=True)
class Dropped:
    """The share of the tokens leaving a site that are dropped."""

    share: float

    def __str__(self) -> str:
        return f"{100 * self.share:.0f}% of them dropped"


@dataclass(frozen=True, kw_only=True)
class DiffRate(MethodConfig):
    """The tokens with the least attention from the class token are dropped or merged."""

    dropped: Share = 0.33
    """Of the tokens that leave a site, the share that is dropped: the least important ones. The
    others join the most similar token that stays."""
    dropped_at: tuple[Share, ...] | None = None
    """A share for each site, in place of `dropped`."""

    name: ClassVar[str] = "diffrate"
    description: ClassVar[str] = "tokens that receive least attention are dropped, or merged"
    colour: ClassVar[str | None] = "#56b4e9"
    marker: ClassVar[str | None] = "X"
    sequences_only: ClassVar[bool] = True
    choices: ClassVar[tuple[Hashable, ...]] = (Dropped(0.33), Dropped(0.0), Dropped(1.0))

    def per_site(self) -> dict[str, tuple[Any, ...] | None]:
        return {"dropped_at": self.dropped_at}

    def choice_at(self, block: int) -> Dropped:
        if self.dropped_at is None or self.sites is None or block not in self.sites:
            return Dropped(self.dropped)
        return Dropped(self.dropped_at[self.sites.index(block)])

    def settings_for(self, choices: tuple[Hashable, ...]) -> dict[str, Any]:
        shares = tuple(choice.share for choice in choices if isinstance(choice, Dropped))
        return {"dropped_at": shares or None}

    def choose_sites(self, num_blocks: int) -> tuple[int, ...]:
        return tuple(range(min(1, num_blocks - 1), num_blocks))

    def spread(
        self, strength: float, num_in: int, sites: tuple[int, ...], depth: int | None
    ) -> list[int]:
        """The profile that the authors learned for DeiT-Ti: little at first, then equal shares."""
        places = [site / (depth or sites[-1] + 1) for site in sites]
        leaving = np.interp(places, PROFILE_DEPTH, PROFILE_LEAVING)
        return weighted_rate(strength, num_in, leaving.tolist())

    def build(self, site: Site) -> Merger:
        return DiffRateMerger(site, self.choice_at(site.block).share)


@dataclass(frozen=True, eq=False, kw_only=True)
class DiscountedMerge(MatchedMerge):
    """A token that joins another adds its size times their similarity."""

    part: Float[Tensor, "b t"]

    def _counted(self, size: Float[Tensor, "_ t"]) -> Float[Tensor, "b t"]:
        return size * self.part


class DiffRateMerger(Merger):
    """Sorts tokens by the class token's attention, drops the last and merges those before them."""

    needs = frozenset({"importance"})

    def __init__(self, site: Site, dropped: float) -> None:
        super().__init__(site)
        self.dropped = dropped

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        assert hints.importance is not None
        k = self.site.num_prefix
        num_leaving = self.num_leaving(tokens, hints)
        order = hints.importance[:, k:].argsort(dim=1, descending=True, stable=True) + k
        stays = order[:, : hints.num_out]
        gone = order[:, order.shape[1] - round(self.dropped * num_leaving) :]
        unit = torch.nn.functional.normalize(tokens.float(), dim=-1)
        open_to = torch.zeros_like(unit[..., 0], dtype=torch.bool).scatter(1, stays, value=True)
        scores = (unit @ unit.mT).masked_fill(~open_to[:, None], -torch.inf)
        leaves = ~open_to
        leaves[:, :k] = False
        # As published, the mean is not weighted by size.
        weight = torch.ones_like(scores[..., 0]).scatter(1, gone, 0.0)
        similarity, target = scores.max(dim=-1)
        match = Match(leaves=leaves, target=target, num_leaving=num_leaving, num_prefix=k)
        part = torch.where(leaves, similarity.clamp_min(0), 1.0) * weight
        found = merge_in_order(match, weight)
        fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        return Decision(merge=DiscountedMerge(**fields, part=part))

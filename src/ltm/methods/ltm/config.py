"""The settings of LTM, and where it merges."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

from ltm.core.schedule import constant_rate, weighted_rate
from ltm.methods.base import Merger, MethodConfig, Site
from ltm.methods.ltm.learned import LearnedMerger
from ltm.methods.ltm.matching import MatchingMerger

Support = Literal["matching", "learned"]

# Where merging hurts least on pretrained ViTs: nothing in the first quarter, most in the middle.
PROFILE_DEPTH = (3 / 12, 5 / 12, 8 / 12)
PROFILE_LEAVING = (0.12, 0.27, 0.39)


@dataclass(frozen=True, kw_only=True)
class LTM(MethodConfig):
    """Settings of learnable token merging. The defaults suit pretrained networks."""

    support: Support | None = None
    """Which tokens may join: "matching" (found per image), "learned" (a trained static pattern);
    None takes matching on sequences and learned on grids."""
    protection: float = 0.2
    """How strongly informative tokens are kept from leaving in a matching."""
    keep_norm: bool = True
    """Matched tokens keep the largest norm of their group."""
    weights: Literal["informative", "uniform"] = "informative"
    """Weigh tokens by the information-bottleneck step, or only by their size."""
    space: Literal["pooled", "token"] = "pooled"
    """Measure class membership on the mean merged token, or on all of them (the paper's letter)."""
    labels: Literal["soft", "true"] = "soft"
    """Labels in the step: the network's own membership, or the true ones in training."""
    scope: Literal["sample", "batch"] = "sample"
    """One step per image, or one for the minibatch with a running mean in evaluation."""
    mask_form: Literal["masked", "letter"] = "masked"
    """Softmax over the support, or of the product with it (the letter: strays get a weight)."""
    step: Literal["standardised", "raw"] = "standardised"
    """Standardise the step per image and scale it by a learned gain, or take it as it is."""
    eta: float = 1.0
    beta: float = 10.0
    gain: float = 0.1
    """Initial value of the learned gain."""
    mlp: bool = False
    """A zero-initialised residual layer on the tokens inside the mask module."""

    name: ClassVar[str] = "ltm"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("eta", "beta"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}: got {getattr(self, field)}; it must be positive.")
        if self.support == "matching" and self._needs_static():
            raise ValueError(
                "support: got 'matching'; space='token', scope='batch' and mask_form='letter' "
                "need support='learned', since matched places differ from image to image."
            )

    def _needs_static(self) -> bool:
        return self.space == "token" or self.scope == "batch" or self.mask_form == "letter"

    def support_on(self, *, grid: bool) -> Support:
        """The support that this config means on a grid network or a sequence."""
        if self.support is not None:
            return self.support
        return "learned" if grid or self._needs_static() else "matching"

    def keeps_grid(self) -> bool:
        return self.support_on(grid=True) == "learned"

    def build(self, site: Site) -> Merger:
        if self.support_on(grid=site.grid_in is not None) == "matching":
            return MatchingMerger(site, self)
        return LearnedMerger(site, self)

    def choose_sites(self, num_blocks: int) -> tuple[int, ...]:
        if self.support_on(grid=False) == "learned" or self.ratio is None:
            return tuple(range(num_blocks))
        return tuple(sorted({round(depth * num_blocks) for depth in PROFILE_DEPTH}))

    def spread(self, strength: float, num_in: int, sites: tuple[int, ...], depth: int) -> list[int]:
        if self.support_on(grid=False) == "learned":
            return constant_rate(strength, num_in, len(sites))
        return weighted_rate(strength, num_in, [_profile_share(site / depth) for site in sites])


def _profile_share(depth: float) -> float:
    """The share of tokens that leave at a relative depth, between the profile's own points."""
    points = list(zip(PROFILE_DEPTH, PROFILE_LEAVING, strict=True))
    if depth <= points[0][0]:
        return points[0][1]
    for (d0, s0), (d1, s1) in itertools.pairwise(points):
        if depth <= d1:
            return s0 + (s1 - s0) * (depth - d0) / (d1 - d0)
    return points[-1][1]

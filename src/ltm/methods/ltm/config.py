"""The settings of LTM, and where it merges."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ltm.core.schedule import weighted_rate
from ltm.methods.base import Count, Images, Merger, MethodConfig, Site
from ltm.methods.ltm.learned import LearnedMerger
from ltm.methods.ltm.matching import MatchingMerger, Operator, UnimportantMerger

Support = Literal["matching", "learned"]

# Where merging hurts least on pretrained ViTs: nothing in the first quarter, most in the middle.
PROFILE_DEPTH = (3 / 12, 5 / 12, 8 / 12)
PROFILE_LEAVING = (0.12, 0.27, 0.39)
# Below this share of MACs three sites would have to remove too much at once.
FEW_SITES_DOWN_TO = 0.45
MANY_DEPTH = (2 / 12, 3 / 12, 5 / 12, 7 / 12, 9 / 12)
# Strong merging is best spread evenly: the profile gives way to equal shares between these ratios.
PROFILE_DOWN_TO, EQUAL_FROM = 0.65, 0.55


@dataclass(frozen=True)
class Choice:
    """What a site of a matched support does, as a calibration chooses it."""

    operator: Operator = "norm"
    protection: float = 1.0

    def __str__(self) -> str:
        protected = f", protection {self.protection:g}" if self.protection else ""
        return f"{self.operator}{protected}"


CHOICES = (
    Choice("norm", 1.0),
    Choice("norm", 0.0),
    Choice("merge", 1.0),
    Choice("merge", 0.0),
    Choice("prune_redundant", 1.0),
    Choice("prune_redundant", 0.0),
    Choice("prune_unimportant", 0.0),
)

_PHRASES: dict[Operator, str] = {
    "merge": "tokens that are missed least join their nearest, weighted",
    "norm": "tokens that are missed least join their nearest, weighted, norms kept",
    "prune_redundant": "tokens that have a near twin are dropped",
    "prune_unimportant": "tokens that receive least attention are dropped",
    "none": "nothing leaves",
}


@dataclass(frozen=True, kw_only=True)
class LTM(MethodConfig):
    """Settings of learnable token merging. The defaults suit pretrained networks."""

    support: Support | None = None
    """Which tokens may join: "matching" (found per image), "learned" (a trained static pattern);
    None takes matching on sequences and learned on grids."""
    matching: Literal["free", "alternate"] = "free"
    """Any token may join any other, or even ones odd ones only: a quarter of the comparisons."""
    protection: float = 1.0
    """How strongly informative tokens are kept from leaving in a matching: the power of the
    attention they receive."""
    attended: float = 0.5
    """How much attention counts in the mean of matched tokens, at sites that protect: the power of
    what each of a token's patches receives; 0 counts patches alone."""
    size_power: float = 0.9
    """The power of a token's size that the attention counts after a matching on sequences; a little
    less than 1 stays closer to the original network."""
    keep_norm: bool = True
    """Matched tokens keep the largest norm of their group."""
    operators: tuple[Operator, ...] | None = None
    """What each site does with the tokens that leave it, in place of `keep_norm`: "merge", "norm",
    "prune_redundant", "prune_unimportant" or "none"."""
    protections: tuple[float, ...] | None = None
    """The protection of each site, in place of `protection`."""
    weights: Literal["informative", "uniform"] = "informative"
    """Weigh tokens by the information-bottleneck step as well, or not."""
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
    description: ClassVar[str] = "tokens that are missed least join their nearest, weighted"
    colour: ClassVar[str | None] = "#d55e00"
    marker: ClassVar[str | None] = "o"
    aliases: ClassVar[dict[str, str]] = {
        "ltm-static": "support=learned,weights=uniform",
        "ltm-uniform": "weights=uniform",
    }
    prefers_few: ClassVar[bool] = True
    earlier: ClassVar[dict[str, Any]] = {"attended": 0.0, "size_power": 1.0}

    def __post_init__(self) -> None:
        given = self.sites
        super().__post_init__()
        for field in ("eta", "beta"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}: got {getattr(self, field)}; it must be positive.")
        self._check_per_site(given)
        self._check_powers()
        if self.support == "matching" and self._needs_static():
            raise ValueError(
                "support: got 'matching'; space='token', scope='batch' and mask_form='letter' "
                "need support='learned', since matched places differ from image to image."
            )

    def _check_per_site(self, sites: tuple[int, ...] | None) -> None:
        """Operators and protections go with sites, one each, in the order of the blocks."""
        for field in ("operators", "protections"):
            values = getattr(self, field)
            if values is None:
                continue
            if self.support == "learned" or self._needs_static():
                raise ValueError(f"{field}: they belong to support='matching'.")
            if sites is None or list(sites) != sorted(set(sites)) or len(values) != len(sites):
                raise ValueError(
                    f"{field}: got {len(values)} of them, and sites={sites}; give one per site, "
                    "with the sites in ascending order."
                )

    def _check_powers(self) -> None:
        powers = [("protection", p) for p in (self.protection, *(self.protections or ()))]
        powers += [("attended", self.attended), ("size_power", self.size_power)]
        for field, power in powers:
            if not 0 <= power < math.inf:
                raise ValueError(f"{field}: got {power}; it must not be negative.")
        if self.size_power == 0:
            raise ValueError("size_power: got 0; proportional_attention=False ignores sizes.")

    def operator_at(self, block: int) -> Operator:
        """What a site does with the tokens that leave it."""
        if self.operators is None or self.sites is None:
            return "norm" if self.keep_norm else "merge"
        return self.operators[self.sites.index(block)]

    def protection_at(self, block: int) -> float:
        """How strongly a site protects informative tokens."""
        if self.protections is None or self.sites is None:
            return self.protection
        return self.protections[self.sites.index(block)]

    def counting(self) -> float:
        return self.size_power if self.support_on(grid=False) == "matching" else 1.0

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
        if self.support_on(grid=site.grid_in is not None) == "learned":
            for field in ("operators", "protections"):
                if getattr(self, field) is not None:
                    raise ValueError(
                        f"{field}: they belong to a matching, and this network keeps its grids: "
                        "give support='matching' too, or leave them out."
                    )
            return LearnedMerger(site, self)
        unimportant = self.operator_at(site.block) == "prune_unimportant"
        return UnimportantMerger(site, self) if unimportant else MatchingMerger(site, self)

    def alternates(self) -> bool:
        return self.matching == "alternate"

    def fit_(self, mergers: Sequence[Merger], images: Images, *, tolerance: float) -> None:
        if any(merger.keeps_statistics for merger in mergers):
            images.collect_statistics_()

    def unschedulable(self, *, grid: bool) -> str:
        if not grid and self.support_on(grid=False) == "learned":
            return "a learned support on a sequence has no schedule to search"
        return ""

    def choices(self) -> tuple[Choice, ...]:
        return CHOICES

    def choice_at(self, block: int) -> Choice:
        return Choice(self.operator_at(block), self.protection_at(block))

    def scheduled(
        self, sites: tuple[int, ...], counts: tuple[Count, ...], choices: tuple[Any, ...]
    ) -> LTM:
        given = [choice if isinstance(choice, Choice) else CHOICES[0] for choice in choices]
        matched = bool(counts) and not isinstance(counts[0], tuple)
        return dataclasses.replace(
            self,
            ratio=None,
            per_block=None,
            counts=counts,
            sites=sites,
            operators=tuple(choice.operator for choice in given) if matched else None,
            protections=tuple(choice.protection for choice in given) if matched else None,
        )

    def unscheduled(self, ratio: float, sites: tuple[int, ...] | None = None) -> LTM:
        return dataclasses.replace(
            self,
            ratio=ratio,
            per_block=None,
            counts=None,
            sites=sites,
            operators=None,
            protections=None,
        )

    def describe(self, site: Site) -> str:
        if self.support_on(grid=site.grid_in is not None) == "learned":
            return "neighbours merge by a mask that is the same for every image"
        return _PHRASES[self.operator_at(site.block)]

    def for_feature_maps(self) -> LTM:
        is_open = self.support is None and self.counts is None and not self._needs_static()
        return dataclasses.replace(self, support="matching") if is_open else self

    def choose_sites(self, num_blocks: int) -> tuple[int, ...]:
        if self.ratio is None:
            return tuple(range(num_blocks))
        depths = PROFILE_DEPTH if self.ratio >= FEW_SITES_DOWN_TO else MANY_DEPTH
        return tuple(sorted({round(depth * num_blocks) for depth in depths}))

    def spread(
        self, strength: float, num_in: int, sites: tuple[int, ...], depth: int | None
    ) -> list[int]:
        even = (PROFILE_DOWN_TO - (self.ratio or 1.0)) / (PROFILE_DOWN_TO - EQUAL_FROM)
        even = min(max(even, 0.0), 1.0)
        mean = sum(PROFILE_LEAVING) / len(PROFILE_LEAVING)

        def share(site: int) -> float:
            if self.operator_at(site) == "none":
                return 0.0
            if depth is None:
                return mean
            return (1 - even) * _profile_share(site / depth) + even * mean

        return weighted_rate(strength, num_in, [share(site) for site in sites])


def _profile_share(depth: float) -> float:
    """The share of tokens that leave at a relative depth, between the profile's own points."""
    points = list(zip(PROFILE_DEPTH, PROFILE_LEAVING, strict=True))
    if depth <= points[0][0]:
        return points[0][1]
    for (d0, s0), (d1, s1) in itertools.pairwise(points):
        if depth <= d1:
            return s0 + (s1 - s0) * (depth - d0) / (d1 - d0)
    return points[-1][1]

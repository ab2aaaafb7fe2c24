"""LTMP: learned thresholds for merging and pruning (Bonnaerens and Dambre, 2023).

Each block has two thresholds. A token whose best match is more similar than the merge threshold
joins it; a token that receives less attention than the prune threshold is dropped. The number of
tokens that leave differs between images. In evaluation they are removed, and the batch is padded to
its longest image. In training and under compilation they stay with size zero, which masks them in
the attention.

The ratio therefore holds on average: in training a loss pulls the share of MACs towards it, and
`set_thresholds_` meets it on given images.

Letters: b images, t tokens with their prefix, d features of the metric.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ltm.core.matching import merge_most_similar
from ltm.core.merge import MatchedMerge, Merge, token_sizes
from ltm.core.support import straight_through
from ltm.core.validation import Within
from ltm.methods.base import (
    Decision,
    ExtraLoss,
    Hints,
    Images,
    Merger,
    MethodConfig,
    Site,
)

_Rate = Annotated[float, Within(0, 10, above=True)]


@dataclass(frozen=True, kw_only=True)
class LTMP(MethodConfig):
    """Thresholded merging and pruning; `ratio` is met on average, with thresholds set on data."""

    merge_threshold: Annotated[float, Within(-2, 2)] = 0.9
    """A threshold on cosine similarity: above 1 nothing merges."""
    prune_threshold: Annotated[float, Within(-2, 2)] = 0.0
    """A threshold on the attention received: at 0 nothing is dropped."""
    temperature: Annotated[float, Within(1e-6, 1e3)] = 0.1
    """Width of the sigmoid that gives the thresholds their gradient."""
    merge_threshold_lr: _Rate = 5e-3
    """Learning rate of the merge thresholds."""
    prune_threshold_lr: _Rate = 5e-6
    """Learning rate of the prune thresholds."""
    budget_weight: Annotated[float, Within(0, 1e6)] = 10.0
    """Weight of the squared distance of the share of MACs from `ratio`, in the loss."""

    name: ClassVar[str] = "ltmp"
    description: ClassVar[str] = "pairs above a threshold merge, tokens below another are dropped"
    colour: ClassVar[str | None] = "#aa4499"
    marker: ClassVar[str | None] = "v"
    later: ClassVar[frozenset[str]] = MethodConfig.later | {
        "merge_threshold_lr",
        "prune_threshold_lr",
        "budget_weight",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_tokens is not None:
            raise ValueError(
                f"num_tokens: got {self.num_tokens}; LTMP keeps another number of every image: "
                "give ratio, or take another method."
            )

    def build(self, site: Site) -> Merger:
        return LTMPMerger(site, self)

    def needs_images(self) -> bool:
        return self.ratio is not None and self.ratio < 1

    def fit_(self, mergers: Sequence[Merger], images: Images, *, tolerance: float) -> None:
        if self.ratio is not None and self.needs_images():
            set_thresholds_(_ours(mergers), images.share, self.ratio, tolerance=tolerance)

    def learning_rate(self, parameter: str) -> float | None:
        rates = {
            "merge_threshold": self.merge_threshold_lr,
            "prune_threshold": self.prune_threshold_lr,
        }
        return rates.get(parameter)

    def extra_loss(
        self, mergers: Sequence[Merger], share: Callable[[Tensor], Tensor]
    ) -> ExtraLoss | None:
        if self.ratio is None:
            return None
        found = share(tokens_left(_ours(mergers)))
        return ExtraLoss(value=self.budget_weight * (found - self.ratio).square(), share=found)

    def unschedulable(self, *, grid: bool) -> str:
        return "thresholds decide how many tokens LTMP keeps, image by image"


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskedMerge(Merge):
    """Tokens keep their places: one that moves is added to its partner and left with size zero."""

    partner: Int[Tensor, "b t"]
    moves: Float[Tensor, "b t"]
    """One where a token joins its partner, with a straight-through gradient."""
    stays: Float[Tensor, "b t"]
    """Zero where a token is pruned."""
    size: Float[Tensor, "b t"]
    heir: Int[Tensor, "b t"]
    """Each token's most similar one among those left; a dropped token is restored from it."""

    is_matched: ClassVar[bool] = True

    @property
    def num_in(self) -> int:
        return self.partner.shape[1] - self.num_prefix

    @property
    def num_out(self) -> int:
        return self.num_in

    def _add(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        moves = self.moves[..., None].to(x.dtype)
        index = self.partner[..., None].expand(-1, -1, x.shape[-1])
        return (x * (1 - moves)).scatter_add(1, index, x * moves)

    def __call__(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        size = self.size[..., None]
        total = self._add(size)
        merged = self._add(x * size.to(x.dtype)) / total.clamp_min(1e-6).to(x.dtype)
        return torch.where(total > 0, merged, x)

    def places(self) -> tuple[Int[Tensor, "b t"], Bool[Tensor, "b t"]]:
        """Where each token went, and whether that place is still occupied."""
        alive = self.sizes(self.size) > 0
        itself = torch.arange(alive.shape[1], device=alive.device)
        place = torch.where(self.moves > 0.5, self.partner, itself)
        counted = alive.gather(1, place)
        return torch.where(counted, place, self.heir), counted

    def restore(self, y: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        place, _ = self.places()
        return y.gather(1, place[..., None].expand(-1, -1, y.shape[-1]))

    def weights(self) -> Float[Tensor, "b n p"]:
        k = self.num_prefix
        identity = torch.eye(self.partner.shape[1], device=self.partner.device)
        return self(identity.expand(self.partner.shape[0], -1, -1)).mT[:, k:, k:]

    def sizes(self, size: Float[Tensor, "_ t"]) -> Float[Tensor, "_ t"]:
        return self._add(size.expand_as(self.moves)[..., None])[..., 0] * self.stays

    def kept(self) -> Int[Tensor, "1 t"]:
        return torch.arange(self.partner.shape[1], device=self.partner.device)[None]


class LTMPMerger(Merger):
    """Merges above one threshold and prunes below another."""

    needs = frozenset({"keys", "attention"})
    own_counts = True

    def __init__(self, site: Site, config: LTMP) -> None:
        super().__init__(site)
        self.config = config
        self.merge_threshold = nn.Parameter(torch.tensor(float(config.merge_threshold)))
        self.prune_threshold = nn.Parameter(torch.tensor(float(config.prune_threshold)))
        self.kept: Float[Tensor, ""] | None = None
        """The mean share of patches kept by the last training forward, with its gradient."""

    def __getstate__(self) -> dict[str, Any]:
        # `kept` is part of an autograd graph, which can be neither copied nor pickled.
        return {**self.__dict__, "kept": None}

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        if tokens.is_meta:
            return self._planned(tokens, hints)
        size = token_sizes(tokens, hints.size)
        places = hints.carry
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device).expand(size.shape)
        scores = _similarities(hints)
        similarity, partner = self._partners(scores, places, size)
        moves = self._gate(similarity, self.merge_threshold) * (size > 0)
        attention = hints.attention
        assert attention is not None
        stays = self._gate(attention, self.prune_threshold, inclusive=True)
        k = self.site.num_prefix
        prefix = torch.arange(tokens.shape[1], device=tokens.device) < k
        moves, stays = moves.masked_fill(prefix, 0), stays.masked_fill(prefix, 1)
        if k == 0:  # at least one token has to stay: the one that receives most attention
            strongest = attention.masked_fill(size <= 0, -1.0).argmax(dim=1, keepdim=True)
            moves, stays = moves.scatter(1, strongest, 0.0), stays.scatter(1, strongest, 1.0)
        merge = MaskedMerge(
            partner=partner, moves=moves, stays=stays, size=size, heir=partner, num_prefix=k
        )
        left = (merge.sizes(size) > 0)[:, None, :]
        # A prefix token is an heir only if nothing else is left.
        heir = scores.masked_fill(prefix, -2.0).masked_fill(~left, -3.0).argmax(dim=-1)
        merge = dataclasses.replace(merge, heir=heir)
        if self.training:
            sizes = merge.sizes(size)[:, k:]
            # Not `clamp`: torch 2.15 gives no gradient at its bound, where whole tokens are.
            alive = torch.where(sizes > 1, 1.0, sizes).sum(1)
            self.kept = (alive / self.site.grid[0] / self.site.grid[1]).mean()
        if self.training or torch.compiler.is_compiling():
            return Decision(merge=merge, carry=places)
        return _compact(merge, places)

    def _partners(
        self, scores: Float[Tensor, "b t t"], places: Int[Tensor, "b t"], size: Tensor
    ) -> tuple[Float[Tensor, "b t"], Int[Tensor, "b t"]]:
        """Each even token's most similar odd token.

        Parity is that of the original place, so that removing and masking give the same pairs.
        """
        alive, prefix = size > 0, places < self.site.num_prefix
        first = alive & ~prefix & (places % 2 == 0)
        second = alive & ~prefix & (places % 2 == 1)
        allowed = first[:, :, None] & second[:, None, :]
        return scores.masked_fill(~allowed, -1.0).max(dim=-1)

    def _gate(self, value: Tensor, threshold: Tensor, *, inclusive: bool = False) -> Tensor:
        """One above the threshold, else zero, with the gradient of a sigmoid."""
        soft = torch.sigmoid((value - threshold) / self.config.temperature)
        hard = value >= threshold if inclusive else value > threshold
        return straight_through(hard, soft) if self.training else hard.to(soft.dtype)

    def _planned(self, tokens: Tensor, hints: Hints) -> Decision:
        """On `meta`: the planned number of tokens, at the cost of comparing all of them."""
        assert hints.keys is not None
        _similarities(hints)
        merge = merge_most_similar(
            hints.keys,
            token_sizes(tokens, hints.size),
            self.num_leaving(tokens, hints),
            num_prefix=self.site.num_prefix,
            in_order=True,
        )
        return Decision(merge=merge)


def _similarities(hints: Hints) -> Float[Tensor, "b t t"]:
    assert hints.keys is not None
    unit = torch.nn.functional.normalize(hints.keys.float(), dim=-1)
    return unit @ unit.mT


def _compact(merge: MaskedMerge, places: Int[Tensor, "b t"]) -> Decision:
    """Remove tokens of size zero, and pad shorter images with such tokens."""
    alive: Bool[Tensor, "b t"] = merge.sizes(merge.size) > 0
    # An empty batch has no longest image.
    longest = int(alive.sum(dim=1).max()) if len(alive) else alive.shape[1]
    order = torch.argsort((~alive).to(torch.int8), dim=1, stable=True)
    rank = torch.argsort(order, dim=1)
    place, counted = merge.places()
    compact = MatchedMerge(
        assignment=rank.gather(1, place),
        weight=merge.size * counted,
        num_places=longest,
        leaves=~alive,
        num_prefix=merge.num_prefix,
    )
    return Decision(merge=compact, carry=places.gather(1, order[:, :longest]))


def _ours(mergers: Sequence[Merger]) -> list[LTMPMerger]:
    return [merger for merger in mergers if isinstance(merger, LTMPMerger)]


def tokens_left(mergers: Sequence[LTMPMerger]) -> Float[Tensor, "s"]:
    """The mean number of patches after each merger in the last training forward, with gradient."""
    left: list[Tensor] = []
    for merger in mergers:
        if merger.kept is None:
            raise ValueError("model: no forward in training mode went before")
        left.append(merger.kept.float() * merger.site.grid[0] * merger.site.grid[1])
    return torch.stack(left)


@torch.no_grad()
def set_thresholds_(
    mergers: Sequence[LTMPMerger],
    measure: Callable[[], float],
    target: float,
    *,
    tolerance: float = 0.005,
) -> float:
    """Move all thresholds together until the measured mean share of MACs meets the target.

    Returns the measured share, which is within `tolerance` of the target.
    """
    start = [(float(m.merge_threshold), float(m.prune_threshold)) for m in mergers]

    def share_at(strength: float) -> float:
        for merger, before in zip(mergers, start, strict=True):
            merge, prune = _moved(*before, strength, merger.site.num_in)
            merger.merge_threshold.fill_(merge)
            merger.prune_threshold.fill_(prune)
        return measure()

    low, high = -1.0, 1.0
    most, least = share_at(low), share_at(high)
    if not least <= target <= most:
        share_at(0.0)
        raise ValueError(f"target: got {target}; LTMP reaches {least:.3f} to {most:.3f} here")
    reached, strength = share_at(0.0), 0.0
    for _ in range(20):
        if abs(reached - target) <= tolerance / 4:
            break
        low, high = (strength, high) if reached > target else (low, strength)
        strength = (low + high) / 2
        reached = share_at(strength)
    if abs(reached - target) > tolerance:
        raise ValueError(
            f"target: got {target}; the nearest share on these images is {reached:.3f}: "
            "give more images, or a larger tolerance"
        )
    return reached


def _moved(merge: float, prune: float, strength: float, num_tokens: int) -> tuple[float, float]:
    """The thresholds at a strength: -1 removes nothing, 0 changes nothing, 1 removes the most.

    Most of the change is in pruning, up to four times the mean attention (one over the number of
    tokens): on a pretrained ViT at 0.7 this lost 1.0 points, merging alone 2.8.
    """
    if strength < 0:
        return merge + (1.001 - merge) * -strength, prune * (1 + strength)
    return merge - 0.3 * strength, prune + 4.0 * strength / num_tokens

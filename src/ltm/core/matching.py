"""Bipartite matching of tokens, and the ways to turn a match into a Merge.

Letters: b images, t tokens with their prefix, k prefix tokens, d features of the metric,
f and s the first and second side of the matching, r tokens that leave.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ltm.core.merge import MatchedMerge
from ltm.kernels.matching import Match


def max_leaving(num_patches: int, num_prefix: int = 0) -> int:
    """The most tokens that one alternate matching can remove: all even ones, prefix apart."""
    total = num_patches + num_prefix
    first = (total + 1) // 2 - (num_prefix + 1) // 2
    return first if num_patches > first else 0


def alternate_sides(
    metric: Float[Tensor, "b t d"], num_prefix: int
) -> tuple[Float[Tensor, "b f"], Int[Tensor, "b f"]]:
    """ToMe's sides: each even token's best cosine similarity to an odd token, and that token.

    Prefix tokens take part on neither side. The partner is a position in the whole sequence.
    """
    unit = torch.nn.functional.normalize(metric.float(), dim=-1)
    scores = unit[:, ::2] @ unit[:, 1::2].mT
    even_prefix, odd_prefix = (num_prefix + 1) // 2, num_prefix // 2
    scores[:, :, :odd_prefix] = -torch.inf
    best, partner = scores.max(dim=-1)
    best[:, :even_prefix] = -torch.inf
    return best, 2 * partner + 1


def match_alternate(
    metric: Float[Tensor, "b t d"],
    num_leaving: int,
    *,
    num_prefix: int = 0,
) -> Match:
    """ToMe's bipartite soft matching: even tokens may leave to their most similar odd token.

    The `num_leaving` pairs of the largest similarity are taken.
    """
    num_tokens = metric.shape[1]
    allowed = max_leaving(num_tokens - num_prefix, num_prefix)
    if num_leaving > allowed:
        raise ValueError(
            f"num_leaving: got {num_leaving}; one matching of {num_tokens - num_prefix} tokens "
            f"can remove at most {allowed}."
        )
    best, partner = alternate_sides(metric, num_prefix)
    leaves = torch.zeros(metric.shape[:2], dtype=torch.bool, device=metric.device)
    target = torch.zeros(metric.shape[:2], dtype=partner.dtype, device=metric.device)
    target[:, ::2] = partner
    rank = None
    if num_prefix:
        chosen = best.topk(num_leaving, dim=1).indices
        leaves[:, ::2] = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, 1)
    else:
        rank = torch.zeros_like(target)
        rank[:, ::2] = best.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        leaves[:, ::2] = rank[:, ::2] < num_leaving
    return Match(
        leaves=leaves, target=target, num_leaving=num_leaving, num_prefix=num_prefix, rank=rank
    )


def match_most_similar(
    metric: Float[Tensor, "b t d"],
    num_leaving: int,
    *,
    num_prefix: int = 0,
) -> Match:
    """Alternate matching where it can remove enough, matching without sides where it cannot."""
    if num_leaving <= max_leaving(metric.shape[1] - num_prefix, num_prefix):
        return match_alternate(metric, num_leaving, num_prefix=num_prefix)
    return match_freely(metric, num_leaving, num_prefix=num_prefix)


def match_freely(
    metric: Float[Tensor, "b t d"],
    num_leaving: int,
    *,
    num_prefix: int = 0,
) -> Match:
    """Matching without sides: the most redundant tokens leave, each to its nearest that stays.

    A token's redundancy is its largest cosine similarity to any token after it, so that of two
    alike one leaves.
    """
    num_tokens = metric.shape[1]
    if not 0 <= num_leaving < num_tokens - num_prefix:
        raise ValueError(
            f"num_leaving: got {num_leaving}; of {num_tokens - num_prefix} tokens at most "
            f"{num_tokens - num_prefix - 1} can leave."
        )
    unit = torch.nn.functional.normalize(metric.float(), dim=-1)
    scores = unit @ unit.mT
    scores[:, :, :num_prefix] = -torch.inf
    place = torch.arange(num_tokens, device=metric.device)
    best = scores.masked_fill(place[:, None] >= place, -2.0).amax(dim=-1)
    best[:, :num_prefix] = -torch.inf
    chosen = best.topk(num_leaving, dim=1).indices
    leaves = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, 1)
    target = scores.masked_fill(leaves[:, None, :], -torch.inf).argmax(dim=-1)
    return Match(leaves=leaves, target=target, num_leaving=num_leaving, num_prefix=num_prefix)


def merge_in_order(
    match: Match, weight: Float[Tensor, "b t"], *, prune: bool = False, keep_norm: bool = False
) -> MatchedMerge:
    """The match as a Merge that keeps the tokens that stay in their (spatial) order."""
    return _merge_at(match, None, weight, prune, keep_norm)


def merge_sides_apart(
    match: Match, weight: Float[Tensor, "b t"], *, prune: bool = False, keep_norm: bool = False
) -> MatchedMerge:
    """The match as a Merge in ToMe's published order: prefix, even tokens that stay, odd tokens.

    The order is part of the method, since it decides the next block's sides. As published, even
    tokens stay in sequence where there is a prefix, and are sorted by similarity where there is
    none.
    """
    position = torch.arange(match.leaves.shape[1], device=match.leaves.device)
    patch = position >= match.num_prefix
    even = patch & (position % 2 == 0) & ~match.leaves
    odd = patch & (position % 2 == 1) & ~match.leaves
    if match.rank is None:
        even_place = torch.cumsum(even, dim=1) - 1 + match.num_prefix
    else:
        even_place = match.rank - match.num_leaving
    odd_place = torch.cumsum(odd, dim=1) - 1 + match.num_prefix + even.sum(dim=1, keepdim=True)
    places = torch.where(even, even_place, torch.where(odd, odd_place, position))
    return _merge_at(match, places, weight, prune, keep_norm)


def _merge_at(
    match: Match, places: Tensor | None, weight: Tensor, prune: bool, keep_norm: bool
) -> MatchedMerge:
    if prune:
        weight = weight * ~match.leaves
    return MatchedMerge(
        assignment=match.assignment(places),
        weight=weight,
        num_places=match.leaves.shape[1] - match.num_leaving,
        keep_norm=keep_norm,
        num_prefix=match.num_prefix,
    )

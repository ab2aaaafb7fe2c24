"""Matching: which tokens leave and which they join, and how a match becomes a `Merge`.

There are two rules. ToMe's joins the most similar pairs between two sides. LTM's joins the pairs
whose merge does the least harm.

Merging token i into token j changes both. Ward's criterion is the squared error of that change. The
network sees more of the error the more attention i receives, so the error is weighted by it:

    harm(i, j) = m_i m_j / (m_i + m_j) * |z_i - z_j|^2 * a_i ^ protection

Only the order of harms within an image matters, so the factors need no common unit. In the merge
itself, a token is weighted by its size, by the attention it receives, and by the informative step:
one step down the gradient of the bound.

Letters: b images, t tokens with their k prefix tokens, n patch tokens, p tokens that stay (prefix
included), r tokens that leave, c channels, d features, y classes; f and s the two sides of an
alternate matching; z tokens, m sizes, a attention received.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# ruff: noqa: ARG001, PLR0917 - operators take their arguments in order, and shapes need few
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ltm.core.mask_gradient import Step, step_flops, weigh
from ltm.core.merge import MatchedMerge, rows_at, token_sizes
from ltm.kernels.dispatch import is_recorded, operator, uses_triton, widen

_LEAST_SHARE = 1e-4
"""The least attention, as a part of an even share, that a weight counts: none vanishes."""
_MOST_WHOLE = 1024
"""Up to this many tokens all pairs are stored, so that none is compared twice."""
_MOST_PAIRS = 2**18
"""The most pairs per image in one tile."""
_FEWEST_ROWS = 64
"""The fewest rows of a tile, however many columns it has."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How many tokens leave, and by which rule."""

    num_leaving: int
    num_prefix: int = 0
    protection: float = 0.0
    """The power of attention in the harm of a merge."""
    attended: float = 0.0
    """The power of attention in the weight of a token in its group."""
    prune: bool = False
    """Drop the tokens that leave."""
    keep_norm: bool = False
    """Merged tokens keep the largest norm of their group."""
    alternate: bool = False
    """Let only even patches leave, and only join odd ones, if no more than half have to leave."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Match:
    """Which tokens leave, and which one each joins: `target` matters where `leaves` is true."""

    leaves: Bool[Tensor, "b t"]
    target: Int[Tensor, "b t"]
    num_leaving: int
    num_prefix: int
    rank: Int[Tensor, "b t"] | None = None
    """Set if there is no prefix: the rank of each even token by falling similarity."""

    @staticmethod
    def of_patches(
        leaves: Bool[Tensor, "b n"], target: Int[Tensor, "b n"], num_leaving: int, num_prefix: int
    ) -> Match:
        """A match of patch tokens, counted without the prefix, as one of the whole sequence."""
        pad = torch.nn.functional.pad
        return Match(
            leaves=pad(leaves, (num_prefix, 0)),
            target=pad(target + num_prefix, (num_prefix, 0)),
            num_leaving=num_leaving,
            num_prefix=num_prefix,
        )

    def assignment(self, places: Int[Tensor, "b t"] | None = None) -> Int[Tensor, "b t"]:
        """The place of each token after the merge; by default those that stay keep their order."""
        if places is None:
            places = torch.cumsum(~self.leaves, dim=1) - 1
        return torch.where(self.leaves, places.gather(1, self.target), places)


class Outcome(NamedTuple):
    """The merge that a match leads to."""

    merge: MatchedMerge
    logits: Float[Tensor, "_ n"] | None
    """The logits of the patches after the informative step, or those of `carry`."""


def match(
    tokens: Float[Tensor, "b t c"],
    rule: Rule,
    *,
    size: Float[Tensor, "_ t"] | None = None,
    attention: Float[Tensor, "b t"] | None = None,
    carry: Float[Tensor, "_ n"] | None = None,
    step: Step | None = None,
) -> Outcome:
    """Let the tokens whose best merge does the least harm join the nearest token that stays.

    `size` is None while all sizes are one; `attention` is what each token receives. Weights come
    from the informative `step`, else from the logits in `carry`, else from sizes alone.
    """
    at_once = step is not None and step.by_kernel(tokens, carry)
    if at_once and uses_triton(tokens, size, attention):
        assert step is not None
        *places, logits = _inform_and_assign(
            tokens, size, attention, carry, *step.arguments(), *_arguments(rule)
        )
        return Outcome(_ordered(rule, *places), logits)
    known = step is not None or carry is not None
    logits, weight = weigh(tokens, size, carry, step, rule.num_prefix) if known else (None, None)
    if uses_triton(tokens.detach()):
        # The choice of tokens has no gradient, so a kernel makes it in training, too; the weights
        # have one.
        given = size, attention, weight
        fixed: list[Any] = [None if x is None else x.detach() for x in given]
        assign: Any = _assign  # an operator, whose signature pyright cannot see
        *places, weighed = assign(tokens.detach(), *fixed, *_arguments(rule))
        if not uses_triton(tokens.detach(), *given):
            weighed = by_attention(weight, tokens, size, attention, rule)
            weighed = weighed.scatter(1, places[2].long(), 0.0) if rule.prune else weighed
        assignment, stays, leaves, goes = places
        return Outcome(_ordered(rule, assignment, stays, leaves, goes, weighed), logits)
    found = match_least_harm(tokens, rule, size=size, attention=attention)
    weight = by_attention(weight, tokens, size, attention, rule)
    merge = merge_in_order(found, weight, prune=rule.prune, keep_norm=rule.keep_norm)
    return Outcome(merge, logits)


def match_least_harm(
    tokens: Float[Tensor, "b t c"],
    rule: Rule,
    *,
    size: Float[Tensor, "_ t"] | None = None,
    attention: Float[Tensor, "b t"] | None = None,
) -> Match:
    """Which tokens leave and which they join, without weights.

    `alternate` saves three quarters of the comparisons if at most half of the tokens leave.
    """
    k = rule.num_prefix
    num_patches = tokens.shape[1] - k
    if not 0 <= rule.num_leaving < num_patches:
        raise ValueError(
            f"num_leaving: got {rule.num_leaving}; of {num_patches} tokens at most "
            f"{num_patches - 1} can leave."
        )
    alternate = rule.alternate and rule.num_leaving <= num_patches // 2
    find = _least_harm_alternate if alternate else _least_harm_free
    size, attention = (None if x is None else x[:, k:].detach() for x in (size, attention))
    return find(tokens[:, k:].detach(), size, attention, rule)


def match_unimportant(
    attention: Float[Tensor, "b n"], num_leaving: int, *, num_prefix: int
) -> Match:
    """Let the tokens that receive the least attention leave, however unique they are.

    For `restore`, each belongs to the nearest token before it that stays.
    """
    leaves = _marked(_smallest(attention, num_leaving), attention.shape[1])
    # A cumulative sum gives a token that leaves the place of the last one before it that stays.
    itself = torch.arange(leaves.shape[1], device=leaves.device)
    first = (~leaves).float().argmax(dim=1, keepdim=True)
    return Match.of_patches(leaves, torch.maximum(itself, first), num_leaving, num_prefix)


def by_attention(
    weight: Float[Tensor, "_ t"] | None,
    tokens: Float[Tensor, "b t c"],
    size: Float[Tensor, "_ t"] | None,
    attention: Float[Tensor, "b t"] | None,
    rule: Rule,
) -> Float[Tensor, "b t"]:
    """Weights times the attention per patch, to a power; without weights, sizes are used.

    Attention is measured in even shares; only ratios within a group matter.
    """
    weight = token_sizes(tokens, size) if weight is None else weight
    if rule.attended == 0 or attention is None:
        return weight
    k = rule.num_prefix
    each = attention.float() if size is None else attention / size.clamp_min(1)
    share = each[:, k:] * each.shape[1]
    # NaN also counts as the least share, since every token needs a place.
    factor = torch.where(share > _LEAST_SHARE, share, _LEAST_SHARE) ** rule.attended
    return weight * torch.nn.functional.pad(factor, (k, 0), value=1.0)


def _squares(x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n"]:
    x = x.float()
    return (x * x).sum(-1)  # ONNX Runtime takes three times as long for `square`


def _squared_distances(first: Tensor, own: Tensor, second: Tensor, theirs: Tensor) -> Tensor:
    """`|x_i - y_j|^2` by a product, given the squared lengths of both sides."""
    product = first @ second.mT
    apart = (own[:, :, None] + theirs[:, None]).to(product.dtype).sub(product, alpha=2)
    return _finite_or(apart)


def _tiles(x: Tensor | None, num_rows: int, num_columns: int) -> list[slice]:
    """The rows of each tile of pairs of tokens `x`.

    An exported graph gets one tile, since it cannot loop. On `meta`, where MACs are counted, two
    tiles give the same count as many.
    """
    step = max(_FEWEST_ROWS, _MOST_PAIRS // max(num_columns, 1))
    if is_recorded() or num_rows <= step or num_columns <= _MOST_WHOLE:
        return [slice(0, num_rows)]
    if x is None or x.is_meta:
        step = -(-num_rows // 2)
    return [slice(first, first + step) for first in range(0, num_rows, step)]


def _best_per_row(
    tiles: list[slice], find: Callable[[slice], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Find the best value of each row and its column, tile by tile."""
    values, columns = zip(*map(find, tiles), strict=True)
    return torch.cat(values, dim=1), torch.cat(columns, dim=1)


def _per_row(tiles: list[slice], find: Callable[[slice], Tensor]) -> Tensor:
    """Find something for each row, `b rows ...`, tile by tile."""
    found = [find(rows) for rows in tiles]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def _finite_or(x: Tensor, value: float | None = None) -> Tensor:
    """Replace NaN and infinity by a value, except in exported graphs, whose inputs are checked.

    The default is the largest finite number: farther than any token, nearer than excluded ones.
    """
    value = torch.finfo(x.dtype).max if value is None else value
    return x if is_recorded() else x.nan_to_num(value, value, value)


def _least_harm_free(
    tokens: Tensor, size: Tensor | None, attention: Tensor | None, rule: Rule
) -> Match:
    """Of two similar tokens, the less attended one leaves.

    So tokens are ranked by attention, and each is compared with those of higher rank.
    """
    unit, squares = _finite_pair(_centred(tokens))
    k, n = rule.num_prefix, unit.shape[1]
    rank = torch.arange(n, device=unit.device)[None] if attention is None else _ranks(attention)
    rank, tiles = 2 * rank.float(), _tiles(unit, n, n)
    # No token may join padding, which has size zero.
    theirs = squares if size is None else squares.masked_fill(size <= 0, torch.inf)
    inverse = None if size is None else size.clamp_min(1e-6).reciprocal()

    def apart(first: Float[Tensor, "b rows c"]) -> Float[Tensor, "b rows n"]:
        """Squared distances to all tokens, minus the squared lengths of the first."""
        return torch.baddbmm(theirs[:, None].to(first.dtype), first, unit.mT, alpha=-2)

    def least(rows: slice) -> Float[Tensor, "b rows"]:
        distance = apart(unit[:, rows]) if whole is None else whole
        distance = distance + squares[:, rows, None]
        if inverse is not None:  # 1 / m_i + 1 / m_j = (m_i + m_j) / (m_i m_j)
            distance = distance / (inverse[:, rows, None] + inverse[:, None])
        # Zero for tokens of higher rank, at least 2 for others, which makes them infinitely far. On
        # a CPU this is many times faster than filling by a mask.
        barred = (rank[:, rows, None] + 2 - rank[:, None]).clamp_min(0)
        return distance.add(barred, alpha=torch.finfo(distance.dtype).max).amin(dim=-1)

    whole = apart(unit) if len(tiles) == 1 else None
    seen = _seen(_per_row(tiles, least), attention, rule.protection)
    if size is not None:
        seen = seen.masked_fill(size <= 0, 0)  # padding leaves first
    patches = _smallest(seen, rule.num_leaving)
    leaving = rows_at(unit if whole is None else whole, patches)
    chosen = patches + k
    leaves = _marked(chosen, n + k)
    closed = torch.where(leaves[:, k:], torch.inf, 0.0)

    def nearest(rows: slice) -> Int[Tensor, "b rows"]:
        distance = apart(leaving[:, rows]) if whole is None else leaving[:, rows]
        return (_finite_or(distance) + closed[:, None]).argmin(dim=-1)

    goes = k + _per_row(_tiles(unit, rule.num_leaving, n), nearest)
    target = _put(goes, chosen, n + k)
    return Match(leaves=leaves, target=target, num_leaving=rule.num_leaving, num_prefix=k)


def _least_harm_alternate(
    tokens: Tensor, size: Tensor | None, attention: Tensor | None, rule: Rule
) -> Match:
    k, unit = rule.num_prefix, _centred(tokens)
    (first, second), (own, theirs) = ((x[:, ::2], x[:, 1::2]) for x in (unit, _squares(unit)))
    sizes = None if size is None else (size[:, ::2], size[:, 1::2])

    def best(rows: slice) -> tuple[Tensor, Tensor]:
        distance = _squared_distances(first[:, rows], own[:, rows], second, theirs)
        if sizes is not None:
            distance = distance * _ward(sizes[0][:, rows], sizes[1])
            distance = distance.masked_fill((sizes[1] <= 0)[:, None], torch.inf)
        return distance.min(dim=-1)

    cost, partner = _best_per_row(_tiles(unit, first.shape[1], second.shape[1]), best)
    even = None if attention is None else attention[:, ::2]
    chosen = _smallest(_seen(cost, even, rule.protection), rule.num_leaving)
    goes = 2 * partner.gather(1, chosen) + 1
    return _match_of(2 * chosen + k, goes + k, unit.shape[1] + k, k)


def _centred(tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
    """Tokens minus their mean; in half precision scaled, too, which keeps the order of distances.

    NaN and infinity count as zero in the mean and the scale.
    """
    apart = tokens - _finite_or(tokens, 0.0).mean(dim=1, keepdim=True)
    if widen(tokens) is tokens:
        return apart
    squares = _finite_or(apart.float().square().sum(-1), 0.0)
    scale = squares.mean(dim=1).clamp_min(1e-12).rsqrt()
    return apart * scale[:, None, None].to(tokens.dtype)


def _finite_pair(unit: Float[Tensor, "b n c"]) -> tuple[Tensor, Tensor]:
    """Tokens and their squared lengths; NaN and infinity put a token far from all others."""
    squares = _squares(unit)
    if is_recorded():
        return unit, squares
    far = torch.finfo(unit.dtype).max / 4
    return unit.nan_to_num_(0, 0, 0), squares.nan_to_num_(far, far, far)


def _ward(first: Float[Tensor, "b f"], second: Float[Tensor, "b s"]) -> Float[Tensor, "b f s"]:
    """`2 m_i m_j / (m_i + m_j)`, which is 1 if all sizes are one."""
    first, second = first[:, :, None], second[:, None]
    return 2 * first * second / (first + second).clamp_min(1e-6)


def _seen(
    cost: Float[Tensor, "b n"], attention: Float[Tensor, "b n"] | None, protection: float
) -> Float[Tensor, "b n"]:
    """The error weighted by attention: how much of it the rest of the network sees."""
    cost = cost.float().clamp_min(0)
    if attention is None:
        return cost
    return cost * attention.float().clamp_min(1e-12) ** protection


def _smallest(values: Float[Tensor, "b n"], number: int) -> Int[Tensor, "b r"]:
    return values.topk(number, dim=1, largest=False).indices


def _ascending(values: Float[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """The stable order from small to large.

    In ONNX it is a TopK, for which TensorRT needs a constant K.
    """
    if is_recorded():
        return values.topk(values.shape[1], dim=1, largest=False).indices
    return values.argsort(dim=1, stable=True)


def _ranks(values: Float[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """The place of each value in the stable order from small to large."""
    return _ascending(_ascending(values).float())


def _chosen_at(chosen: Int[Tensor, "b r"], num: int) -> Float[Tensor, "b r n"]:
    """The chosen tokens as one-hot rows, for exported graphs: TensorRT cannot scatter."""
    return (chosen[..., None] == torch.arange(num, device=chosen.device)).float()


def _marked(chosen: Int[Tensor, "b r"], num: int) -> Bool[Tensor, "b n"]:
    """A mask of the chosen tokens."""
    if is_recorded():
        return _chosen_at(chosen, num).amax(dim=1).bool()
    none = torch.zeros(chosen.shape[0], num, dtype=torch.bool, device=chosen.device)
    return none.scatter(1, chosen, True)


def _put(values: Int[Tensor, "b r"], chosen: Int[Tensor, "b r"], num: int) -> Int[Tensor, "b n"]:
    """The values of the chosen tokens at their places, zeros elsewhere."""
    if is_recorded():
        return (values.float()[:, None] @ _chosen_at(chosen, num))[:, 0].long()
    return values.new_zeros(values.shape[0], num).scatter(1, chosen, values)


def _match_of(
    chosen: Int[Tensor, "b r"], goes: Int[Tensor, "b r"], num_tokens: int, num_prefix: int
) -> Match:
    """The match in which the chosen tokens join the given ones."""
    return Match(
        leaves=_marked(chosen, num_tokens),
        target=_put(goes, chosen, num_tokens),
        num_leaving=chosen.shape[1],
        num_prefix=num_prefix,
    )


def max_leaving(num_patches: int, num_prefix: int = 0) -> int:
    """The most tokens that one alternate matching can remove: all even ones but the prefix."""
    total = num_patches + num_prefix
    first = (total + 1) // 2 - (num_prefix + 1) // 2
    return first if num_patches > first else 0


def _alternate_sides(
    metric: Float[Tensor, "b t d"], num_prefix: int
) -> tuple[Float[Tensor, "b f"], Int[Tensor, "b f"]]:
    """Each even token's largest cosine similarity to an odd token, and that token's index.

    Prefix tokens are on neither side. The index counts the whole sequence.
    """
    unit = torch.nn.functional.normalize(metric.detach().float(), dim=-1)
    first, second = unit[:, ::2], unit[:, 1::2]
    even_prefix, odd_prefix = (num_prefix + 1) // 2, num_prefix // 2

    def most_similar(rows: slice) -> tuple[Tensor, Tensor]:
        return _without_first(first[:, rows] @ second.mT, odd_prefix).max(dim=-1)

    best, partner = _best_per_row(_tiles(unit, first.shape[1], second.shape[1]), most_similar)
    return _without_first(best, even_prefix), 2 * partner + 1


def _without_first(scores: Float[Tensor, "... n"], number: int) -> Float[Tensor, "... n"]:
    """Scores with minus infinity for the first tokens, so that they are never chosen."""
    if number == 0:
        return scores
    place = torch.arange(scores.shape[-1], device=scores.device)
    return scores.masked_fill(place < number, -torch.inf)


def match_alternate(
    metric: Float[Tensor, "b t d"],
    num_leaving: int,
    *,
    num_prefix: int = 0,
) -> Match:
    """ToMe's bipartite soft matching: even tokens may join their most similar odd token.

    The `num_leaving` pairs with the largest similarity do.
    """
    num_tokens = metric.shape[1]
    allowed = max_leaving(num_tokens - num_prefix, num_prefix)
    if num_leaving > allowed:
        raise ValueError(
            f"num_leaving: got {num_leaving}; one matching of {num_tokens - num_prefix} tokens "
            f"can remove at most {allowed}."
        )
    best, partner = _alternate_sides(metric, num_prefix)
    if num_prefix:
        chosen, rank = best.topk(num_leaving, dim=1).indices, None
    else:
        order = _ascending(-best)
        rank, chosen = _ascending(order.float()), order[:, :num_leaving]
        rank = torch.stack([rank, rank], dim=2).flatten(1)[:, :num_tokens]
    found = _match_of(2 * chosen, partner.gather(1, chosen), num_tokens, num_prefix)
    return dataclasses.replace(found, rank=rank)


def match_most_similar(
    metric: Float[Tensor, "b t d"],
    num_leaving: int,
    *,
    num_prefix: int = 0,
) -> Match:
    """ToMe's matching, or one without sides if it cannot remove enough tokens."""
    enough = num_leaving <= max_leaving(metric.shape[1] - num_prefix, num_prefix)
    find = match_alternate if enough else match_freely
    return find(metric, num_leaving, num_prefix=num_prefix)


def merge_most_similar(
    metric: Float[Tensor, "b t d"],
    weight: Float[Tensor, "b t"],
    num_leaving: int,
    *,
    num_prefix: int = 0,
    in_order: bool = False,
    prune: bool = False,
    keep_norm: bool = False,
) -> MatchedMerge:
    """ToMe's merge: in its published order of tokens, or `in_order` of their positions."""
    match = match_most_similar(metric, num_leaving, num_prefix=num_prefix)
    merge = merge_in_order if in_order else merge_sides_apart
    return merge(match, weight, prune=prune, keep_norm=keep_norm)


def match_freely(
    metric: Float[Tensor, "b t d"],
    num_leaving: int,
    *,
    num_prefix: int = 0,
) -> Match:
    """Match without sides: the most redundant tokens join their most similar one that stays.

    A token's redundancy is its largest cosine similarity to any later token, so that only one of
    two similar tokens leaves.
    """
    num_tokens = metric.shape[1]
    if not 0 <= num_leaving < num_tokens - num_prefix:
        raise ValueError(
            f"num_leaving: got {num_leaving}; of {num_tokens - num_prefix} tokens at most "
            f"{num_tokens - num_prefix - 1} can leave."
        )
    unit = torch.nn.functional.normalize(metric.detach().float(), dim=-1)
    place = torch.arange(num_tokens, device=metric.device)
    tiles = _tiles(unit, num_tokens, num_tokens)

    def similarity(rows: slice) -> Float[Tensor, "b rows t"]:
        return _without_first(unit[:, rows] @ unit.mT, num_prefix)

    whole = similarity(tiles[0]) if len(tiles) == 1 else None

    def redundancy(rows: slice) -> Float[Tensor, "b rows"]:
        scores = similarity(rows) if whole is None else whole
        return scores.masked_fill(place[rows, None] >= place, -2.0).amax(dim=-1)

    best = _without_first(_per_row(tiles, redundancy), num_prefix)
    leaves = _marked(best.topk(num_leaving, dim=1).indices, num_tokens)

    def nearest(rows: slice) -> Int[Tensor, "b rows"]:
        scores = similarity(rows) if whole is None else whole
        return scores.masked_fill(leaves[:, None, :], -torch.inf).argmax(dim=-1)

    target = _per_row(tiles, nearest)
    return Match(leaves=leaves, target=target, num_leaving=num_leaving, num_prefix=num_prefix)


def merge_in_order(
    match: Match, weight: Float[Tensor, "b t"], *, prune: bool = False, keep_norm: bool = False
) -> MatchedMerge:
    """The match as a merge that keeps tokens in their (spatial) order."""
    return _merge_at(match, None, weight, prune, keep_norm)


def merge_sides_apart(
    match: Match, weight: Float[Tensor, "b t"], *, prune: bool = False, keep_norm: bool = False
) -> MatchedMerge:
    """The match as a merge in ToMe's published order: prefix, even tokens that stay, odd tokens.

    The order is part of the method, since it determines the sides in the next block. As published,
    even tokens keep their order if there is a prefix, and are sorted by similarity if not.
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
        leaves=match.leaves,
        num_prefix=match.num_prefix,
    )


def _arguments(rule: Rule) -> tuple[int, int, float, float, float, bool, bool]:
    """The rule as arguments of the kernels."""
    powers = rule.protection, rule.attended, _LEAST_SHARE
    return rule.num_leaving, rule.num_prefix, *powers, rule.prune, rule.alternate


def _ordered(
    rule: Rule, assignment: Tensor, stays: Tensor, leaves: Tensor, goes: Tensor, weight: Tensor
) -> MatchedMerge:
    """A merge from what a kernel found."""
    return MatchedMerge(
        assignment=assignment,
        weight=weight,
        num_places=stays.shape[1],
        keep_norm=rule.keep_norm,
        order=(stays, leaves, goes),
        num_prefix=rule.num_prefix,
    )


@operator
def _assign(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    weight: Tensor | None,
    num_leaving: int,
    num_prefix: int,
    protection: float,
    power: float,
    least: float,
    prune: bool,
    alternate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_places(tokens, num_leaving)


def _empty_places(
    tokens: Tensor, num_leaving: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    b, t = tokens.shape[:2]
    return (
        tokens.new_empty(b, t, dtype=torch.int64),
        tokens.new_empty(b, t - num_leaving, dtype=torch.int32),
        tokens.new_empty(b, num_leaving, dtype=torch.int32),
        tokens.new_empty(b, num_leaving, dtype=torch.int32),
        tokens.new_empty(b, t, dtype=torch.float32),
    )


@operator
def _inform_and_assign(
    tokens: Tensor,
    size: Tensor | None,
    attention: Tensor | None,
    carry: Tensor | None,
    gain: Tensor | None,
    centroids: Tensor,
    offsets: Tensor,
    costs: Tensor,
    beta: float,
    eta: float,
    num_leaving: int,
    num_prefix: int,
    protection: float,
    power: float,
    least: float,
    prune: bool,
    alternate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    b, t = tokens.shape[:2]
    logits = tokens.new_empty(b, t - num_prefix, dtype=torch.float32)
    return *_empty_places(tokens, num_leaving), logits


def _pair_flops(tokens: list[int], num_leaving: int, num_prefix: int, *, alternate: bool) -> int:
    """Operations that the torch definition spends on pairs."""
    b, n, c = tokens[0], tokens[1] - num_prefix, tokens[2]
    if alternate and num_leaving <= n // 2:
        return 2 * b * (n // 2) * (n - n // 2) * c
    again = num_leaving if len(_tiles(None, n, n)) > 1 else 0  # compared in both passes
    return 2 * b * (n + again) * n * c


@register_flop_formula(torch.ops.ltm.assign)
def _(tokens: list[int], *arguments: Any, **_: Any) -> int:
    return _pair_flops(tokens, *arguments[3:5], alternate=arguments[-1])


@register_flop_formula(torch.ops.ltm.inform_and_assign)
def _(tokens: list[int], *arguments: Any, **_: Any) -> int:
    num_classes, num_prefix = arguments[4][0], arguments[10]
    pairs = _pair_flops(tokens, *arguments[9:11], alternate=arguments[-1])
    return pairs + step_flops(tokens, num_prefix, num_classes)

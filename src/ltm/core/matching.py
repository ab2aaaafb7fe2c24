"""Matching: which tokens leave and where to; and the ways to turn a match into a Merge.

There are two rules. ToMe's joins the most similar pairs of two sides. LTM's takes the merges that
do least harm.

Merging token i into token j moves both. Ward's criterion is the squared error this makes; what
counts is how much of it the rest of the network sees, so it is weighed by the attention that i
receives:

    harm(i, j) = m_i m_j / (m_i + m_j) * |z_i - z_j|^2 * a_i ^ protection

Only the order of the harms within an image matters, so none of the factors needs a unit. In the
merge a token weighs by its size, by the attention it receives, and by the informative step: one
step down the gradient of the bound.

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
"""Attention below this part of an even share counts as this much, so that no weight vanishes."""
_MOST_WHOLE = 1024
"""Tokens whose pairs are all stored: those that leave need not be compared once more."""
_MOST_PAIRS = 2**18
"""Pairs of tokens of an image that are stored at once; longer sequences go tile by tile."""
_FEWEST_ROWS = 64
"""Tokens of a tile that are compared with all others, however many those are."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How many tokens leave, and by what rule."""

    num_leaving: int
    num_prefix: int = 0
    protection: float = 0.0
    """The power of the attention that protects a token."""
    attended: float = 0.0
    """The power of the attention by which tokens weigh more in their group."""
    prune: bool = False
    """Tokens that leave weigh nothing."""
    keep_norm: bool = False
    """Merged tokens keep the largest norm of their group."""
    alternate: bool = False
    """Even patches may leave, and only to odd ones (ToMe's sides), as long as half is enough."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Match:
    """Which tokens leave, and which one each joins: `target` matters where `leaves` is true."""

    leaves: Bool[Tensor, "b t"]
    target: Int[Tensor, "b t"]
    num_leaving: int
    num_prefix: int
    rank: Int[Tensor, "b t"] | None = None
    """Without prefix: the place of each even token when sorted by falling similarity."""

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
        """The place of each token after the merge; unless given, tokens that stay keep order."""
        if places is None:
            places = torch.cumsum(~self.leaves, dim=1) - 1
        return torch.where(self.leaves, places.gather(1, self.target), places)


class Outcome(NamedTuple):
    """The outcome of a match."""

    merge: MatchedMerge
    logits: Float[Tensor, "_ n"] | None
    """The state of the patches after the informative step, where there is one."""


def match(
    tokens: Float[Tensor, "b t c"],
    rule: Rule,
    *,
    size: Float[Tensor, "_ t"] | None = None,
    attention: Float[Tensor, "b t"] | None = None,
    carry: Float[Tensor, "_ n"] | None = None,
    step: Step | None = None,
) -> Outcome:
    """Tokens whose best merge does least harm leave, each to the nearest that stays.

    `size` is None while all sizes are one; `attention` is what each token receives. Tokens weigh by
    the informative `step`, or else by the logits handed on in `carry`, or else by size alone.
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
        # Who leaves has no gradient: a kernel finds it in training too, but no weights then.
        given = size, attention, weight
        fixed: list[Any] = [None if x is None else x.detach() for x in given]
        assign: Any = _assign  # an operator, whose signature pyright does not see
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
    """Who leaves, and where to, without weights.

    `alternate` saves three quarters of the comparisons, where half of the tokens at most leave.
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
    chosen, goes = find(tokens[:, k:].detach(), size, attention, rule)
    return _match_of(chosen + k, goes + k, tokens.shape[1], k)


def match_unimportant(
    attention: Float[Tensor, "b n"], num_leaving: int, *, num_prefix: int
) -> Match:
    """The tokens that receive least attention leave, whatever they are like.

    For spreading merged tokens back, each belongs to the token that stays before it.
    """
    leaves = _marked(_smallest(attention, num_leaving), attention.shape[1])
    # In order, a token that leaves has the place of the last one that stayed before it.
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
    """Weights times the attention that each patch of a token receives, to a power.

    Attention is taken against an even share of it; only its ratios within a group matter. Without
    weights, tokens weigh as much as their size.
    """
    weight = token_sizes(tokens, size) if weight is None else weight
    if rule.attended == 0 or attention is None:
        return weight
    k = rule.num_prefix
    each = attention.float() if size is None else attention / size.clamp_min(1)
    share = each * each.shape[1]
    # What is no number counts least as well: who goes where has to be known in any case.
    factor = torch.where(share > _LEAST_SHARE, share, _LEAST_SHARE) ** rule.attended
    return torch.cat([weight[:, :k].expand(factor.shape[0], -1), (weight * factor)[:, k:]], dim=1)


def squared_distances(
    first: Float[Tensor, "b f c"], second: Float[Tensor, "b s c"] | None = None
) -> Float[Tensor, "b f s"]:
    """`|x_i - y_j|^2` in one product; between all of the first where there is no second."""
    own = _squares(first)
    second, theirs = (first, own) if second is None else (second, _squares(second))
    return _apart(first, own, second, theirs)


def _squares(x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n"]:
    return x.float().square().sum(-1)


def _apart(first: Tensor, own: Tensor, second: Tensor, theirs: Tensor) -> Tensor:
    """Squared distances of tokens whose squared lengths are known."""
    product = first @ second.mT
    apart = (own[:, :, None] + theirs[:, None]).to(product.dtype).sub(product, alpha=2)
    return _finite_or(apart)


def _tiles(x: Tensor | None, num_rows: int, num_columns: int) -> list[slice]:
    """The rows of each tile of pairs of tokens `x`.

    An exported graph has one tile: it cannot loop. On the meta device, where multiply-adds are
    counted, two tiles tell as much as many.
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
    """The best value of the rows of every tile, and who has it."""
    values, who = zip(*map(find, tiles), strict=True)
    return torch.cat(values, dim=1), torch.cat(who, dim=1)


def _per_row(tiles: list[slice], find: Callable[[slice], Tensor]) -> Tensor:
    """What is found for the rows of every tile, `b rows ...`."""
    found = [find(rows) for rows in tiles]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def _finite_or(x: Tensor, value: float | None = None) -> Tensor:
    """Another value for NaN and infinity; recorded graphs, which are checked, do without.

    By default they are far from everything, but not as far as what is closed.
    """
    value = torch.finfo(x.dtype).max if value is None else value
    return x if is_recorded() else x.nan_to_num(value, value, value)


def _least_harm_free(
    tokens: Tensor, size: Tensor | None, attention: Tensor | None, rule: Rule
) -> tuple[Int[Tensor, "b r"], Int[Tensor, "b r"]]:
    """Who leaves, and where to. Of two alike the one that receives less attention leaves.

    So tokens are compared in the order of their attention, each with those after it.
    """
    order = None if attention is None else _ascending(attention)
    if attention is not None and order is not None:
        tokens, given = rows_at(tokens, order), (size, attention)
        size, attention = (
            None if x is None else x.expand_as(order).gather(1, order) for x in given
        )
    unit = _centred(tokens)
    squares, tiles = _squares(unit), _tiles(unit, unit.shape[1], unit.shape[1])
    # Nothing goes to a token that stands for nothing (padding).
    theirs = squares if size is None else squares.masked_fill(size <= 0, torch.inf)
    inverse = None if size is None else 0.5 / size.clamp_min(1e-6)

    def apart(first: Float[Tensor, "b rows c"]) -> Float[Tensor, "b rows n"]:
        """Squared distances to all tokens, less the squared length of the first."""
        return torch.baddbmm(theirs[:, None].to(first.dtype), first, unit.mT, alpha=-2)

    def least(rows: slice) -> Float[Tensor, "b rows"]:
        distance = apart(unit[:, rows]) if whole is None else whole
        # Sums: filling by a mask is many times slower on a processor.
        before = torch.full(distance.shape[1:], torch.inf, device=unit.device).tril(rows.start)
        if inverse is None:
            return (distance + before).amin(dim=-1) + squares[:, rows]
        ward = inverse[:, rows, None] + inverse[:, None]  # (m_i + m_j) / (2 m_i m_j)
        return ((distance + squares[:, rows, None]) / ward + before).amin(dim=-1)

    whole = apart(unit) if len(tiles) == 1 else None
    seen = _seen(_per_row(tiles, least), attention, rule.protection)
    if size is not None:
        seen = seen.masked_fill(size <= 0, 0)  # what is not there leaves first
    chosen = _smallest(seen, rule.num_leaving)
    closed = torch.zeros_like(seen).masked_fill(_marked(chosen, seen.shape[1]), torch.inf)
    leaving = rows_at(unit if whole is None else whole, chosen)

    def nearest(rows: slice) -> Int[Tensor, "b rows"]:
        distance = apart(leaving[:, rows]) if whole is None else leaving[:, rows]
        return (_finite_or(distance) + closed[:, None]).argmin(dim=-1)

    goes = _per_row(_tiles(unit, rule.num_leaving, unit.shape[1]), nearest)
    return (chosen, goes) if order is None else (order.gather(1, chosen), order.gather(1, goes))


def _least_harm_alternate(
    tokens: Tensor, size: Tensor | None, attention: Tensor | None, rule: Rule
) -> tuple[Int[Tensor, "b r"], Int[Tensor, "b r"]]:
    unit = _centred(tokens)
    (first, second), (own, theirs) = ((x[:, ::2], x[:, 1::2]) for x in (unit, _squares(unit)))
    sizes = None if size is None else (size[:, ::2], size[:, 1::2])

    def best(rows: slice) -> tuple[Tensor, Tensor]:
        distance = _apart(first[:, rows], own[:, rows], second, theirs)
        if sizes is not None:
            distance = distance * _ward(sizes[0][:, rows], sizes[1])
            distance = distance.masked_fill((sizes[1] <= 0)[:, None], torch.inf)
        return distance.min(dim=-1)

    cost, partner = _best_per_row(_tiles(unit, first.shape[1], second.shape[1]), best)
    even = None if attention is None else attention[:, ::2]
    chosen = _smallest(_seen(cost, even, rule.protection), rule.num_leaving)
    return 2 * chosen, 2 * partner.gather(1, chosen) + 1


def _centred(tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
    """Tokens about their mean, in half precision at a common scale: the order of distances stays.

    What is not finite is no part of the mean.
    """
    apart = tokens - _finite_or(tokens, 0.0).mean(dim=1, keepdim=True)
    if widen(tokens) is tokens:
        return apart
    squares = _finite_or(apart.float().square().sum(-1), 0.0)
    scale = squares.mean(dim=1).clamp_min(1e-12).rsqrt()
    return apart * scale[:, None, None].to(tokens.dtype)


def _ward(first: Float[Tensor, "b f"], second: Float[Tensor, "b s"]) -> Float[Tensor, "b f s"]:
    """`m_i m_j / (m_i + m_j)`, twice: 1 where all sizes are one."""
    first, second = first[:, :, None], second[:, None]
    return 2 * first * second / (first + second).clamp_min(1e-6)


def _seen(
    cost: Float[Tensor, "b n"], attention: Float[Tensor, "b n"] | None, protection: float
) -> Float[Tensor, "b n"]:
    """The part of an error that others see."""
    cost = cost.float().clamp_min(0)
    if attention is None:
        return cost
    return cost * attention.float().clamp_min(1e-12) ** protection


def _smallest(values: Float[Tensor, "b n"], number: int) -> Int[Tensor, "b r"]:
    return values.topk(number, dim=1, largest=False).indices


def _ascending(values: Float[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """The order from small to large; of equals the first comes first.

    In ONNX that is TopK, which TensorRT takes with a constant K alone.
    """
    if is_recorded():
        return values.topk(values.shape[1], dim=1, largest=False).indices
    return values.argsort(dim=1, stable=True)


def _chosen_at(chosen: Int[Tensor, "b r"], num: int) -> Bool[Tensor, "b r n"]:
    """Which token each of the chosen is: for exported graphs, since TensorRT scatters nothing."""
    return chosen[..., None] == torch.arange(num, device=chosen.device)


def _marked(chosen: Int[Tensor, "b r"], num: int) -> Bool[Tensor, "b n"]:
    """True for those that are chosen."""
    if is_recorded():
        return _chosen_at(chosen, num).any(dim=1)
    none = torch.zeros(chosen.shape[0], num, dtype=torch.bool, device=chosen.device)
    return none.scatter(1, chosen, True)


def _put(values: Int[Tensor, "b r"], chosen: Int[Tensor, "b r"], num: int) -> Int[Tensor, "b n"]:
    """The values of those that are chosen; zero for the others."""
    if is_recorded():
        return (values.float()[:, None] @ _chosen_at(chosen, num).float())[:, 0].long()
    return values.new_zeros(values.shape[0], num).scatter(1, chosen, values)


def _match_of(
    chosen: Int[Tensor, "b r"], goes: Int[Tensor, "b r"], num_tokens: int, num_prefix: int
) -> Match:
    """The match in which the chosen tokens leave to others."""
    return Match(
        leaves=_marked(chosen, num_tokens),
        target=_put(goes, chosen, num_tokens),
        num_leaving=chosen.shape[1],
        num_prefix=num_prefix,
    )


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
    unit = torch.nn.functional.normalize(metric.detach().float(), dim=-1)
    first, second = unit[:, ::2], unit[:, 1::2]
    even_prefix, odd_prefix = (num_prefix + 1) // 2, num_prefix // 2

    def most_similar(rows: slice) -> tuple[Tensor, Tensor]:
        return _without_first(first[:, rows] @ second.mT, odd_prefix).max(dim=-1)

    best, partner = _best_per_row(_tiles(unit, first.shape[1], second.shape[1]), most_similar)
    return _without_first(best, even_prefix), 2 * partner + 1


def _without_first(scores: Float[Tensor, "... n"], number: int) -> Float[Tensor, "... n"]:
    """Scores with the first so low that nobody takes them."""
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
    """Alternate matching where it can remove enough, matching without sides where it cannot."""
    if num_leaving <= max_leaving(metric.shape[1] - num_prefix, num_prefix):
        return match_alternate(metric, num_leaving, num_prefix=num_prefix)
    return match_freely(metric, num_leaving, num_prefix=num_prefix)


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
    unit = torch.nn.functional.normalize(metric.detach().float(), dim=-1)
    place, tiles = (
        torch.arange(num_tokens, device=metric.device),
        _tiles(unit, num_tokens, num_tokens),
    )

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
        leaves=match.leaves,
        num_prefix=match.num_prefix,
    )


def _arguments(rule: Rule) -> tuple[int, int, float, float, float, bool, bool]:
    """What the kernels take of a rule, in their order."""
    powers = rule.protection, rule.attended, _LEAST_SHARE
    return rule.num_leaving, rule.num_prefix, *powers, rule.prune, rule.alternate


def _ordered(
    rule: Rule, assignment: Tensor, stays: Tensor, leaves: Tensor, goes: Tensor, weight: Tensor
) -> MatchedMerge:
    """The merge that a kernel found."""
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
    """Operations of the pairs, as counted in the torch definition."""
    b, n, c = tokens[0], tokens[1] - num_prefix, tokens[2]
    if alternate and num_leaving <= n // 2:
        return 2 * b * (n // 2) * (n - n // 2) * c
    again = (
        num_leaving if len(_tiles(None, n, n)) > 1 else 0
    )  # those that leave are compared once more
    return 2 * b * (n + again) * n * c


@register_flop_formula(torch.ops.ltm.assign)
def _(tokens: list[int], *arguments: Any, **_: Any) -> int:
    return _pair_flops(tokens, *arguments[3:5], alternate=arguments[-1])


@register_flop_formula(torch.ops.ltm.inform_and_assign)
def _(tokens: list[int], *arguments: Any, **_: Any) -> int:
    num_classes, num_prefix = arguments[4][0], arguments[10]
    pairs = _pair_flops(tokens, *arguments[9:11], alternate=arguments[-1])
    return pairs + step_flops(tokens, num_prefix, num_classes)

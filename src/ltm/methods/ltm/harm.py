"""Which tokens leave, and where to: the merges that do least harm.

Merging token i into token j moves both. Ward's criterion is the squared error this makes; what
counts is how much of it the rest of the network sees, so it is weighed by the attention that i
receives:

    harm(i, j) = m_i m_j / (m_i + m_j) * |z_i - z_j|^2 * a_i ^ protection

Only the order of the harms within an image matters, so none of the factors needs a unit.

Letters: b images, n patch tokens, r tokens that leave, c channels; f and s the two sides of an
alternate matching; z tokens, m sizes, a attention received.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ltm.core.matching import Match


@dataclass(frozen=True, eq=False, kw_only=True)
class Patches:
    """The patch tokens of a block, prefix left out."""

    tokens: Float[Tensor, "b n c"]
    size: Float[Tensor, "b n"] | None = None
    """None while all sizes are one."""
    attention: Float[Tensor, "b n"] | None = None
    """What protects a token; None protects none."""


def match_least_harm(
    patches: Patches, num_leaving: int, *, protection: float, alternate: bool, num_prefix: int
) -> Match:
    """Tokens whose best merge does least harm leave, each to the nearest that stays.

    With `alternate`, even patches may leave to odd ones only (ToMe's sides): a quarter of the
    comparisons, where half of the tokens at most have to leave.
    """
    num_patches = patches.tokens.shape[1]
    if not 0 <= num_leaving < num_patches:
        raise ValueError(
            f"num_leaving: got {num_leaving}; of {num_patches} tokens at most "
            f"{num_patches - 1} can leave."
        )
    if alternate and num_leaving <= num_patches // 2:
        leaves, target = _least_harm_alternate(patches, num_leaving, protection)
    else:
        leaves, target = _least_harm_free(patches, num_leaving, protection)
    return _with_prefix(leaves, target, num_leaving, num_prefix)


def match_unimportant(
    attention: Float[Tensor, "b n"], num_leaving: int, *, num_prefix: int
) -> Match:
    """The tokens that receive least attention leave, whatever they are like.

    For spreading merged tokens back, each belongs to the token that stays before it.
    """
    leaves = _smallest(attention, num_leaving)
    # In order, a token that leaves has the place of the last one that stayed before it.
    itself = torch.arange(leaves.shape[1], device=leaves.device)
    first = (~leaves).float().argmax(dim=1, keepdim=True)
    return _with_prefix(leaves, torch.maximum(itself, first), num_leaving, num_prefix)


def squared_distances(
    first: Float[Tensor, "b f c"], second: Float[Tensor, "b s c"]
) -> Float[Tensor, "b f s"]:
    """`|x_i - y_j|^2` in one product."""
    squares = first.float().square().sum(-1)[:, :, None], second.float().square().sum(-1)[:, None]
    product = first @ second.mT
    return (squares[0] + squares[1]).to(product.dtype) - 2 * product


def _least_harm_free(
    patches: Patches, num_leaving: int, protection: float
) -> tuple[Bool[Tensor, "b n"], Int[Tensor, "b n"]]:
    unit = _centred(patches.tokens)
    distance = squared_distances(unit, unit)
    size, attention = patches.size, patches.attention
    # Of two alike the one that matters less leaves, so that they do not leave to each other.
    rank = torch.arange(distance.shape[1], device=distance.device)[None]
    if attention is not None:
        rank = attention.argsort(dim=1, stable=True).argsort(dim=1)
    closed = _absent(rank[:, :, None] >= rank[:, None, :], size)
    cost = (distance * _ward(size, size)).masked_fill(closed, torch.inf).amin(dim=-1)
    seen = _seen(cost, attention, protection)
    if size is not None:
        seen = seen.masked_fill(size <= 0, 0)  # what is not there leaves first
    leaves = _smallest(seen, num_leaving)
    target = distance.masked_fill(_absent(leaves[:, None], size), torch.inf).argmin(dim=-1)
    return leaves, target


def _least_harm_alternate(
    patches: Patches, num_leaving: int, protection: float
) -> tuple[Bool[Tensor, "b n"], Int[Tensor, "b n"]]:
    unit = _centred(patches.tokens)
    distance = squared_distances(unit[:, ::2], unit[:, 1::2])
    size, attention = patches.size, patches.attention
    if size is not None:
        distance = distance * _ward(size[:, ::2], size[:, 1::2])
        distance = distance.masked_fill((size[:, 1::2] <= 0)[:, None], torch.inf)
    cost, partner = distance.min(dim=-1)
    even = None if attention is None else attention[:, ::2]
    chosen = _smallest(_seen(cost, even, protection), num_leaving)
    leaves = torch.zeros(unit.shape[:2], dtype=torch.bool, device=unit.device)
    target = torch.zeros(unit.shape[:2], dtype=partner.dtype, device=unit.device)
    leaves[:, ::2], target[:, ::2] = chosen, 2 * partner + 1
    return leaves, target


def _centred(tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
    """Tokens about their mean, at a common scale: the same order of distances, exact in half."""
    apart = tokens - tokens.mean(dim=1, keepdim=True)
    scale = apart.float().square().sum(-1).mean(dim=1).clamp_min(1e-12).rsqrt()
    return apart * scale[:, None, None].to(tokens.dtype)


def _ward(
    first: Float[Tensor, "b f"] | None, second: Float[Tensor, "b s"] | None
) -> Float[Tensor, "b f s"] | float:
    """`m_i m_j / (m_i + m_j)`, twice: 1 where all sizes are one."""
    if first is None or second is None:
        return 1.0
    first, second = first[:, :, None], second[:, None]
    return 2 * first * second / (first + second).clamp_min(1e-6)


def _absent(closed: Bool[Tensor, "_ _ s"], size: Float[Tensor, "b s"] | None) -> Tensor:
    """Where nothing may go: nor to a token that stands for nothing (padding)."""
    return closed if size is None else closed | (size <= 0)[:, None]


def _seen(
    cost: Float[Tensor, "b n"], attention: Float[Tensor, "b n"] | None, protection: float
) -> Float[Tensor, "b n"]:
    """The part of an error that others see."""
    cost = cost.float().clamp_min(0)
    if attention is None:
        return cost
    return cost * attention.float().clamp_min(1e-12) ** protection


def _smallest(values: Float[Tensor, "b n"], number: int) -> Bool[Tensor, "b n"]:
    chosen = values.topk(number, dim=1, largest=False).indices
    return torch.zeros_like(values, dtype=torch.bool).scatter(1, chosen, 1)


def _with_prefix(leaves: Tensor, target: Tensor, num_leaving: int, num_prefix: int) -> Match:
    pad = torch.nn.functional.pad
    return Match(
        leaves=pad(leaves, (num_prefix, 0)),
        target=pad(target + num_prefix, (num_prefix, 0)),
        num_leaving=num_leaving,
        num_prefix=num_prefix,
    )

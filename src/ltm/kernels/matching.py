"""Which tokens leave, where to, and what every token weighs: the merges that do least harm.

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

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from ltm.kernels.dispatch import (
    ZERO_LENGTH,
    full_precision,
    operator,
    uses_triton,
    widen,
)

_MAX_TOKENS, _MAX_CHANNELS = 256, 1024
"""Longer sequences and wider tokens use the torch path."""
_LEAST_SHARE = 1e-4
"""Attention below this part of an even share counts as this much, so that no weight vanishes."""

_MAX_WEIGHED = 4096
"""More tokens than this are not weighed in one program."""
_MAX_LOGIT = 8.0
"""Logits are bounded, so that no target's weights can vanish."""


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
    alternate: bool = False
    """Even patches may leave, and only to odd ones (ToMe's sides), as long as half is enough."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Match:
    """Who leaves, and where to. `target` only counts where `leaves` holds."""

    leaves: Bool[Tensor, "b t"]
    target: Int[Tensor, "b t"]
    num_leaving: int
    num_prefix: int
    rank: Int[Tensor, "b t"] | None = None
    """Without prefix: the place of each even token when sorted by falling similarity."""

    def assignment(self, places: Int[Tensor, "b t"] | None = None) -> Int[Tensor, "b t"]:
        """The place of each token after the merge; unless given, tokens that stay keep order."""
        if places is None:
            places = torch.cumsum(~self.leaves, dim=1) - 1
        return torch.where(self.leaves, places.gather(1, self.target), places)


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """What the informative step needs to know besides the tokens."""

    centroids: Float[Tensor, "y d"]
    offsets: Float[Tensor, "y"]
    """What class membership needs of the classes alone."""
    costs: Float[Tensor, "y y"]
    """`-log Q(a | y)`, transposed: soft labels times this are the costs psi."""
    beta: float
    eta: float
    gain: Tensor | None = None
    """The length of the step in units of its own spread; None takes the step as it is."""
    labels: Int[Tensor, "b"] | None = None
    """True labels; None: the membership of each image stands for them."""
    mapping: nn.Module | None = None
    """A layer that is added to the tokens before the step looks at them."""

    def looks_at(self, patches: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """The patches as the step sees them."""
        layer: Any = self.mapping
        if layer is None:
            return patches
        return patches + layer(patches.to(layer.weight.dtype)).to(patches.dtype)

    def direction(self, feature: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """The gradient of the bound with respect to the feature, V in the paper's proposition."""
        return bound_gradient(
            feature, self.centroids, self.offsets, self.costs, beta=self.beta, labels=self.labels
        )

    @property
    def has_kernel(self) -> bool:
        return self.labels is None and self.mapping is None

    def arguments(self) -> tuple[Tensor | None, Tensor, Tensor, Tensor, float, float]:
        """What the kernels take of it, in their order."""
        return self.gain, self.centroids, self.offsets, self.costs, self.beta, self.eta


class Placement(NamedTuple):
    """The outcome of a match."""

    assignment: Int[Tensor, "b t"]
    """The place of each token after the merge."""
    weight: Float[Tensor, "b t"]
    logits: Float[Tensor, "_ n"] | None
    """The state of the patches after the informative step, where there is one."""
    order: tuple[Int[Tensor, "b p"], Int[Tensor, "b r"]] | None
    """Who stays and who leaves, where a kernel has found it."""


def match(
    tokens: Float[Tensor, "b t c"],
    rule: Rule,
    *,
    size: Float[Tensor, "_ t"] | None = None,
    attention: Float[Tensor, "b t"] | None = None,
    carry: Float[Tensor, "_ n"] | None = None,
    step: Step | None = None,
) -> Placement:
    """Tokens whose best merge does least harm leave, each to the nearest that stays.

    `size` is None while all sizes are one; `attention` is what each token receives. Tokens weigh by
    the informative `step`, or else by the logits handed on in `carry`, or else by size alone.
    """
    by_kernel = not rule.alternate and _fits(tokens)
    at_once = step is not None and by_kernel and _weighs_by_kernel(tokens, carry, step)
    if at_once and uses_triton(tokens, size, attention):
        assert step is not None
        *places, logits = _inform_and_assign(
            tokens, size, attention, carry, *step.arguments(), *_arguments(rule)
        )
        return _placed(places, logits)
    logits, weight = weigh(tokens, size, carry, step, rule.num_prefix)
    if by_kernel and uses_triton(tokens.detach()):
        # Who leaves has no gradient: a kernel finds it in training too, but no weights then.
        known = size, attention, weight
        fixed: list[Any] = [None if x is None else x.detach() for x in known]
        places: list[Any]
        *places, weighed = _assign(tokens.detach(), *fixed, *_arguments(rule))  # pyright: ignore[reportCallIssue]
        if not uses_triton(tokens.detach(), *known):
            weighed = by_attention(weight, tokens, size, attention, rule)
            weighed = weighed.scatter(1, places[2].long(), 0.0) if rule.prune else weighed
        return _placed([*places, weighed], logits)
    found = match_least_harm(tokens, rule, size=size, attention=attention)
    weight = by_attention(weight, tokens, size, attention, rule)
    weight = weight * ~found.leaves if rule.prune else weight
    return Placement(found.assignment(), weight, logits, None)


def weigh(
    tokens: Float[Tensor, "b t c"],
    size: Float[Tensor, "_ t"] | None,
    carry: Float[Tensor, "_ n"] | None,
    step: Step | None,
    num_prefix: int,
) -> tuple[Float[Tensor, "_ n"] | None, Float[Tensor, "b t"] | None]:
    """The logits of the patches after the step, `carry - eta dIBB/dG`; the weights of all tokens.

    `size` is None while all sizes are one, `carry` where logits start from zero. Without a step
    logits stay what they are. Without logits there are no weights: tokens weigh by size.
    """
    if step is not None and _weighs_by_kernel(tokens, carry, step):
        return _inform(tokens, size, carry, *step.arguments(), num_prefix)
    if step is None and carry is None:
        return None, None
    size, logits = _sizes_or_ones(tokens, size), carry
    if step is not None:
        logits = _stepped(tokens[:, num_prefix:], size[:, num_prefix:], carry, step)
    assert logits is not None
    weight = size[:, num_prefix:] * logits.exp()
    return logits, torch.cat([size[:, :num_prefix], weight], dim=1)


def _weighs_by_kernel(tokens: Tensor, carry: Tensor | None, step: Step) -> bool:
    """Whether Triton takes this step on these tokens."""
    fits = step.has_kernel and tokens.shape[1] <= _MAX_WEIGHED
    return fits and uses_triton(tokens, carry, step.gain)


def _sizes_or_ones(
    tokens: Float[Tensor, "b t c"], size: Float[Tensor, "_ t"] | None
) -> Float[Tensor, "b t"]:
    """The sizes of the tokens of every image, ones where there are none yet."""
    if size is None:
        return tokens.new_ones(tokens.shape[:2]).float()
    return size.float().expand(tokens.shape[0], -1)


def _stepped(
    patches: Float[Tensor, "b n c"], size: Float[Tensor, "b n"], carry: Tensor | None, step: Step
) -> Float[Tensor, "b n"]:
    tokens = step.looks_at(patches)
    share = size / size.sum(1, keepdim=True)
    feature = (share[:, None].to(tokens.dtype) @ tokens)[:, 0]
    logits = -pooled_gradient(tokens, step.direction(feature))
    if step.gain is not None:
        spread = logits.std(dim=1, keepdim=True, correction=0)
        logits = step.gain * (logits - logits.mean(dim=1, keepdim=True)) / (spread + 1e-6)
    logits = step.eta * logits
    if carry is not None:
        logits = logits + carry
    return logits.clamp(-_MAX_LOGIT, _MAX_LOGIT)


def bound_gradient(
    features: Float[Tensor, "b d"],
    centroids: Float[Tensor, "y d"],
    offsets: Float[Tensor, "y"],
    costs: Float[Tensor, "y y"],
    *,
    beta: float,
    labels: Int[Tensor, "b"] | None = None,
) -> Float[Tensor, "b d"]:
    """`core.mask_gradient.feature_gradient` in few operations, some classes being present.

    `costs` are `-log Q`, transposed; without labels they are weighed by the membership itself.
    Products are in the precision of the centroids.
    """
    with full_precision(features):
        x = widen(features)
        length = cast("Tensor", torch.linalg.vector_norm(x, dim=-1, keepdim=True))  # pyright: ignore[reportUnknownMemberType]
        unit = x / length.clamp_min(ZERO_LENGTH)
        logits = torch.addmm(offsets, unit.to(centroids.dtype), centroids.mT, alpha=2 * beta)
        phi = widen(logits).softmax(-1)
        psi = phi.detach().to(costs.dtype) @ costs if labels is None else costs[labels]
        weights = 2 * beta * phi * (psi - (phi * psi).sum(-1, keepdim=True))
        gradient = (weights.to(centroids.dtype) @ centroids).to(unit.dtype)
        across = gradient - (gradient * unit).sum(-1, keepdim=True) * unit
        return torch.where(length > ZERO_LENGTH, across / length.clamp_min(ZERO_LENGTH), 0)


def pooled_gradient(
    tokens: Float[Tensor, "b n d"], gradient: Float[Tensor, "b d"]
) -> Float[Tensor, "b n"]:
    """Pooled space: one gradient per token, `z_n . v`, the same for every merged token.

    The factor common to a column of the mask (1 / p, or the share of its size) is dropped.
    """
    with full_precision(tokens):
        return (widen(tokens).to(gradient.dtype) @ gradient[:, None].mT)[..., 0]


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
    size, attention = (None if x is None else x[:, k:] for x in (size, attention))
    return _with_prefix(*find(tokens[:, k:], size, attention, rule), rule.num_leaving, k)


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
    weight = _sizes_or_ones(tokens, size) if weight is None else weight
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
    own = first.float().square().sum(-1)
    theirs = own if second is None else second.float().square().sum(-1)
    product = first @ (first if second is None else second).mT
    return (own[:, :, None] + theirs[:, None]).to(product.dtype) - 2 * product


def _least_harm_free(
    tokens: Tensor, size: Tensor | None, attention: Tensor | None, rule: Rule
) -> tuple[Bool[Tensor, "b n"], Int[Tensor, "b n"]]:
    distance = squared_distances(_centred(tokens))
    # Of two alike the one that matters less leaves, so that they do not leave to each other.
    rank = torch.arange(distance.shape[1], device=distance.device)[None]
    if attention is not None:
        rank = attention.argsort(dim=1, stable=True).argsort(dim=1)
    closed = _absent(rank[:, :, None] >= rank[:, None, :], size)
    cost = (distance * _ward(size, size)).masked_fill(closed, torch.inf).amin(dim=-1)
    seen = _seen(cost, attention, rule.protection)
    if size is not None:
        seen = seen.masked_fill(size <= 0, 0)  # what is not there leaves first
    leaves = _smallest(seen, rule.num_leaving)
    target = distance.masked_fill(_absent(leaves[:, None], size), torch.inf).argmin(dim=-1)
    return leaves, target


def _least_harm_alternate(
    tokens: Tensor, size: Tensor | None, attention: Tensor | None, rule: Rule
) -> tuple[Bool[Tensor, "b n"], Int[Tensor, "b n"]]:
    unit = _centred(tokens)
    distance = squared_distances(unit[:, ::2], unit[:, 1::2])
    if size is not None:
        distance = distance * _ward(size[:, ::2], size[:, 1::2])
        distance = distance.masked_fill((size[:, 1::2] <= 0)[:, None], torch.inf)
    cost, partner = distance.min(dim=-1)
    even = None if attention is None else attention[:, ::2]
    chosen = _smallest(_seen(cost, even, rule.protection), rule.num_leaving)
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


def _fits(tokens: Tensor) -> bool:
    return tokens.shape[1] <= _MAX_TOKENS and tokens.shape[2] <= _MAX_CHANNELS


def _arguments(rule: Rule) -> tuple[int, int, float, float, float, bool]:
    """What the kernels take of a rule, in their order."""
    protection, power = rule.protection, rule.attended
    return rule.num_leaving, rule.num_prefix, protection, power, _LEAST_SHARE, rule.prune


def _placed(found: list[Tensor], logits: Tensor | None) -> Placement:
    """What a kernel found."""
    assignment, stays, leaves, weight = found
    return Placement(assignment, weight, logits, (stays, leaves))


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_places(tokens, num_leaving)


def _empty_places(tokens: Tensor, num_leaving: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, t = tokens.shape[:2]
    return (
        tokens.new_empty(b, t, dtype=torch.int64),
        tokens.new_empty(b, t - num_leaving, dtype=torch.int32),
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    b, t = tokens.shape[:2]
    logits = tokens.new_empty(b, t - num_prefix, dtype=torch.float32)
    return *_empty_places(tokens, num_leaving), logits


@operator
def _inform(
    tokens: Tensor,
    size: Tensor | None,
    carry: Tensor | None,
    gain: Tensor | None,
    centroids: Tensor,
    offsets: Tensor,
    costs: Tensor,
    beta: float,
    eta: float,
    num_prefix: int,
) -> tuple[Tensor, Tensor]:
    b, t = tokens.shape[:2]
    logits = tokens.new_empty(b, t - num_prefix, dtype=torch.float32)
    return logits, logits.new_empty(b, t)


def _step_flops(tokens: list[int], num_prefix: int, num_classes: int) -> int:
    """Operations of the step, as counted in the torch definition."""
    b, t, c = tokens
    return 4 * b * (t - num_prefix) * c + 2 * b * num_classes * (2 * c + num_classes)


@register_flop_formula(torch.ops.ltm.inform)
def _(tokens: list[int], *arguments: Any, **_: Any) -> int:
    return _step_flops(tokens, arguments[-1], arguments[3][0])


def _pair_flops(tokens: list[int], num_prefix: int) -> int:
    b, t, c = tokens
    return 2 * b * (t - num_prefix) ** 2 * c


@register_flop_formula(torch.ops.ltm.assign)
def _(tokens: list[int], *arguments: Any, **_: Any) -> int:
    return _pair_flops(tokens, arguments[4])


@register_flop_formula(torch.ops.ltm.inform_and_assign)
def _(tokens: list[int], *arguments: Any, **_: Any) -> int:
    num_classes, num_prefix = arguments[4][0], arguments[10]
    return _pair_flops(tokens, num_prefix) + _step_flops(tokens, num_prefix, num_classes)

"""The gradient of the bound IBB with respect to a merging mask, in closed form, and a step down it.

Letters: `Z` tokens before merging (n x d), `G` the mask (n x p), `X~ = G^T Z` the merged tokens,
`x` a feature of them and `f = x / |x|`; `phi[a]` its membership in class a, `c[a]` the centroid of
class a, `Q(a | y)` the variational distribution, `psi[a]` the cost of class a for the sample, `V`
the gradient of IBB_i, the bound's term of sample i, with respect to x.

The feature is either all merged tokens, flattened (token space, the paper's form), or their mean
(pooled space). Everything is per sample: the gradient of IBB is the mean over samples. The step
subtracts the gradient.

Shapes: b images, t tokens with their prefix, n patch tokens, p merged tokens, c channels, d
features, y classes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# ruff: noqa: ARG001, PLR0917 - operators take their arguments in order, and shapes need few
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from ltm.core.merge import token_sizes
from ltm.kernels.dispatch import ZERO_LENGTH, full_precision, operator, uses_triton, widen

_MAX_LOGIT = 8.0
"""Logits are bounded, so that the weights of a target cannot all vanish."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """The parameters of the informative step."""

    centroids: Float[Tensor, "y d"]
    offsets: Float[Tensor, "y"]
    """The part of the class logits that depends on the classes only."""
    costs: Float[Tensor, "y y"]
    """`-log Q(a | y)`, transposed: soft labels times this are the costs psi."""
    beta: float
    eta: float
    gain: Tensor | None = None
    """The scale of the standardised step; None uses the raw gradient."""
    labels: Int[Tensor, "b"] | None = None
    """True labels; None uses the class membership of each image instead."""
    mapping: nn.Module | None = None
    """A residual layer on the tokens that the step reads."""

    def looks_at(self, patches: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """The patches as the step reads them."""
        layer: Any = self.mapping
        if layer is None:
            return patches
        return patches + layer(patches.to(layer.weight.dtype)).to(patches.dtype)

    def direction(self, feature: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """The gradient of the bound with respect to the feature, V in the paper's proposition."""
        return bound_gradient(
            feature, self.centroids, self.offsets, self.costs, beta=self.beta, labels=self.labels
        )

    def by_kernel(self, tokens: Tensor, carry: Tensor | None) -> bool:
        """Whether a Triton kernel takes this step on these tokens."""
        plain = self.labels is None and self.mapping is None
        return plain and uses_triton(tokens, carry, self.gain)

    def arguments(self) -> tuple[Tensor | None, Tensor, Tensor, Tensor, float, float]:
        """The step as arguments of the kernels."""
        return self.gain, self.centroids, self.offsets, self.costs, self.beta, self.eta


def weigh(
    tokens: Float[Tensor, "b t c"],
    size: Float[Tensor, "_ t"] | None,
    carry: Float[Tensor, "_ n"] | None,
    step: Step | None,
    num_prefix: int,
) -> tuple[Float[Tensor, "_ n"] | None, Float[Tensor, "b t"] | None]:
    """The logits of the patches after the step, `carry - eta dIBB/dG`, and weights of all tokens.

    `size` is None while all sizes are one, `carry` while all logits are zero. Without a step the
    logits are those of `carry`. Without logits the weights are None: sizes alone count.
    """
    if step is not None and step.by_kernel(tokens, carry):
        return _inform(tokens, size, carry, *step.arguments(), num_prefix)
    if step is None and carry is None:
        return None, None
    size, logits = token_sizes(tokens, size), carry
    if step is not None:
        logits = _stepped(tokens[:, num_prefix:], size[:, num_prefix:], carry, step)
    assert logits is not None
    weight = size[:, num_prefix:] * logits.exp()
    return logits, torch.cat([size[:, :num_prefix], weight], dim=1)


def _stepped(
    patches: Float[Tensor, "b n c"], size: Float[Tensor, "b n"], carry: Tensor | None, step: Step
) -> Float[Tensor, "b n"]:
    tokens = step.looks_at(patches)
    share = size / size.sum(1, keepdim=True)
    feature = (share[:, None].to(tokens.dtype) @ tokens)[:, 0]
    logits = -pooled_gradient(tokens, step.direction(feature))
    if step.gain is not None:
        mean, spread = mean_and_spread(logits, size > 0)
        logits = step.gain * (logits - mean) / (spread + 1e-6)
    logits = step.eta * logits
    if carry is not None:
        logits = logits + carry
    return logits.clamp(-_MAX_LOGIT, _MAX_LOGIT)


def mean_and_spread(
    values: Float[Tensor, "b n"], counts: Bool[Tensor, "b n"]
) -> tuple[Float[Tensor, "b 1"], Float[Tensor, "b 1"]]:
    """The mean of the values that count and their standard deviation; padding does not count."""
    number = counts.sum(1, keepdim=True).clamp_min(1).to(values.dtype)
    mean = torch.where(counts, values, 0.0).sum(1, keepdim=True) / number
    apart = torch.where(counts, values - mean, 0.0)
    # The gradient of a norm is zero where all values are equal; that of a root is not finite.
    length = cast("Tensor", torch.linalg.vector_norm(apart, dim=1, keepdim=True))  # pyright: ignore[reportUnknownMemberType]
    return mean, length / number.sqrt()


def class_offsets(
    centroids: Float[Tensor, "y d"], beta: float, present: Bool[Tensor, "y"]
) -> Float[Tensor, "y"]:
    """The part of the class logits that depends on the classes only.

    Class membership is `phi = softmax(offsets + 2 beta c f)`.
    """
    offsets = -beta * widen(centroids.detach()).square().sum(-1)
    return offsets.masked_fill(~present, torch.finfo(offsets.dtype).min)


def bound_gradient(
    features: Float[Tensor, "b d"],
    centroids: Float[Tensor, "y d"],
    offsets: Float[Tensor, "y"],
    costs: Float[Tensor, "y y"],
    *,
    beta: float,
    labels: Int[Tensor, "b"] | None = None,
) -> Float[Tensor, "b d"]:
    """The gradient V of IBB_i with respect to a raw feature x, through its normalisation.

    With respect to f it is `2 beta (w - sum(w) phi)^T c` with `w = phi psi`, computed as
    `phi (psi - sum(w))`, which removes the constant part of psi before rounding. `costs` are
    `-log Q`, transposed; without labels they are weighted by the membership. Products are in the
    precision of the centroids. A zero feature has no direction, and a gradient of zero.
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
    """Pooled space: one gradient per token, `z_n . v`, the same for all merged tokens.

    The common factor of a column of the mask, 1 / p or its share of the size, is left out.
    """
    with full_precision(tokens):
        return (widen(tokens).to(gradient.dtype) @ gradient[:, None].mT)[..., 0]


def token_gradient(
    tokens: Float[Tensor, "b n d"], gradient: Float[Tensor, "b p d"]
) -> Float[Tensor, "b n p"]:
    """Token space: the gradient of IBB_i with respect to the mask, `Z V^T`.

    `gradient` is V of the flattened merged tokens, unflattened to `b p d`.
    """
    with full_precision(tokens):
        return widen(tokens).to(gradient.dtype) @ gradient.mT


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


def step_flops(tokens: list[int], num_prefix: int, num_classes: int) -> int:
    """Operations of the torch definition of the step."""
    b, t, c = tokens
    return 4 * b * (t - num_prefix) * c + 2 * b * num_classes * (2 * c + num_classes)


@register_flop_formula(torch.ops.ltm.inform)
def _(tokens: list[int], *arguments: Any, **_: Any) -> int:
    return step_flops(tokens, arguments[-1], arguments[3][0])

"""The gradient of the bound IBB with respect to a merging mask, in closed form.

Letters: `Z` tokens before merging (n x d), `G` the mask (n x p), `X~ = G^T Z` the merged tokens,
`x` a feature of them and `f = x / |x|`; `phi[a]` its membership in class a, `c[a]` the centroid of
class a, `q[a, y]` the variational Q(X~ in a | Y = y), `psi[a]` what class a costs the sample, `V`
the gradient of IBB_i, the bound's term of sample i, with respect to x.

The feature is either all merged tokens, flattened (token space, the paper's letter), or their mean
(pooled space). Everything is per sample: the gradient of IBB is the mean over samples. All results
are gradients, uphill; a descent step subtracts them.
"""

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from ltm.core import validation
from ltm.core.clustering import class_membership, normalise
from ltm.kernels.dispatch import ZERO_LENGTH, full_precision, widen


def psi(q: Float[Tensor, "a y"], labels: Num[Tensor, "b *y"]) -> Float[Tensor, "b a"]:
    """Cost of a class, `psi_a = -sum_y P(y) log Q(X~ in a | Y = y)`, of the proposition.

    `labels` are classes (whole numbers, `b`) or soft labels (`b y`). What psi holds besides is the
    same for every class, and cancels in the gradient. Neither Q nor labels carry gradient.
    """
    validation.check_features("q", q, num_dims=2)
    costs = -widen(q.detach()).clamp_min(torch.finfo(torch.float32).tiny).log()
    num_labels = q.shape[1]
    if labels.is_floating_point():
        validation.check_features("labels", labels, num_dims=2)
        validation.check_shape(
            "labels", labels, (labels.shape[0], num_labels), "one weight per column of q"
        )
        with full_precision(costs):
            return labels.detach().to(costs.dtype) @ costs.mT
    validation.check_features("labels", labels, num_dims=1)
    validation.check_labels(labels, labels.shape[0], num_labels)
    return costs.mT[labels.long()]


def membership_gradient(
    phi: Float[Tensor, "b c"],
    psi: Float[Tensor, "b c"],
    centroids: Float[Tensor, "c d"],
    beta: float,
) -> Float[Tensor, "b d"]:
    """Gradient of IBB_i with respect to f, `2 beta (w - sum(w) phi)^T c` with `w = phi psi`.

    Written as `phi (psi - sum(w))`: what is constant in psi is gone before anything is rounded.
    """
    validation.check_beta(beta)
    with full_precision(phi):
        weights = phi * (psi - (phi * psi).sum(-1, keepdim=True))
        return 2 * beta * weights @ widen(centroids.detach()).to(weights.dtype)


def feature_gradient(
    features: Float[Tensor, "b d"],
    centroids: Float[Tensor, "c d"],
    psi: Float[Tensor, "b c"],
    beta: float,
    present: Bool[Tensor, "c"] | None = None,
) -> Float[Tensor, "b d"]:
    """Gradient V of IBB_i with respect to the raw feature x, through its normalisation.

    A zero feature has no direction to turn: its gradient is zero.
    """
    phi = class_membership(features, centroids, beta, present)
    validation.check_shape("psi", psi, tuple(phi.shape), "samples by classes")
    return through_normalisation(features, membership_gradient(phi, psi, centroids, beta))


def class_offsets(
    centroids: Float[Tensor, "c d"], beta: float, present: Bool[Tensor, "c"]
) -> Float[Tensor, "c"]:
    """What class membership needs of the classes alone: `phi = softmax(offsets + 2 beta c f)`."""
    offsets = -beta * widen(centroids.detach()).square().sum(-1)
    return offsets.masked_fill(~present, torch.finfo(offsets.dtype).min)


def token_gradient(
    tokens: Float[Tensor, "b n d"], gradient: Float[Tensor, "b p d"]
) -> Float[Tensor, "b n p"]:
    """Token space: the gradient of IBB_i with respect to the mask, `Z V^T`.

    `gradient` is V of the flattened merged tokens, unflattened to `b p d`.
    """
    validation.check_features("tokens", tokens, num_dims=3)
    validation.check_features("gradient", gradient, num_dims=3)
    batch, _, width = tokens.shape
    validation.check_shape(
        "gradient", gradient, (batch, gradient.shape[1], width), "the samples and width of tokens"
    )
    with full_precision(tokens):
        return widen(tokens).to(gradient.dtype) @ gradient.mT


def through_normalisation(x: Tensor, gradient: Tensor) -> Tensor:
    """Apply the Jacobian of `x / |x|`, which is `(I - f f^T) / |x|`."""
    x = widen(x).to(gradient.dtype)
    unit = normalise(x)
    length = (x * unit).sum(-1, keepdim=True)
    across = gradient - (gradient * unit).sum(-1, keepdim=True) * unit
    return torch.where(length > ZERO_LENGTH, across / length.clamp_min(ZERO_LENGTH), 0)

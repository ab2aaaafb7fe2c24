"""The paper's gradient of the bound, term by term: what the fused form is compared with."""

import torch
from torch import Tensor

from ltm.core.bottleneck import class_membership, normalise
from ltm.kernels.dispatch import ZERO_LENGTH, full_precision, widen


def psi(q: Tensor, labels: Tensor) -> Tensor:
    """Cost of a class, `psi_a = -sum_y P(y) log Q(X~ in a | Y = y)`, of the proposition.

    `labels` are classes (`b`) or soft labels (`b y`). What psi holds besides is the same for every
    class, and cancels in the gradient.
    """
    costs = -widen(q.detach()).clamp_min(torch.finfo(torch.float32).tiny).log()
    if not labels.is_floating_point():
        return costs.mT[labels.long()]
    with full_precision(costs):
        return labels.detach().to(costs.dtype) @ costs.mT


def membership_gradient(phi: Tensor, psi: Tensor, centroids: Tensor, beta: float) -> Tensor:
    """Gradient of IBB_i with respect to f, `2 beta (w - sum(w) phi)^T c` with `w = phi psi`."""
    with full_precision(phi):
        weights = phi * (psi - (phi * psi).sum(-1, keepdim=True))
        return 2 * beta * weights @ widen(centroids.detach()).to(weights.dtype)


def feature_gradient(
    features: Tensor, centroids: Tensor, psi: Tensor, beta: float, present: Tensor | None = None
) -> Tensor:
    """Gradient V of IBB_i with respect to the raw feature x: through `(I - f f^T) / |x|`."""
    phi = class_membership(features, centroids, beta, present)
    gradient = membership_gradient(phi, psi, centroids, beta)
    x = widen(features).to(gradient.dtype)
    unit = normalise(x)
    length = (x * unit).sum(-1, keepdim=True)
    across = gradient - (gradient * unit).sum(-1, keepdim=True) * unit
    return torch.where(length > ZERO_LENGTH, across / length.clamp_min(ZERO_LENGTH), 0)

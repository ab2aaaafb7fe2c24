"""Classes as clusters: class centroids and the soft membership of a feature in each of them.

Letters: `phi[i, a]` is the membership of sample i in class a, `c[a]` the centroid of class a,
`beta` the sharpness of the membership (an inverse temperature). Features live on the unit sphere.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ltm.core import validation
from ltm.kernels.dispatch import ZERO_LENGTH, full_precision, widen

INPUT_SIDE = 32
"""Side to which input images are resampled before they are clustered."""


def normalise(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """Scale each feature to length one; a zero feature, which has no direction, stays zero."""
    return F.normalize(widen(x), dim=-1, eps=ZERO_LENGTH)


def class_sums(
    features: Float[Tensor, "b d"], labels: Int[Tensor, "b"], num_classes: int
) -> Float[Tensor, "c d"]:
    """Return the sum of the normalised features of each class, without gradient."""
    unit = normalise(features.detach())
    return unit.new_zeros(num_classes, unit.shape[1]).index_add_(0, labels, unit)


def class_centroids(
    sums: Float[Tensor, "c d"], counts: Shaped[Tensor, "c"]
) -> Float[Tensor, "c d"]:
    """Return the class centroids: means of normalised features, normalised again.

    The centroid of an empty class is zero.
    """
    return normalise(sums / counts.clamp_min(1).to(sums.dtype)[:, None])


def class_membership(
    features: Float[Tensor, "b d"],
    centroids: Float[Tensor, "c d"],
    beta: float,
    present: Bool[Tensor, "c"] | None = None,
) -> Float[Tensor, "b c"]:
    """Soft class membership, `phi(x, a) = softmax_a(-beta |x / |x| - c_a|^2)`.

    Rows sum to one over the classes that are `present` (all of them unless said otherwise); empty
    classes get zero. The result is float32 at least, and no gradient flows into the centroids.
    """
    _check_clusters(features, centroids, beta, present)
    centroids = widen(centroids.detach())
    with full_precision(features):
        unit = normalise(features).to(centroids.dtype)
        # |x|^2 is the same for every class, and softmax does not see it.
        logits = beta * (2 * unit @ centroids.mT - centroids.square().sum(-1))
    if present is None:
        return logits.softmax(-1)
    # A finite stand-in for minus infinity: with no class present softmax would be 0/0.
    logits = logits.masked_fill(~present, torch.finfo(logits.dtype).min)
    return logits.softmax(-1).masked_fill(~present, 0)


def image_features(images: Shaped[Tensor, "*images"]) -> Float[Tensor, "b d"]:
    """Return images `b c h w` as the features X of the bottleneck: area-resampled, then flattened.

    Whole-number images are read as they are: membership looks at directions, not at scale.
    """
    validation.check_features("images", images, num_dims=4)
    return F.interpolate(widen(images), size=(INPUT_SIDE, INPUT_SIDE), mode="area").flatten(1)


def _check_clusters(
    features: Tensor, centroids: Tensor, beta: float, present: Tensor | None
) -> None:
    validation.check_beta(beta)
    validation.check_features("features", features, num_dims=2)
    validation.check_features("centroids", centroids, num_dims=2)
    num_classes, width = centroids.shape
    validation.check_shape(
        "features", features, (features.shape[0], width), "the width of the centroids"
    )
    if present is not None:
        validation.check_shape("present", present, (num_classes,), "one per centroid")

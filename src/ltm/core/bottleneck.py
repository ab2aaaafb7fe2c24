"""The information bottleneck of merged features: loss, separable upper bound, and constant.

Letters: `X~` merged features, `X` inputs, `Y` labels; `phi[i, a]` the membership of sample i in
class a; `joint[a, b] = P(X~ in a, X in b)`, `by_label[a, y] = P(X~ in a, Y = y)`; `q[a, y]` the
variational Q(X~ in a | Y = y); IB the loss I(X~, X) - I(X~, Y), IBB its bound and C0 the constant
of the theorem, IB <= IBB - C0.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ltm.core import clustering, validation
from ltm.kernels.dispatch import full_precision, widen

BETA = 10.0
"""Sharpness of the class membership unless said otherwise."""

FLOOR = 1e-6
"""Least value of Q, so that its logarithm is finite, unless said otherwise."""


@dataclass(frozen=True, kw_only=True)
class InformationBottleneck:
    """The information bottleneck of a set of samples, in nats; `loss <= bound - c0`."""

    loss: Float[Tensor, ""]
    """IB = I(X~, X) - I(X~, Y)."""
    bound: Float[Tensor, ""]
    """IBB, a mean over samples."""
    c0: Float[Tensor, ""]
    """What the inputs alone decide: minus the entropy of their classes."""
    input_information: Float[Tensor, ""]
    """I(X~, X)."""
    label_information: Float[Tensor, ""]
    """I(X~, Y)."""


def information_bottleneck(
    merged: Shaped[Tensor, "*merged"],
    inputs: Shaped[Tensor, "*inputs"],
    labels: Shaped[Tensor, "*labels"],
    num_classes: int,
    beta: float = BETA,
    *,
    q: Shaped[Tensor, "*q"] | None = None,
    floor: float = FLOOR,
) -> InformationBottleneck:
    """Measure the information bottleneck of `merged` features of `inputs` with `labels`.

    Features are `b ...` and are flattened (for images see `image_features`); labels are whole
    numbers, one per sample. Centroids, labels and Q carry no gradient: `loss` and `bound` may be
    minimised with respect to `merged`. The bound holds for any `q` whose columns sum to one; unless
    one is given it is the Q of these very samples, with `floor` under it.
    """
    _check_samples(merged, inputs, labels, num_classes, beta)
    labels = labels.to(merged.device, torch.int64)
    with full_precision(merged):
        phi_merged = _own_membership(merged, labels, num_classes, beta)
        inputs = inputs.to(merged.device)
        phi_inputs = _own_membership(inputs, labels, num_classes, beta).to(phi_merged.dtype)
        by_label = _label_table(phi_merged, labels)
        if q is None:
            q = variational_q(by_label.detach(), floor)
        else:
            validation.check_shape("q", q, (num_classes, num_classes), "classes by labels")
        return from_tables(
            joint=joint_table(phi_merged, phi_inputs),
            by_label=by_label,
            input_log=negative_entropy(phi_inputs).mean(),
            q=q.detach().to(phi_merged),
        )


def from_tables(
    *,
    joint: Float[Tensor, "a b"],
    by_label: Float[Tensor, "a y"],
    input_log: Float[Tensor, ""],
    q: Float[Tensor, "a y"],
) -> InformationBottleneck:
    """Compute the bottleneck from probabilities; `input_log` is the mean of `sum_b phi log phi`.

    In `IBB = 1/n sum_i,a,b phi(X~_i, a) phi(X_i, b) log phi(X_i, b) - sum_a,y P(a, y) log Q(a | y)`
    the sum over a of the first term is one, which leaves `input_log`.
    """
    log_q = q.clamp_min(torch.finfo(q.dtype).tiny).log()
    input_information = mutual_information(joint)
    label_information = mutual_information(by_label)
    return InformationBottleneck(
        loss=input_information - label_information,
        bound=input_log - (by_label * log_q).sum(),
        c0=negative_entropy(joint.sum(0)),
        input_information=input_information,
        label_information=label_information,
    )


def joint_table(phi: Float[Tensor, "n a"], other: Float[Tensor, "n b"]) -> Float[Tensor, "a b"]:
    """Joint probabilities, `P(a, b) = 1/n sum_i phi(X~_i, a) phi(X_i, b)`."""
    with full_precision(phi):
        return phi.mT @ other / phi.shape[0]


def negative_entropy(p: Float[Tensor, "*b a"]) -> Float[Tensor, "*b"]:
    """Return `sum_a p_a log p_a`, where 0 log 0 = 0."""
    # The logarithm of at least the smallest number: at zero its slope times zero would be NaN.
    return (p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(-1)


def mutual_information(joint: Float[Tensor, "a b"]) -> Float[Tensor, ""]:
    """Mutual information, `I = sum_ab P(a, b) log(P(a, b) / (P(a) P(b)))`, out of entropies."""
    together = negative_entropy(joint.flatten())
    return together - negative_entropy(joint.sum(1)) - negative_entropy(joint.sum(0))


def variational_q(by_label: Float[Tensor, "a y"], floor: float = FLOOR) -> Float[Tensor, "a y"]:
    """Variational distribution, `Q(a | y) = sum_i phi(X~_i, a) 1[y_i = y] / sum_i 1[y_i = y]`.

    Takes sums or probabilities: memberships sum to one, so a column's own total counts its samples.
    `floor` is the least entry, and columns are scaled to sum to one again, without which the bound
    would not hold. A label without samples is uniform.
    """
    validation.check_floor(floor)
    num_classes = by_label.shape[0]
    total = by_label.sum(0)
    uniform = torch.full_like(by_label, 1 / num_classes)
    q = torch.where(total > 0, by_label / total.clamp_min(torch.finfo(total.dtype).tiny), uniform)
    q = q.clamp_min(floor)
    return q / q.sum(0)


def _own_membership(x: Tensor, labels: Tensor, num_classes: int, beta: float) -> Tensor:
    """Return the membership of samples in the classes that they make up themselves."""
    features = widen(x).flatten(1)
    counts = labels.bincount(minlength=num_classes)
    sums = clustering.class_sums(features, labels, num_classes)
    centroids = clustering.class_centroids(sums, counts)
    return clustering.class_membership(features, centroids, beta, present=counts > 0)


def _label_table(phi: Float[Tensor, "n a"], labels: Int[Tensor, "n"]) -> Float[Tensor, "a y"]:
    """Joint probabilities with the label, `P(a, y) = 1/n sum_i phi(X~_i, a) 1[y_i = y]`."""
    table = phi.new_zeros(phi.shape[1], phi.shape[1])
    return table.index_add(1, labels, phi.mT) / phi.shape[0]


def _check_samples(
    merged: Tensor, inputs: Tensor, labels: Tensor, num_classes: int, beta: float
) -> None:
    validation.check_beta(beta)
    validation.check_num_classes(num_classes)
    for name, x in (("merged", merged), ("inputs", inputs)):
        validation.check_features(name, x)
        validation.check_finite(name, x)
    num_samples = merged.shape[0]
    if inputs.shape[0] != num_samples:
        raise ValueError(
            f"inputs has {inputs.shape[0]} samples: {num_samples} are needed, as many as merged"
        )
    validation.check_labels(labels, num_samples, num_classes)

"""The information bottleneck of merged features: class membership, loss, bound, and statistics.

Classes are clusters on the unit sphere, and a feature is softly a member of each. Letters: `X~`
merged features, `X` inputs, `Y` labels; `phi[i, a]` the membership of sample i in class a, `c[a]`
the centroid of class a, `beta` the sharpness of the membership (an inverse temperature);
`joint[a, b] = P(X~ in a, X in b)`, `by_label[a, y] = P(X~ in a, Y = y)`; `q[a, y]` the variational
Q(X~ in a | Y = y); IB the loss I(X~, X) - I(X~, Y), IBB its bound and C0 the constant of the
theorem, IB <= IBB - C0.

Statistics are sums, so that batches, shards and processes simply add up. Memberships need
centroids, and centroids need all samples. In training, memberships are therefore measured against
the centroids of the epoch before. A metric goes over the data twice: the first pass gives the
centroids, the second the memberships.
"""

import math
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ltm.core.finite import require_finite
from ltm.core.validation import require_least
from ltm.kernels.dispatch import ZERO_LENGTH, full_precision, widen
from ltm.processes import sum_over_processes

BETA = 10.0
"""The default sharpness of the class membership."""

FLOOR = 1e-6
"""The default least value of Q, which keeps its logarithm finite."""

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
    # Not minus infinity: if no class is present, softmax would be 0/0.
    logits = logits.masked_fill(~present, torch.finfo(logits.dtype).min)
    return logits.softmax(-1).masked_fill(~present, 0)


def image_features(images: Shaped[Tensor, "*images"]) -> Float[Tensor, "b d"]:
    """Return images `b c h w` as the features X of the bottleneck: area-resampled, then flattened.

    Integer images need no scaling: membership depends on the direction of a feature only.
    """
    _check_features("images", images, num_dims=4)
    return F.interpolate(widen(images), size=(INPUT_SIDE, INPUT_SIDE), mode="area").flatten(1)


def _check_clusters(
    features: Tensor, centroids: Tensor, beta: float, present: Tensor | None
) -> None:
    _check_beta(beta)
    _check_features("features", features, num_dims=2)
    _check_features("centroids", centroids, num_dims=2)
    num_classes, width = centroids.shape
    _check_shape("features", features, (features.shape[0], width), "the width of the centroids")
    if present is not None:
        _check_shape("present", present, (num_classes,), "one per centroid")


@dataclass(frozen=True, kw_only=True)
class InformationBottleneck:
    """The information bottleneck of a set of samples, in nats; `loss <= bound - c0`."""

    loss: Float[Tensor, ""]
    """IB = I(X~, X) - I(X~, Y)."""
    bound: Float[Tensor, ""]
    """IBB, a mean over samples."""
    c0: Float[Tensor, ""]
    """Minus the entropy of the classes of the inputs; depends on the inputs only."""
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

    Features are `b ...` and are flattened (for images see `image_features`); labels are integers,
    one per sample. Centroids, labels and Q carry no gradient, so `loss` and `bound` can be
    minimised with respect to `merged`. The bound holds for any `q` whose columns sum to one; the
    default is the Q of these samples, with least value `floor`.
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
            _check_shape("q", q, (num_classes, num_classes), "classes by labels")
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
    # Clamped, because at zero the gradient of the logarithm times zero would be NaN.
    return (p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(-1)


def mutual_information(joint: Float[Tensor, "a b"]) -> Float[Tensor, ""]:
    """Mutual information, `I = sum_ab P(a, b) log(P(a, b) / (P(a) P(b)))`, from entropies."""
    together = negative_entropy(joint.flatten())
    return together - negative_entropy(joint.sum(1)) - negative_entropy(joint.sum(0))


def variational_q(by_label: Float[Tensor, "a y"], floor: float = FLOOR) -> Float[Tensor, "a y"]:
    """Variational distribution, `Q(a | y) = sum_i phi(X~_i, a) 1[y_i = y] / sum_i 1[y_i = y]`.

    Takes sums or probabilities: memberships sum to one, so a column's total counts its samples.
    `floor` is the least entry. Columns are then scaled to sum to one, as the bound requires. The
    column of a label without samples is uniform.
    """
    _check_floor(floor)
    num_classes = by_label.shape[0]
    total = by_label.sum(0)
    uniform = torch.full_like(by_label, 1 / num_classes)
    q = torch.where(total > 0, by_label / total.clamp_min(torch.finfo(total.dtype).tiny), uniform)
    q = q.clamp_min(floor)
    return q / q.sum(0)


def _own_membership(x: Tensor, labels: Tensor, num_classes: int, beta: float) -> Tensor:
    """Return the membership of samples, with centroids from the same samples."""
    features = widen(x).flatten(1)
    counts = labels.bincount(minlength=num_classes)
    sums = class_sums(features, labels, num_classes)
    centroids = class_centroids(sums, counts)
    return class_membership(features, centroids, beta, present=counts > 0)


def _label_table(phi: Float[Tensor, "n a"], labels: Int[Tensor, "n"]) -> Float[Tensor, "a y"]:
    """Joint probabilities with the label, `P(a, y) = 1/n sum_i phi(X~_i, a) 1[y_i = y]`."""
    table = phi.new_zeros(phi.shape[1], phi.shape[1])
    return table.index_add(1, labels, phi.mT) / phi.shape[0]


def _check_samples(
    merged: Tensor, inputs: Tensor, labels: Tensor, num_classes: int, beta: float
) -> None:
    _check_beta(beta)
    require_least("num_classes", num_classes)
    features = {"merged": merged, "inputs": inputs}
    for name, x in features.items():
        _check_features(name, x)
    require_finite(features)
    num_samples = merged.shape[0]
    if inputs.shape[0] != num_samples:
        raise ValueError(
            f"inputs has {inputs.shape[0]} samples: {num_samples} are needed, as many as merged"
        )
    check_labels(labels, num_samples, num_classes)


@dataclass(frozen=True, kw_only=True)
class ClassStatistics:
    """Sums over the labelled samples of a site; `zeros` starts them, `update` adds a batch."""

    counts: Float[Tensor, "c"]
    """Samples per class."""
    features: Float[Tensor, "c d"]
    """Sum of the normalised features of each class."""
    membership: Float[Tensor, "c c"]
    """Sum of `phi(X~_i, a) 1[y_i = y]` at `[a, y]`."""
    joint: Float[Tensor, "c c"]
    """Sum of `phi(X~_i, a) phi(X_i, b)` at `[a, b]`: merged features against inputs."""
    input_log: Float[Tensor, ""]
    """Sum of `sum_b phi(X_i, b) log phi(X_i, b)`."""

    @staticmethod
    def zeros(
        num_classes: int,
        width: int,
        *,
        device: torch.device | str | None = None,
    ) -> "ClassStatistics":
        """Return sums over no samples, in float64: float32 would lose small terms."""
        require_least("num_classes", num_classes)
        require_least("width", width)
        shapes = {
            "counts": (num_classes,),
            "features": (num_classes, width),
            "membership": (num_classes, num_classes),
            "joint": (num_classes, num_classes),
            "input_log": (),
        }
        zeros = partial(torch.zeros, device=device, dtype=torch.float64)
        return ClassStatistics(**{name: zeros(shape) for name, shape in shapes.items()})

    def state(self) -> dict[str, Tensor]:
        """Return the sums by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def num_classes(self) -> int:
        """Number of classes, empty ones included."""
        return self.counts.shape[0]

    @property
    def present(self) -> Bool[Tensor, "c"]:
        """Which classes have a sample."""
        return self.counts > 0

    @torch.no_grad()
    def update(
        self,
        features: Float[Tensor, "b d"],
        labels: Int[Tensor, "b"],
        membership: Float[Tensor, "b c"] | None = None,
        input_membership: Float[Tensor, "b c"] | None = None,
    ) -> None:
        """Add a batch of raw `features` in place, and their `membership` once there are centroids.

        `input_membership` is that of the input images; only `bottleneck` needs it.
        """
        self._check_batch(features, labels, membership, input_membership)
        labels = labels.to(self.counts.device, torch.int64)
        self.counts.add_(labels.bincount(minlength=self.num_classes))
        self.features.index_add_(0, labels, normalise(features).to(self.features))
        if membership is None:
            return
        membership = membership.to(self.membership)
        self.membership.index_add_(1, labels, membership.mT)
        if input_membership is None:
            return
        input_membership = input_membership.to(self.joint)
        with full_precision(self.joint):
            self.joint.addmm_(membership.mT, input_membership)
        self.input_log.add_(negative_entropy(input_membership).sum())

    def all_reduce(self) -> "ClassStatistics":
        """Return the sum over all processes; with one process, a copy.

        Every sample has the same weight, however unevenly samples are split between processes.
        """
        values = self.state()
        flat = sum_over_processes(torch.cat([value.flatten() for value in values.values()]))
        parts = torch.split_with_sizes(flat, [value.numel() for value in values.values()])
        reduced = zip(values.items(), parts, strict=True)
        return ClassStatistics(**{name: part.view_as(value) for (name, value), part in reduced})

    def centroids(self) -> Float[Tensor, "c d"]:
        """Class centroids; zero for empty classes."""
        return class_centroids(self.features, self.counts)

    def q(self, floor: float = FLOOR) -> Float[Tensor, "c c"]:
        """Variational Q(X~ in a | Y = y), columns summing to one; uniform for empty classes."""
        return variational_q(self.membership, floor)

    def bottleneck(self) -> InformationBottleneck:
        """Information bottleneck of all samples, each of which needs both memberships."""
        total, labelled = self.joint.sum(), self.membership.sum()
        if not bool(total > 0) or not torch.allclose(total, labelled, rtol=1e-3):
            raise ValueError(
                f"{float(labelled):.0f} samples came with membership, {float(total):.0f} with "
                "input_membership too: every update needs both"
            )
        return from_tables(
            joint=self.joint / total,
            by_label=self.membership / total,
            input_log=self.input_log / total,
            q=self.q(),
        )

    def _check_batch(
        self,
        features: Tensor,
        labels: Tensor,
        membership: Tensor | None,
        input_membership: Tensor | None,
    ) -> None:
        _check_features("features", features, num_dims=2)
        batch, width = features.shape[0], self.features.shape[1]
        _check_shape("features", features, (batch, width), "the width of these statistics")
        check_labels(labels, batch, self.num_classes)
        tables = {"membership": membership, "input_membership": input_membership}
        for name, table in tables.items():
            if table is not None:
                _check_shape(name, table, (batch, self.num_classes), "samples by classes")
        if membership is None and input_membership is not None:
            raise ValueError("membership is None: with input_membership both are needed")


def _check_beta(beta: float) -> None:
    """Raise a ValueError unless the sharpness is a positive number."""
    if not (math.isfinite(beta) and beta > 0):
        raise ValueError(f"beta is {beta}: a positive finite number is needed")


def _check_floor(floor: float) -> None:
    """Raise a ValueError unless the least probability is in [0, 1)."""
    if not 0 <= floor < 1:
        raise ValueError(f"floor is {floor}: a number in [0, 1) is needed")


def _check_features(name: str, x: Tensor, num_dims: int | None = None) -> None:
    """Raise a ValueError for empty batches or features, or another number of dimensions."""
    shape = tuple(x.shape)
    if num_dims is not None and x.ndim != num_dims:
        raise ValueError(f"{name} has shape {shape}: {num_dims} dimensions are needed")
    if x.ndim == 0 or x.shape[0] == 0:
        raise ValueError(f"{name} has shape {shape}: a batch of at least one sample is needed")
    if x.numel() == 0:
        raise ValueError(f"{name} has shape {shape}: at least one value per sample is needed")


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...], reason: str) -> None:
    """Raise a ValueError for another shape; `reason` says what it has to match."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: {shape} is needed, {reason}")


def check_labels(labels: Tensor, num_samples: int, num_classes: int) -> None:
    """Raise a ValueError unless labels are integers in [0, num_classes), one per sample."""
    _check_shape("labels", labels, (num_samples,), "one per sample")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels are of type {labels.dtype}: whole numbers are needed")
    # While a graph is compiled, and on `meta`, there are no values to check.
    if torch.compiler.is_compiling() or labels.is_meta:
        return
    low, high = (int(value) for value in labels.aminmax())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"labels range from {low} to {high}: with {num_classes} classes "
            f"they must lie in 0 to {num_classes - 1}"
        )

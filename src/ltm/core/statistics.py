"""Statistics of classes as sums, so that batches, shards and processes simply add up.

Letters: `phi[i, a]` is the membership of sample i in class a; see `bottleneck` for the tables.

Memberships need centroids, and centroids need every sample. Two ways around: in training, an
epoch's memberships are measured against the centroids of the epoch before; a metric goes over the
data twice, first without memberships, then with those that the first pass's centroids give.
"""

from dataclasses import dataclass, fields
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ltm.core import clustering, validation
from ltm.core.bottleneck import (
    FLOOR,
    InformationBottleneck,
    from_tables,
    negative_entropy,
    variational_q,
)
from ltm.kernels.dispatch import full_precision
from ltm.processes import sum_over_processes


@dataclass(frozen=True, kw_only=True)
class ClassStatistics:
    """Sums over the labelled samples of a site; `zeros` starts them, `update` adds a batch.

    All fields are plain tensors and all are sums: keep them in buffers, save them.
    """

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
        """Start from nothing; float64 because a million small terms are lost in float32."""
        validation.check_num_classes(num_classes)
        if width < 1:
            raise ValueError(f"width is {width}: at least 1 is needed")
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
        """Add a batch in place: raw `features`, and, once there are centroids, their `membership`.

        `input_membership`, that of the input images, is needed by `bottleneck` alone.
        """
        self._check_batch(features, labels, membership, input_membership)
        labels = labels.to(self.counts.device, torch.int64)
        self.counts.add_(labels.bincount(minlength=self.num_classes))
        self.features.index_add_(0, labels, clustering.normalise(features).to(self.features))
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
        """Return the sum over all processes (a copy where there is only this one).

        Every sample weighs the same, however unevenly the processes share them.
        """
        values = self.state()
        flat = sum_over_processes(torch.cat([value.flatten() for value in values.values()]))
        parts = torch.split_with_sizes(flat, [value.numel() for value in values.values()])
        reduced = zip(values.items(), parts, strict=True)
        return ClassStatistics(**{name: part.view_as(value) for (name, value), part in reduced})

    def centroids(self) -> Float[Tensor, "c d"]:
        """Class centroids; zero for empty classes."""
        return clustering.class_centroids(self.features, self.counts)

    def q(self, floor: float = FLOOR) -> Float[Tensor, "c c"]:
        """Variational Q(X~ in a | Y = y), columns summing to one; uniform for empty classes."""
        return variational_q(self.membership, floor)

    def bottleneck(self) -> InformationBottleneck:
        """Information bottleneck of all samples; all of them must have come with memberships."""
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
        validation.check_features("features", features, num_dims=2)
        batch, width = features.shape[0], self.features.shape[1]
        validation.check_shape(
            "features", features, (batch, width), "the width of these statistics"
        )
        validation.check_labels(labels, batch, self.num_classes)
        tables = {"membership": membership, "input_membership": input_membership}
        for name, table in tables.items():
            if table is not None:
                validation.check_shape(name, table, (batch, self.num_classes), "samples by classes")
        if membership is None and input_membership is not None:
            raise ValueError("membership is None: with input_membership both are needed")

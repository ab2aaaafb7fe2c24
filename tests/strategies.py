"""Random labelled samples for property tests, and the bound as the paper sums it."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Samples:
    merged: Tensor
    inputs: Tensor
    labels: Tensor
    num_classes: int
    beta: float


def betas(low: float = 1e-3, high: float = 1e3) -> st.SearchStrategy[float]:
    return st.floats(-1, 1).map(lambda t: low * (high / low) ** ((t + 1) / 2))


@st.composite
def samples(
    draw: st.DrawFn,
    max_samples: int = 40,
    max_classes: int = 8,
    beta: st.SearchStrategy[float] | None = None,
) -> Samples:
    """Features of any scale, more or less clustered, with some classes left empty."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    num_samples = draw(st.integers(1, max_samples))
    num_classes = draw(st.integers(1, max_classes))
    used = torch.randperm(num_classes, generator=generator)[: draw(st.integers(1, num_classes))]
    labels = used[torch.randint(len(used), (num_samples,), generator=generator)]

    def features(width: int) -> Tensor:
        signal = draw(st.sampled_from([0.0, 1.0, 10.0]))
        scale = draw(st.sampled_from([1e-3, 1.0, 1e3]))
        centres = torch.randn(num_classes, width, generator=generator, dtype=torch.float64)
        noise = torch.randn(num_samples, width, generator=generator, dtype=torch.float64)
        return scale * (signal * centres[labels] + noise)

    return Samples(
        merged=features(draw(st.integers(1, 12))),
        inputs=features(draw(st.integers(1, 12))),
        labels=labels,
        num_classes=num_classes,
        beta=draw(betas() if beta is None else beta),
    )


@st.composite
def variational(draw: st.DrawFn, num_classes: int) -> Tensor:
    """Any Q(a | y): columns that sum to one, from flat to nearly one-hot."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    sharpness = draw(st.sampled_from([0.0, 1.0, 20.0]))
    logits = torch.randn(num_classes, num_classes, generator=generator, dtype=torch.float64)
    return (sharpness * logits).softmax(0)


def sample_bounds(phi_merged: Tensor, phi_inputs: Tensor, labels: Tensor, q: Tensor) -> Tensor:
    """Upper bound IBB, one term per sample; IBB is their mean.

    `IBB_i = sum_ab phi(X~_i, a) phi(X_i, b) log phi(X_i, b) - sum_a phi(X~_i, a) log Q(a | y_i)`.
    """
    inputs_term = phi_merged.sum(-1) * torch.xlogy(phi_inputs, phi_inputs).sum(-1)
    return inputs_term - (phi_merged * q.log()[:, labels].mT).sum(-1)

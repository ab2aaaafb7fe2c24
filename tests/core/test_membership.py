from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from ltm.core.bottleneck import class_centroids, class_membership, class_sums, image_features
from strategies import Samples, betas, samples


def centroids_of(drawn: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    counts = drawn.labels.bincount(minlength=drawn.num_classes)
    sums = class_sums(drawn.merged, drawn.labels, drawn.num_classes)
    return class_centroids(sums, counts), counts > 0


@given(samples())
def test_centroids_are_renormalised_means_of_normalised_features(drawn: Samples) -> None:
    centroids, present = centroids_of(drawn)
    for a in range(drawn.num_classes):
        own = drawn.merged[drawn.labels == a]
        if not present[a]:
            assert centroids[a].count_nonzero() == 0
            continue
        mean = (own / own.norm(dim=1, keepdim=True)).mean(0)
        torch.testing.assert_close(centroids[a] * mean.norm(), mean)


@given(samples())
def test_membership_is_the_papers_softmax_over_present_classes(drawn: Samples) -> None:
    centroids, present = centroids_of(drawn)
    phi = class_membership(drawn.merged, centroids, drawn.beta, present)
    unit = drawn.merged / drawn.merged.norm(dim=1, keepdim=True)
    distances = (unit[:, None] - centroids[present]).square().sum(-1)
    expected = torch.softmax(-drawn.beta * distances, dim=-1)
    torch.testing.assert_close(phi[:, present], expected, rtol=1e-8, atol=1e-10)
    assert phi[:, ~present].count_nonzero() == 0
    torch.testing.assert_close(phi.sum(-1), torch.ones_like(phi[:, 0]))


@given(betas(1e-3, 10.0), st.integers(0, 2**32 - 1))
def test_membership_measures_distance_to_centroids_of_any_length(beta: float, seed: int) -> None:
    """A centroid is zero where a class's features cancel, so lengths matter."""
    generator = torch.Generator().manual_seed(seed)
    centroids = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    features = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    unit = features / features.norm(dim=1, keepdim=True)
    expected = torch.softmax(-beta * torch.cdist(unit, centroids).square(), dim=-1)
    torch.testing.assert_close(class_membership(features, centroids, beta), expected)


@given(betas(), st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_membership_is_never_nan(beta: float, dtype: torch.dtype) -> None:
    for features in (torch.zeros(3, 4), torch.ones(1, 4), torch.full((3, 4), 6e4)):
        for num_classes in (1, 5):
            for present in (None, torch.zeros(num_classes, dtype=torch.bool)):
                centroids = torch.zeros(num_classes, 4, dtype=dtype)
                phi = class_membership(features.to(dtype), centroids, beta, present)
                assert phi.isfinite().all()
                assert (phi.sum(-1) - float(present is None)).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    features, centroids = torch.randn(6, 16).to(dtype), torch.randn(4, 16).to(dtype)
    phi = class_membership(features, centroids, beta=10.0)
    assert phi.dtype == torch.float32
    torch.testing.assert_close(phi, class_membership(features.float(), centroids.float(), 10.0))


def test_autocast_does_not_reach_the_formula() -> None:
    features, centroids = torch.randn(6, 64), torch.randn(4, 64)
    expected = class_membership(features, centroids, 50.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(class_membership(features, centroids, 50.0), expected)


def test_gradient_flows_into_features_only() -> None:
    features = torch.randn(3, 5, requires_grad=True)
    centroids = torch.randn(4, 5, requires_grad=True)
    class_membership(features, centroids, 1.0)[:, 0].sum().backward()
    assert features.grad is not None
    assert features.grad.abs().sum() > 0
    assert centroids.grad is None


def test_image_features_are_block_means() -> None:
    images = torch.rand(2, 3, 64, 96)
    blocks = images.reshape(2, 3, 32, 2, 32, 3).mean((3, 5))
    torch.testing.assert_close(image_features(images), blocks.flatten(1))
    assert image_features(torch.randint(256, (1, 3, 8, 8), dtype=torch.uint8)).shape == (1, 3072)


def test_a_compiled_graph_gives_the_same(unchecked_shapes: None) -> None:
    features, centroids = torch.randn(3, 5), torch.randn(4, 5)
    compiled = torch.compile(class_membership, fullgraph=True, backend="eager")
    assert torch.equal(
        compiled(features, centroids, 3.0), class_membership(features, centroids, 3.0)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": -1.0}, r"beta is -1\.0: a positive"),
        ({"beta": float("nan")}, "beta is nan"),
        ({"features": torch.zeros(0, 5)}, r"features has shape \(0, 5\): a batch of at least one"),
        ({"features": torch.zeros(3, 2, 5)}, r"features has shape \(3, 2, 5\): 2 dimensions"),
        ({"features": torch.zeros(3, 4)}, r"features has shape \(3, 4\): \(3, 5\) is needed"),
        ({"centroids": torch.zeros(0, 5)}, r"centroids has shape \(0, 5\)"),
        ({"present": torch.ones(3, dtype=torch.bool)}, r"present has shape \(3,\): \(4,\)"),
    ],
)
def test_bad_membership_input_is_named(
    change: dict[str, Any], message: str, unchecked_shapes: None
) -> None:
    good: dict[str, Any] = {
        "features": torch.zeros(3, 5),
        "centroids": torch.zeros(4, 5),
        "beta": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        class_membership(**(good | change))


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (3, 8, 8), (1, 3, 0, 8)])
def test_bad_images_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="images has shape"):
        image_features(torch.zeros(shape))

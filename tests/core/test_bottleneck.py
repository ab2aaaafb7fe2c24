import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import ltm
from ltm.core import bottleneck
from ltm.core.bottleneck import (
    class_centroids,
    class_membership,
    class_sums,
    information_bottleneck,
    mutual_information,
    variational_q,
)
from strategies import Samples, betas, sample_bounds, samples, variational

ROUNDING = 1e-10


def measure(drawn: Samples, **options: Any) -> bottleneck.InformationBottleneck:
    return information_bottleneck(
        drawn.merged,
        drawn.inputs,
        drawn.labels,
        drawn.num_classes,
        drawn.beta,
        **options,
    )


def membership(x: torch.Tensor, drawn: Samples) -> torch.Tensor:
    counts = drawn.labels.bincount(minlength=drawn.num_classes)
    centroids = class_centroids(class_sums(x, drawn.labels, drawn.num_classes), counts)
    return class_membership(x, centroids, drawn.beta, counts > 0)


@settings(max_examples=100)
@given(samples())
def test_theorem_the_bound_holds(drawn: Samples) -> None:
    result = measure(drawn)
    assert result.loss <= result.bound - result.c0 + ROUNDING
    assert result.loss == result.input_information - result.label_information


@settings(max_examples=100)
@given(samples(), st.data())
def test_theorem_the_bound_holds_for_any_q(drawn: Samples, data: st.DataObject) -> None:
    own = measure(drawn, floor=0.0)
    other = measure(drawn, q=data.draw(variational(drawn.num_classes)))
    assert other.loss == own.loss
    assert other.loss <= other.bound - other.c0 + ROUNDING
    assert own.bound <= other.bound + ROUNDING  # the samples' own Q is the tightest


@given(samples(beta=betas(1.0, 30.0)))
def test_a_mislabelled_q_is_noticed(drawn: Samples) -> None:
    """Columns that sum to more than one void the theorem: the test above is able to fail."""
    result = measure(drawn, q=torch.full((drawn.num_classes,) * 2, 1e6, dtype=torch.float64))
    assert result.loss > result.bound - result.c0


@given(samples())
def test_bound_is_the_mean_of_the_papers_triple_sum(drawn: Samples) -> None:
    phi_merged, phi_inputs = membership(drawn.merged, drawn), membership(drawn.inputs, drawn)
    result = measure(drawn)
    q = variational_q(bottleneck._label_table(phi_merged, drawn.labels))
    first = torch.einsum("ia,ib->iab", phi_merged, torch.xlogy(phi_inputs, phi_inputs)).sum((1, 2))
    second = (phi_merged * q.log()[:, drawn.labels].T).sum(1)
    torch.testing.assert_close(result.bound, (first - second).mean())
    terms = sample_bounds(phi_merged, phi_inputs, drawn.labels, q)
    torch.testing.assert_close(terms, first - second)


@given(samples())
def test_tables_are_the_papers_sums(drawn: Samples) -> None:
    phi_merged, phi_inputs = membership(drawn.merged, drawn), membership(drawn.inputs, drawn)
    num = len(drawn.labels)
    joint = sum(torch.outer(a, b) for a, b in zip(phi_merged, phi_inputs, strict=True)) / num
    torch.testing.assert_close(bottleneck.joint_table(phi_merged, phi_inputs), joint)
    one_hot = torch.nn.functional.one_hot(drawn.labels, drawn.num_classes).double()
    by_label = bottleneck._label_table(phi_merged, drawn.labels)
    torch.testing.assert_close(by_label, phi_merged.T @ one_hot / num)
    inputs = phi_inputs.mean(0)
    torch.testing.assert_close(measure(drawn).c0, torch.xlogy(inputs, inputs).sum())


@given(samples())
def test_mutual_information_is_the_papers_double_sum(drawn: Samples) -> None:
    joint = bottleneck.joint_table(membership(drawn.merged, drawn), membership(drawn.inputs, drawn))
    rows, columns = joint.sum(1), joint.sum(0)
    expected = 0.0
    for a in range(drawn.num_classes):
        for b in range(drawn.num_classes):
            if joint[a, b] > 0:
                expected += float(joint[a, b] * (joint[a, b] / (rows[a] * columns[b])).log())
    assert float(mutual_information(joint)) == pytest.approx(expected, abs=1e-9)
    assert float(mutual_information(joint)) >= -ROUNDING


@given(samples(), st.sampled_from([0.0, 1e-6, 1e-2]))
def test_q_sums_to_one_above_its_floor(drawn: Samples, floor: float) -> None:
    phi = membership(drawn.merged, drawn)
    q = variational_q(bottleneck._label_table(phi, drawn.labels), floor)
    torch.testing.assert_close(q.sum(0), torch.ones_like(q[0]))
    assert q.min() >= floor / (1 + drawn.num_classes * floor) * (1 - 1e-12)
    for y in range(drawn.num_classes):
        own = phi[drawn.labels == y]
        expected = own.mean(0) if len(own) else torch.full_like(q[:, y], 1 / drawn.num_classes)
        torch.testing.assert_close(q[:, y], expected, rtol=0, atol=floor * drawn.num_classes + 1e-9)


def test_separated_classes_are_known_exactly() -> None:
    """One-hot features at a sharp beta: X~ tells all of Y, and an unrelated X nothing."""
    labels = torch.arange(4).repeat(2)
    merged = torch.eye(4, dtype=torch.float64)[labels]
    same = torch.ones(8, 3, dtype=torch.float64)
    result = information_bottleneck(merged, same, labels, num_classes=6, beta=100.0)
    assert float(result.loss) == pytest.approx(-math.log(4))
    assert float(result.c0) == pytest.approx(-math.log(4))
    assert float(result.bound) == pytest.approx(-math.log(4), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("case", ["one class", "one sample", "identical", "zero", "empty classes"])
def test_degenerate_samples_give_no_nan(dtype: torch.dtype, beta: float, case: str) -> None:
    num = 1 if case == "one sample" else 6
    features = torch.randn(num, 5)
    if case in ("identical", "zero"):
        features = torch.full((num, 5), float(case == "identical"))
    features = features.to(dtype).requires_grad_()
    num_classes = {"one class": 1, "empty classes": 50}.get(case, 3)
    labels = torch.arange(num) % min(num_classes, 3)
    result = information_bottleneck(features, features.detach(), labels, num_classes, beta)
    assert result.loss.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert all(value.isfinite() for value in vars(result).values())
    assert result.loss <= result.bound - result.c0 + 1e-5
    (gradient,) = torch.autograd.grad(result.loss + result.bound, features)
    assert gradient.isfinite().all()


def test_loss_and_bound_can_be_minimised() -> None:
    labels = torch.arange(4).repeat(5)
    merged = torch.randn(20, 3, 4, requires_grad=True)
    before = information_bottleneck(merged, torch.randn(20, 3, 8, 8), labels, 4)
    (gradient,) = torch.autograd.grad(before.bound, merged)
    after = information_bottleneck(merged - gradient, torch.randn(20, 3, 8, 8), labels, 4)
    assert after.label_information > before.label_information


def test_the_public_name_is_this_function() -> None:
    assert ltm.information_bottleneck is information_bottleneck


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": -2.0}, r"beta is -2\.0: a positive"),
        ({"num_classes": 0}, "num_classes is 0, but must be at least 1"),
        ({"num_classes": 2}, "labels range from 0 to 2: with 2 classes they must lie in 0 to 1"),
        ({"labels": torch.tensor([0, -1, 1])}, "labels range from -1 to 1"),
        ({"labels": torch.zeros(3)}, "labels are of type torch.float32: whole numbers"),
        ({"labels": torch.tensor([0, 1])}, r"labels has shape \(2,\): \(3,\) is needed"),
        ({"merged": torch.zeros(0, 4)}, r"merged has shape \(0, 4\): a batch of at least one"),
        ({"merged": torch.zeros(3, 0)}, r"merged has shape \(3, 0\): at least one value"),
        ({"merged": torch.full((3, 4), torch.nan)}, "merged has 12 values that are NaN"),
        ({"inputs": torch.zeros(2, 4)}, "inputs has 2 samples: 3 are needed"),
        ({"inputs": torch.tensor(1.0)}, r"inputs has shape \(\)"),
        ({"q": torch.ones(2, 2)}, r"q has shape \(2, 2\): \(4, 4\) is needed"),
        ({"floor": -0.1}, r"floor is -0\.1: a number in \[0, 1\)"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "merged": torch.zeros(3, 4),
        "inputs": torch.zeros(3, 4),
        "labels": torch.tensor([0, 1, 2]),
        "num_classes": 4,
    }
    with pytest.raises(ValueError, match=message):
        information_bottleneck(**(good | change))

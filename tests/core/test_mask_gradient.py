"""The closed form against autograd, which differentiates the bound itself."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor

from ltm.core.bottleneck import class_membership, negative_entropy, normalise
from ltm.core.mask_gradient import (
    Step,
    bound_gradient,
    class_offsets,
    pooled_gradient,
    token_gradient,
    weigh,
)
from paper_gradient import feature_gradient, membership_gradient, psi
from strategies import betas, sample_bounds, variational


@dataclass(frozen=True)
class Problem:
    """A batch of tokens Z, a mask G, and what the bound needs besides."""

    tokens: Tensor
    mask: Tensor
    token_centroids: Tensor
    pooled_centroids: Tensor
    phi_inputs: Tensor
    labels: Tensor
    q: Tensor
    present: Tensor
    beta: float


@st.composite
def problems(draw: st.DrawFn, beta: st.SearchStrategy[float] | None = None) -> Problem:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    b, n, d = draw(st.integers(1, 4)), draw(st.integers(2, 7)), draw(st.integers(2, 6))
    p, c = draw(st.integers(1, n)), draw(st.integers(1, 6))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    present = torch.rand(c, generator=generator) < 0.7
    present[draw(st.integers(0, c - 1))] = True
    return Problem(
        tokens=draw(st.sampled_from([1e-2, 1.0, 1e2])) * randn(b, n, d),
        mask=randn(b, n, p).softmax(1),
        token_centroids=normalise(randn(c, p * d)) * present[:, None],
        pooled_centroids=normalise(randn(c, d)) * present[:, None],
        phi_inputs=randn(b, c).softmax(-1),
        labels=torch.randint(c, (b,), generator=generator),
        q=draw(variational(c)).clamp_min(1e-6),
        present=present,
        # Beyond, a membership is zero or one to the last digit, and so is what autograd returns.
        beta=draw(betas(1e-3, 10.0) if beta is None else beta),
    )


def bound(problem: Problem, features: Tensor, centroids: Tensor) -> Tensor:
    phi = class_membership(features, centroids, problem.beta, problem.present)
    return sample_bounds(phi, problem.phi_inputs, problem.labels, problem.q).sum()


def assert_same(actual: Tensor, expected: Tensor, scale: Tensor) -> None:
    """Equal to 1e-10 of each sample's gradient, or to rounding at `scale` where it cancels."""
    difference = (actual - expected).flatten(1).norm(dim=1)
    size = expected.flatten(1).norm(dim=1)
    assert (difference <= 1e-10 * size + 1e-14 * scale).all()


def scale_of(beta: float, costs: Tensor, features: Tensor) -> Tensor:
    """Size of what is added up in a sample's V: the gradient of one class at a time."""
    return beta * costs.amax(1) / features.norm(dim=1)


@given(problems())
def test_token_space_equals_autograd(problem: Problem) -> None:
    costs = psi(problem.q, problem.labels)
    mask = problem.mask.clone().requires_grad_()
    merged = mask.mT @ problem.tokens
    (expected,) = torch.autograd.grad(
        bound(problem, merged.flatten(1), problem.token_centroids), mask
    )
    v = feature_gradient(
        merged.detach().flatten(1),
        problem.token_centroids,
        costs,
        problem.beta,
        problem.present,
    )
    actual = token_gradient(problem.tokens, v.unflatten(1, merged.shape[1:]))
    scale = scale_of(problem.beta, costs, merged.flatten(1)) * problem.tokens.norm(dim=(1, 2))
    assert_same(actual, expected, scale)


@given(problems())
def test_pooled_space_equals_autograd(problem: Problem) -> None:
    costs = psi(problem.q, problem.labels)
    mask = problem.mask.clone().requires_grad_()
    pooled = (mask.mT @ problem.tokens).mean(1)
    (expected,) = torch.autograd.grad(bound(problem, pooled, problem.pooled_centroids), mask)
    v = feature_gradient(
        pooled.detach(),
        problem.pooled_centroids,
        costs,
        problem.beta,
        problem.present,
    )
    num_merged = mask.shape[-1]
    one_per_token = pooled_gradient(problem.tokens, v) / num_merged
    scale = scale_of(problem.beta, costs, pooled) * problem.tokens.norm(dim=(1, 2))
    assert_same(one_per_token[..., None].expand_as(expected), expected, scale)


@given(problems())
def test_soft_labels_equal_autograd(problem: Problem) -> None:
    x = (problem.mask.mT @ problem.tokens).mean(1).requires_grad_()
    phi = class_membership(x, problem.pooled_centroids, problem.beta, problem.present)
    costs = psi(problem.q, phi)
    assert not costs.requires_grad
    expected_costs = -torch.einsum("by,ay->ba", phi.detach(), problem.q.log())
    torch.testing.assert_close(costs, expected_costs)
    (expected,) = torch.autograd.grad((phi * costs).sum(), x)
    actual = feature_gradient(
        x.detach(), problem.pooled_centroids, costs, problem.beta, problem.present
    )
    assert_same(actual, expected, scale_of(problem.beta, costs, x))


@given(problems())
def test_the_prepared_gradient_is_the_same(problem: Problem) -> None:
    x, centroids = (problem.mask.mT @ problem.tokens).mean(1), problem.pooled_centroids
    assume(bool(problem.present.any()))
    offsets = class_offsets(centroids, problem.beta, problem.present)
    costs = -problem.q.clamp_min(torch.finfo(torch.float32).tiny).log().mT.contiguous()
    for labels in (None, problem.labels):
        phi = class_membership(x, centroids, problem.beta, problem.present)
        paid = psi(problem.q, phi if labels is None else labels)
        expected = feature_gradient(x, centroids, paid, problem.beta, problem.present)
        actual = bound_gradient(x, centroids, offsets, costs, beta=problem.beta, labels=labels)
        assert_same(actual, expected, scale_of(problem.beta, paid, x))


@given(problems())
def test_membership_gradient_is_the_papers_proposition(problem: Problem) -> None:
    """With S, gamma, zeta and the full psi, as printed, at beta = 1 on features as they are."""
    c = problem.pooled_centroids
    f = normalise(problem.tokens[:, 0])
    s = torch.exp(-(f[:, None] - c).square().sum(-1))
    gamma, zeta = s.sum(1, keepdim=True), s @ c
    full_psi = negative_entropy(problem.phi_inputs)[:, None] + psi(problem.q, problem.labels)
    expected = torch.zeros_like(f)
    for a in range(len(c)):
        factor = s[:, a, None] / gamma**2 * full_psi[:, a, None]
        expected += 2 * factor * (gamma * c[a] - zeta)
    actual = membership_gradient(s / gamma, psi(problem.q, problem.labels), c, 1.0)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@given(problems(), st.floats(-100, 100))
def test_what_is_constant_in_psi_cancels(problem: Problem, constant: float) -> None:
    costs = psi(problem.q, problem.labels)
    x = problem.tokens.mean(1)
    args = (problem.beta, problem.present)
    plain = feature_gradient(x, problem.pooled_centroids, costs, *args)
    shifted = feature_gradient(x, problem.pooled_centroids, costs + constant, *args)
    scale = problem.beta / x.norm(dim=1, keepdim=True)
    assert ((plain - shifted).abs() <= 1e-12 * (1 + abs(constant)) * scale).all()


def first_term(problem: Problem, mask: Tensor, num_classes: int) -> Tensor:
    """Sum of the bound's first term over the first `num_classes` merged classes."""
    pooled = (mask.mT @ problem.tokens).mean(1)
    phi = class_membership(pooled, problem.pooled_centroids, problem.beta, problem.present)
    inputs = torch.xlogy(problem.phi_inputs, problem.phi_inputs)
    return torch.einsum("ia,ib->", phi[:, :num_classes], inputs)


@given(problems())
def test_first_term_of_the_bound_does_not_depend_on_the_mask(problem: Problem) -> None:
    mask = problem.mask.clone().requires_grad_()
    num_classes = len(problem.q)
    (gradient,) = torch.autograd.grad(first_term(problem, mask, num_classes), mask)
    pooled = (mask.mT @ problem.tokens).mean(1)
    scale = problem.beta * problem.tokens.norm() / pooled.norm(dim=1).min()
    assert gradient.abs().max() <= 1e-12 * scale


def test_without_its_last_class_the_first_term_does_depend_on_the_mask() -> None:
    """The test above is able to fail: it is the sum over all classes that cancels."""
    centroids = torch.eye(3, dtype=torch.float64)
    problem = Problem(
        tokens=torch.randn(2, 4, 3).double(),
        mask=torch.rand(2, 4, 2).double().softmax(1).requires_grad_(),
        token_centroids=centroids,
        pooled_centroids=centroids,
        phi_inputs=torch.rand(2, 3).double().softmax(-1),
        labels=torch.tensor([0, 1]),
        q=torch.full((3, 3), 1 / 3).double(),
        present=torch.ones(3, dtype=torch.bool),
        beta=1.0,
    )
    (gradient,) = torch.autograd.grad(first_term(problem, problem.mask, 2), problem.mask)
    assert gradient.abs().max() > 1e-3


@given(problems(beta=betas(1e-3, 1e3)))
def test_a_step_downhill_lowers_the_bound(problem: Problem) -> None:
    pooled = problem.tokens.mean(1)
    costs = psi(problem.q, problem.labels)
    v = feature_gradient(pooled, problem.pooled_centroids, costs, problem.beta, problem.present)
    step = 1e-6 * v * pooled.norm() ** 2 / (1 + problem.beta**2)
    before = bound(problem, pooled, problem.pooled_centroids)
    after = bound(problem, pooled - step, problem.pooled_centroids)
    assert after <= before + 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("case", ["one class", "one sample", "identical", "zero", "no class"])
def test_degenerate_features_give_no_nan(dtype: torch.dtype, beta: float, case: str) -> None:
    num_samples, num_classes = (1 if case == "one sample" else 3), (1 if case == "one class" else 4)
    features = torch.randn(num_samples, 6)
    if case in ("identical", "zero"):
        features = torch.full((num_samples, 6), float(case == "identical"))
    features = features.to(dtype).requires_grad_()
    centroids = normalise(torch.randn(num_classes, 6)).to(dtype)
    if case == "identical":
        centroids = normalise(features.detach()[:1]).expand(num_classes, -1)
    present = torch.full((num_classes,), case != "no class")
    q = torch.eye(num_classes).to(dtype)  # zeros included
    costs = psi(q, class_membership(features, centroids, beta, present))
    v = feature_gradient(features, centroids, costs, beta, present)
    assert v.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert costs.isfinite().all()
    assert v.isfinite().all()
    if case in ("zero", "no class", "one class"):
        assert v.count_nonzero() == 0
    (second,) = torch.autograd.grad(v.sum(), features)  # the backbone trains through the step
    assert second.isfinite().all()


def test_autocast_does_not_reach_the_formulas() -> None:
    tokens, centroids = torch.randn(2, 5, 32), normalise(torch.randn(4, 32))
    q = torch.rand(4, 4).softmax(0)

    def step() -> Tensor:
        x = tokens.mean(1)
        v = feature_gradient(x, centroids, psi(q, class_membership(x, centroids, 9.0)), 9.0)
        return pooled_gradient(tokens, v)

    expected = step()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step(), expected)


def test_samples_of_a_batch_do_not_meet() -> None:
    features, centroids = torch.randn(5, 8).double(), normalise(torch.randn(3, 8).double())
    costs = psi(torch.rand(3, 3).double().softmax(0), torch.tensor([0, 1, 2, 0, 1]))
    whole = feature_gradient(features, centroids, costs, 5.0)
    for i in range(5):
        alone = feature_gradient(features[i : i + 1], centroids, costs[i : i + 1], 5.0)
        torch.testing.assert_close(whole[i : i + 1], alone)


def test_padding_does_not_change_the_step_of_tokens() -> None:
    centroids, gain = normalise(torch.randn(3, 8)), torch.ones(1)
    step = Step(
        centroids=centroids, offsets=torch.zeros(3), costs=torch.rand(3, 3), beta=5.0, eta=1.0,
        gain=gain,
    )  # fmt: skip
    tokens, size = torch.randn(2, 6, 8), torch.ones(2, 6)
    alone, _ = weigh(tokens, size, None, step, 1)
    padded = torch.cat([tokens, torch.full((2, 4, 8), 9.0)], dim=1)
    found, _ = weigh(padded, torch.nn.functional.pad(size, (0, 4)), None, step, 1)
    assert alone is not None
    assert found is not None
    torch.testing.assert_close(found[:, :5], alone)
    single = tokens[:, :2].clone().requires_grad_()
    logits, _ = weigh(single, None, None, step, 1)
    assert logits is not None
    (gradient,) = torch.autograd.grad(logits.sum(), single)
    assert gradient.isfinite().all()

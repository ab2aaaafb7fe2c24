"""The Merge values: four forms of one idea."""

from dataclasses import replace

import pytest
import torch

from ltm.core.merge import (
    DenseMerge,
    GridMerge,
    MatchedMerge,
    StaticMerge,
    compose_weights,
    members_of,
    restore_through,
    row_normalise,
)

B, K, C = 3, 2, 5


def supports(h, w, h2, w2):
    """Overlapping windows around evenly spaced anchors, every token covered."""

    def axis(n, p):
        centres = (torch.arange(p) + 0.5) * n / p
        return ((torch.arange(n)[:, None] + 0.5 - centres).abs() <= n / p).double()

    return axis(h, h2), axis(w, w2)


def grid_merge(weight=None, num_prefix=0):
    rows, columns = supports(6, 8, 4, 5)
    return GridMerge(rows=rows, columns=columns, weight=weight, num_prefix=num_prefix)


def matched_merge(prune=False, keep_norm=False):
    assignment = torch.tensor([[0, 1, 2, 3, 2, 4, 3, 2]]).expand(B, -1)
    weight = torch.rand(B, 8, dtype=torch.float64) + 0.1
    if prune:
        weight[:, 4] = 0
    return MatchedMerge(
        assignment=assignment, weight=weight, num_places=5, num_prefix=K, keep_norm=keep_norm
    )


def merges():
    weight = torch.rand(B, 48, dtype=torch.float64) + 0.1
    dense_support = torch.kron(*supports(6, 8, 4, 5))
    size = torch.ones(1, 48 + K, dtype=torch.float64)
    return {
        "dense": DenseMerge.from_support(dense_support, weight, num_prefix=K),
        "grid": grid_merge(weight, K),
        "plain grid": grid_merge(None, K),
        "matched": matched_merge(),
        "pruned": matched_merge(prune=True),
        "static": StaticMerge.fold(grid_merge(None, K), size),
    }


@pytest.fixture(params=list(merges()))
def merge(request):
    return merges()[request.param]


def tokens(merge):
    return torch.randn(B, merge.num_in + K, C, dtype=torch.float64)


def test_a_constant_mask_is_for_its_own_number_of_tokens():
    static = merges()["static"]
    static = replace(static, members=members_of(static.matrix))
    who, share = static.members
    rows = torch.zeros_like(static.matrix).scatter(1, who.long(), share)
    assert torch.equal(rows, static.matrix)
    for number in (47, 52, 60):
        with pytest.raises(RuntimeError):
            static(torch.randn(B, number, C, dtype=torch.float64))


def test_columns_sum_to_one(merge):
    sums = merge.weights().sum(dim=1)
    torch.testing.assert_close(sums, torch.ones_like(sums))
    assert (merge.weights() >= 0).all()


def test_merging_is_the_product_with_the_weights(merge):
    x = tokens(merge)
    expected = merge.weights().mT @ x[:, K:]
    torch.testing.assert_close(merge(x)[:, K:], expected.expand(B, -1, -1))
    assert merge(x).shape[1] == merge.num_out + K


def test_prefix_tokens_pass(merge):
    x = tokens(merge)
    torch.testing.assert_close(merge(x)[:, :K], x[:, :K])
    torch.testing.assert_close(merge.restore(merge(x))[:, :K], x[:, :K])


def test_restoring_uses_the_row_normalised_mask(merge):
    if isinstance(merge, MatchedMerge):
        pytest.skip("groups restore by their place, also what was pruned")
    y = torch.randn(B, merge.num_out + K, C, dtype=torch.float64)
    weights = merge.weights()
    back = weights / weights.sum(dim=2, keepdim=True)
    torch.testing.assert_close(merge.restore(y)[:, K:], (back @ y[:, K:]).expand(B, -1, -1))


def test_constant_tokens_stay_constant(merge):
    x = torch.ones(B, merge.num_in + K, C, dtype=torch.float64)
    torch.testing.assert_close(merge(x), torch.ones_like(merge(x)))
    torch.testing.assert_close(merge.restore(merge(x)), x)


def test_sizes_count_patches(merge):
    before = torch.ones(B, merge.num_in + K, dtype=torch.float64)
    after = merge.sizes(before)
    dropped = int((merge.weight == 0).sum() / B) if isinstance(merge, MatchedMerge) else 0
    torch.testing.assert_close(
        after.expand(B, -1).sum(dim=1), before.sum(dim=1) - dropped, rtol=1e-6, atol=1e-6
    )


def test_values_of_patches_are_handed_on_as_means_by_weight(merge):
    x = tokens(merge)
    values = torch.randn(B, merge.num_in, dtype=torch.float64)
    merged, _, means = merge.apply(x, None, values)
    assert torch.equal(merged, merge(x))
    torch.testing.assert_close(means, (values[:, None] @ merge.weights())[:, 0])
    assert merge.apply(x, None).values is None


def test_separable_form_equals_the_dense_one():
    weight = torch.rand(B, 48, dtype=torch.float64) + 0.1
    grid = grid_merge(weight)
    dense = DenseMerge.from_support(torch.kron(grid.rows, grid.columns), weight)
    x = torch.randn(B, 48, C, dtype=torch.float64)
    y = torch.randn(B, 20, C, dtype=torch.float64)
    size = torch.rand(B, 48, dtype=torch.float64)
    torch.testing.assert_close(grid(x), dense(x), atol=1e-6, rtol=0)
    torch.testing.assert_close(grid.restore(y), dense.restore(y), atol=1e-6, rtol=0)
    torch.testing.assert_close(grid.sizes(size), dense.sizes(size), atol=1e-6, rtol=0)
    torch.testing.assert_close(grid.weights(), dense.weights(), atol=1e-6, rtol=0)


def test_matched_form_equals_the_dense_one():
    matched = matched_merge()
    support = torch.nn.functional.one_hot(matched.assignment, 5).double()[:, K:, K:]
    dense = DenseMerge.from_support(support, matched.weight[:, K:], num_prefix=K)
    x = tokens(matched)
    y = torch.randn(B, 5, C, dtype=torch.float64)
    torch.testing.assert_close(matched(x), dense(x), atol=1e-6, rtol=0)
    torch.testing.assert_close(matched.restore(y), dense.restore(y), atol=1e-6, rtol=0)


def test_kept_norm_is_the_largest_of_the_group():
    merge = matched_merge(keep_norm=True)
    x = tokens(merge)
    merged = merge(x)
    norms = x.norm(dim=-1)
    expected = torch.stack([norms[:, [2, 4, 7]].amax(1), norms[:, [3, 6]].amax(1), norms[:, 5]], 1)
    torch.testing.assert_close(merged[:, 2:].norm(dim=-1), expected, rtol=1e-5, atol=1e-5)
    direction = torch.nn.functional.cosine_similarity(merged, merge.average(x), dim=-1)
    torch.testing.assert_close(direction, torch.ones_like(direction), rtol=1e-5, atol=1e-5)


def test_a_pruned_token_leaves_no_trace():
    merge = matched_merge(prune=True)
    x = tokens(merge)
    changed = x.clone()
    changed[:, 4] += 100
    torch.testing.assert_close(merge(x), merge(changed))


def test_merges_compose_and_restore_in_turn():
    first = grid_merge()
    second = GridMerge(rows=torch.ones(4, 2).double(), columns=torch.eye(5).double())
    total = compose_weights([first, second])
    x = torch.randn(B, 48, C, dtype=torch.float64)
    torch.testing.assert_close(total.mT @ x, second(first(x)))
    back = restore_through([first, second], second(first(x)))
    torch.testing.assert_close(back, first.restore(second.restore(second(first(x)))))
    with pytest.raises(ValueError, match="merges"):
        compose_weights([])


def test_a_token_that_goes_nowhere_leaves_gradients_as_they_are():
    """Noise in training drops tokens; what they would add is one, not one over a tiny total."""
    support = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]], requires_grad=True)
    merge = DenseMerge.from_support(support)
    assert merge.sizes(torch.ones(1, 3)).tolist() == [[1.0, 1.0]]
    merge.sizes(torch.ones(1, 3))[0, 0].backward()
    assert support.grad[1].tolist() == [1.0, 0.0]
    rows = torch.tensor([[1.0], [0.0]], requires_grad=True)
    GridMerge(rows=rows, columns=torch.eye(2)).sizes(torch.ones(1, 4)).sum().backward()
    assert rows.grad.abs().max() <= 2


def test_sizes_are_spread_alike_by_shares_known_in_advance():
    merge, size = grid_merge(num_prefix=K), torch.rand(B, K + 48, dtype=torch.float64)
    shares = row_normalise(merge.rows), row_normalise(merge.columns)
    sizes = replace(merge, shares=shares).sizes(size)
    torch.testing.assert_close(sizes, merge.sizes(size))
    torch.testing.assert_close(sizes.sum(dim=1), size.sum(dim=1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_weights_of_a_grid_fit_into_half_precision(dtype):
    weight = 4 * (8 * torch.rand(B, 48)).exp()
    weight[0] = 4 * torch.tensor(8.0).exp()
    grid = grid_merge(weight, K)
    x, y = torch.randn(B, 48 + K, C), torch.randn(B, 20 + K, C)
    close = {"atol": 0.05, "rtol": 0.02}
    torch.testing.assert_close(grid(x.to(dtype)).float(), grid(x), **close)
    torch.testing.assert_close(grid.restore(y.to(dtype)).float(), grid.restore(y), **close)
    same = torch.full((B, 48 + K, C), 3.0, dtype=dtype)
    torch.testing.assert_close(grid(same), torch.full((B, 20 + K, C), 3.0, dtype=dtype))


def test_the_scale_of_a_grids_weights_is_free():
    weight, x = torch.rand(B, 48).double() + 0.1, torch.randn(B, 48, C).double()
    weight.requires_grad_()
    small, large = grid_merge(weight * 1e-9)(x), grid_merge(weight * 1e9)(x)
    torch.testing.assert_close(small, large)
    (scaled,) = torch.autograd.grad(small[0, 0, 0], weight)
    mask = DenseMerge.from_support(torch.kron(*supports(6, 8, 4, 5)), weight).mask
    (expected,) = torch.autograd.grad((mask.mT @ x)[0, 0, 0], weight)
    torch.testing.assert_close(scaled, expected)

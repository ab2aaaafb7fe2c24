"""Counts and budgets."""

import math

import pytest
from hypothesis import given, strategies as st

from ltm.core.schedule import (
    ceil_count,
    ceil_grid,
    constant_number,
    fit_budget,
    grid_counts,
    halve,
    require_ratio,
    weighted_rate,
)

strengths = st.floats(0, 1)


@given(strengths, strengths, st.integers(2, 400), st.integers(1, 24))
def test_stronger_never_leaves_more(weak, strong, num_in, num_sites):
    weak, strong = sorted((weak, strong))
    shares = [0.1 + 0.03 * i for i in range(num_sites)]
    for schedule in (
        lambda t: constant_number(t, num_in, num_sites),
        lambda t: weighted_rate(t, num_in, shares),
    ):
        less, more = schedule(strong), schedule(weak)
        assert all(a <= b for a, b in zip(less, more, strict=True))
        assert sorted(less, reverse=True) == less
        assert min(less) >= 1
        assert max(more) <= num_in
    assert weighted_rate(0, num_in, shares) == [num_in] * num_sites


@given(strengths, st.integers(1, 64), st.integers(1, 64), st.sampled_from([1, 7, 8]))
def test_grids_shrink_and_keep_to_windows(strength, height, width, multiple):
    counts = grid_counts([strength] * 5, (height, width), (2, 3), multiple)
    grid = (height, width)
    for index, out in enumerate(counts):
        grid = halve(grid) if index == 2 else grid
        assert 1 <= out[0] <= grid[0]
        assert 1 <= out[1] <= grid[1]
        for side, before in zip(out, grid, strict=True):
            assert side == before or side % multiple == 0 or before <= multiple or side < multiple
        grid = out


def test_ceil_formulas():
    assert ceil_count(196, 0.7) == math.ceil(137.2) == 138
    assert ceil_count(10, 0.7) == 7
    assert ceil_grid((14, 14), 0.7) == (12, 12)
    assert ceil_count(1, 0.2) == 1


@pytest.mark.parametrize("value", [0, -0.1, 1.01, float("nan")])
def test_no_share(value):
    with pytest.raises(ValueError, match=r"ratio: got .*larger than 0 and at most 1"):
        require_ratio("ratio", value)


@given(st.floats(0.05, 1))
def test_a_budget_is_met_by_the_weakest_strength(budget):
    def counts_at(strength):
        return constant_number(strength, 196, 12)

    def cost(counts):
        return sum([196, *counts[:-1]]) / (12 * 196)

    fit = fit_budget(counts_at, cost, budget)
    if fit is None:
        assert cost(counts_at(1.0)) > budget
    else:
        assert fit.cost <= budget
        assert fit.cost > budget - 0.01 or fit.strength == 0

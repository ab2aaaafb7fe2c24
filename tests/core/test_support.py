"""Where the learned support starts."""

import torch
from hypothesis import given, strategies as st

from ltm.core.support import (
    all_candidates,
    axis_candidates,
    choose,
    initial_logits,
    support_matrix,
)


@given(st.integers(1, 80), st.data())
def test_an_axis_starts_as_a_partition_that_stands_evenly(num_tokens, data):
    num_targets = data.draw(st.integers(1, num_tokens))
    candidates = axis_candidates(num_tokens, num_targets)
    support = support_matrix(choose(initial_logits(candidates)), candidates, num_tokens)
    assert torch.equal(support.sum(1), torch.ones(num_tokens))
    assert bool((support.sum(0) > 0).all())
    middles = (torch.arange(num_tokens)[:, None] * support).sum(0) / support.sum(0)
    even = (torch.arange(num_targets) + 0.5) * num_tokens / num_targets - 0.5
    assert float((middles - even).abs().max()) <= 0.5 + 1e-4


def test_all_tokens_as_candidates_start_from_the_same_partition_and_have_no_anchor():
    near = axis_candidates(14, 9)
    every = all_candidates(near, 14)
    assert every.index.shape == (9, 14)
    starts = [support_matrix(choose(initial_logits(c)), c, 14) for c in (near, every)]
    assert torch.equal(*starts)
    nothing = torch.full((9, 14), -1.0)
    assert not support_matrix(choose(nothing), every, 14).any(), "no token is always in"

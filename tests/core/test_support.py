"""Where the learned support starts."""

import torch
from hypothesis import given, strategies as st

from ltm.core.support import axis_candidates, choose, initial_logits, support_matrix


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

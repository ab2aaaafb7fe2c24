"""Matching: who leaves, where to, and in which order the rest stays."""

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from ltm.core import matching
from ltm.core.matching import (
    Rule,
    match_alternate,
    match_freely,
    match_least_harm,
    match_most_similar,
    max_leaving,
    merge_in_order,
    merge_sides_apart,
)


def metric(b=2, t=13, d=4, seed=0):
    return torch.randn(b, t, d, generator=torch.Generator().manual_seed(seed))


def naive_pairs(x, num_leaving, num_prefix):
    """The definition, one token at a time."""
    unit = torch.nn.functional.normalize(x, dim=-1)
    pairs = []
    for i in range(0, len(x), 2):
        options = [j for j in range(1, len(x), 2) if j >= num_prefix]
        if i < num_prefix:
            continue
        j = max(options, key=lambda j: float(unit[i] @ unit[j]))
        pairs.append((float(unit[i] @ unit[j]), i, j))
    return {(i, j) for _, i, j in sorted(pairs, reverse=True)[:num_leaving]}


@pytest.mark.parametrize("num_prefix", [0, 1, 2, 5])
def test_alternate_matching_is_its_definition(num_prefix):
    x = metric()
    match = match_alternate(x, 3, num_prefix=num_prefix)
    for b in range(len(x)):
        got = {(i, int(match.target[b, i])) for i in match.leaves[b].nonzero()[:, 0].tolist()}
        assert got == naive_pairs(x[b], 3, num_prefix)


@given(
    st.integers(0, 5),
    st.integers(2, 20),
    st.floats(0, 1),
    st.integers(0, 1000),
    st.sampled_from(["sides", "order"]),
)
def test_any_number_can_leave(num_prefix, num_patches, share, seed, order):
    x = metric(t=num_prefix + num_patches, seed=seed)
    num_leaving = round(share * (num_patches - 1))
    match = match_most_similar(x, num_leaving, num_prefix=num_prefix)
    assert (match.leaves.sum(dim=1) == num_leaving).all()
    assert not match.leaves[:, :num_prefix].any()
    targets = match.target[match.leaves].reshape(len(x), -1)
    assert (targets >= num_prefix).all()
    assert not match.leaves.gather(1, targets).any()
    make = merge_sides_apart if order == "sides" else merge_in_order
    merge = make(match, torch.ones(x.shape[:2]))
    places = merge.assignment[~match.leaves].reshape(len(x), -1)
    assert (places.sort(dim=1).values == torch.arange(merge.num_places)).all()
    assert (merge.assignment[:, :num_prefix] == torch.arange(num_prefix)).all()
    if order == "order":
        assert (places.diff(dim=1) > 0).all()


def test_published_order_with_and_without_prefix():
    x = metric(b=1, t=9)
    with_class = merge_sides_apart(match_alternate(x, 1, num_prefix=1), torch.ones(1, 9))
    stay = [
        i
        for i in range(9)
        if int(with_class.assignment[0].eq(with_class.assignment[0, i]).nonzero()[0]) == i
    ]
    evens = sorted(i for i in (2, 4, 6, 8) if i in stay)
    order = sorted((0, *evens, 1, 3, 5, 7), key=lambda i: int(with_class.assignment[0, i]))
    leaver = ({2, 4, 6, 8} - set(evens)) or set()
    assert [i for i in order if i not in leaver] == [
        0,
        *[e for e in evens if e not in leaver],
        1,
        3,
        5,
        7,
    ]
    match = match_alternate(x, 1)
    without = merge_sides_apart(match, torch.ones(1, 9))
    evens = [i for i in (0, 2, 4, 6, 8) if not match.leaves[0, i]]
    by_similarity = sorted(evens, key=lambda i: int(match.rank[0, i]))
    assert [int(without.assignment[0, i]) for i in by_similarity] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("patches", "prefix"), [(196, 1), (196, 0), (5, 4), (2, 0), (1, 1), (3, 1)]
)
def test_the_limit_of_sides_is_sharp(patches, prefix):
    x = metric(t=patches + prefix)
    most = max_leaving(patches, prefix)
    assert match_alternate(x, most, num_prefix=prefix).leaves.sum() == most * len(x)
    with pytest.raises(ValueError, match="num_leaving"):
        match_alternate(x, most + 1, num_prefix=prefix)
    with pytest.raises(ValueError, match="num_leaving"):
        match_freely(x, patches, num_prefix=prefix)


def test_identical_tokens_do_not_break_the_order():
    x = torch.ones(2, 16, 3)
    merge = merge_sides_apart(match_alternate(x, 5), torch.ones(2, 16))
    assert merge.assignment.min() == 0
    assert merge.assignment.max() == merge.num_places - 1


@pytest.mark.parametrize("num_prefix", [0, 1, 2])
@pytest.mark.parametrize("known", [False, True])
def test_tiles_of_pairs_decide_as_all_pairs_at_once(num_prefix, known, monkeypatch):
    torch.manual_seed(num_prefix)
    x = torch.randn(2, 150 + num_prefix, 24)
    size = torch.randint(0, 4, x.shape[:2]).float() if known else None
    attention = torch.rand(x.shape[:2]) if known else None

    def decide():
        for num_leaving, alternate in itertools.product((0, 40, 100), (False, True)):
            rule = Rule(
                num_leaving=num_leaving, num_prefix=num_prefix, protection=1, alternate=alternate
            )
            yield match_least_harm(x, rule, size=size, attention=attention)
        yield match_alternate(x, 50, num_prefix=num_prefix)
        yield match_freely(x, 100, num_prefix=num_prefix)

    whole = list(decide())
    monkeypatch.setattr(matching, "_FEWEST_ROWS", 7)
    monkeypatch.setattr(matching, "_MOST_PAIRS", 7 * 150)
    monkeypatch.setattr(matching, "_MOST_WHOLE", 0)
    for one, other in zip(whole, decide(), strict=True):
        assert torch.equal(one.leaves, other.leaves)
        assert torch.equal(one.target[one.leaves], other.target[one.leaves])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_stays_alone(value):
    tokens, attention = torch.randn(2, 46, 24), torch.rand(2, 46)
    tokens[0, 8, 3] = value
    found = match_least_harm(tokens, Rule(num_leaving=25, num_prefix=1), attention=attention)
    assert not found.leaves[0, 8]
    assert not (found.leaves[0] & (found.target[0] == 8)).any()

"""Operators of LTM per site: who leaves, what stays behind, what a config may say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import cast, get_args

import pytest
import torch

from ltm.api import merge_maps, merge_tokens_, set_ratio_, token_counts, unmerge_tokens_
from ltm.core import matching
from ltm.core.matching import Rule, by_attention, match_least_harm, match_unimportant
from ltm.methods import LTM, ByFamily, Learned, Matched
from ltm.methods.base import Hints, Site, config_from_dict
from ltm.methods.ltm.matched import MatchingMerger, Operator
from toys import SEQUENCES, pictures, toy

PRUNING: tuple[Operator, ...] = ("prune_redundant", "prune_unimportant")


def _site(num_in: int = 12, num_out: int = 8, num_prefix: int = 1) -> Site:
    return Site(
        block=1,
        depth=4,
        width=6,
        num_prefix=num_prefix,
        num_classes=0,
        grid=(3, 4),
        num_in=num_in,
        num_out=num_out,
    )


def _merger(operator: Operator, protection: float = 1.0, **site: int) -> MatchingMerger:
    config = LTM(
        sites=(1,), counts=(8,), support=Matched(operators=(operator,), protections=(protection,))
    )
    merger = config.build(_site(**site))
    assert isinstance(merger, MatchingMerger)
    return merger


def _hints(num_tokens: int = 13, num_out: int = 8) -> Hints:
    return Hints(num_out=num_out, importance=torch.rand(3, num_tokens).softmax(1))


@pytest.mark.parametrize("operator", [o for o in get_args(Operator) if o != "none"])
def test_operators_keep_the_count_and_the_prefix(operator: Operator) -> None:
    tokens = torch.randn(3, 13, 6)
    merge = _merger(operator)(tokens, _hints()).merge
    merged = merge(tokens)
    assert merged.shape == (3, 9, 6)
    assert torch.allclose(merged[:, 0], tokens[:, 0], atol=1e-6)
    assert torch.allclose(merge.weights().sum(1), torch.ones(3, 8))
    sizes = merge.sizes(torch.ones(1, 13))
    assert bool((sizes >= 1).all())
    lost = 13 - sizes.sum(1)
    assert torch.equal(lost, torch.full((3,), 4.0 if operator in PRUNING else 0.0))
    assert merge.restore(merged).shape == tokens.shape


def test_norms_are_kept_by_norm_and_shrink_by_merge() -> None:
    tokens, hints = torch.randn(3, 13, 6), _hints()
    by_mean = _merger("merge")(tokens, hints).merge(tokens).norm(dim=-1)
    by_norm = _merger("norm")(tokens, hints).merge(tokens).norm(dim=-1)
    assert bool((by_norm >= by_mean - 1e-5).all())
    assert float((by_norm - by_mean).max()) > 0.1


@pytest.mark.parametrize("operator", PRUNING)
def test_pruned_tokens_leave_no_trace(operator: Operator) -> None:
    tokens, hints = torch.randn(3, 13, 6), _hints()
    merged = _merger(operator)(tokens, hints).merge(tokens)
    for image, left in zip(tokens, merged, strict=True):
        assert all(bool((image - token).abs().amax(1).min() < 1e-6) for token in left)


def test_unimportant_tokens_are_those_of_least_attention() -> None:
    attention = torch.rand(5, 12)
    match = match_unimportant(attention, 4, num_prefix=2)
    kept = attention.masked_fill(match.leaves[:, 2:], torch.inf).amin(1)
    gone = attention.masked_fill(~match.leaves[:, 2:], -torch.inf).amax(1)
    assert bool((gone <= kept).all())
    assert not bool(match.leaves[:, :2].any())


@pytest.mark.parametrize("num_prefix", [0, 1])
def test_what_is_dropped_first_belongs_to_the_first_that_stays(num_prefix: int) -> None:
    merger = _merger("prune_unimportant", num_prefix=num_prefix)
    attention = torch.linspace(0, 1, 12 + num_prefix)[None]
    tokens = torch.randn(1, 12 + num_prefix, 6)
    merge = merger(tokens, Hints(num_out=8, importance=attention)).merge
    restored = merge.restore(merge(tokens))[:, num_prefix:]
    assert torch.allclose(restored[:, :5], tokens[:, num_prefix + 4, None].expand(-1, 5, -1))


def test_twins_leave_first_and_the_less_attended_of_the_two() -> None:
    tokens = 10 * torch.eye(8)[None].repeat(2, 1, 1)
    tokens[:, 5] = tokens[:, 2] + 0.01
    attention = torch.full((2, 8), 0.1)
    attention[0, 2], attention[1, 5] = 0.2, 0.2
    match = match_least_harm(tokens, Rule(num_leaving=1, protection=1.0), attention=attention)
    assert match.leaves.nonzero().tolist() == [[0, 5], [1, 2]]
    assert [int(match.target[0, 5]), int(match.target[1, 2])] == [2, 5]


def test_protection_keeps_attended_tokens() -> None:
    torch.manual_seed(3)
    tokens, attention = torch.randn(64, 20, 6), torch.rand(64, 20) ** 4

    def attention_lost(protection: float) -> float:
        rule = Rule(num_leaving=8, protection=protection)
        match = match_least_harm(tokens, rule, attention=attention)
        return float((attention * match.leaves).sum())

    assert attention_lost(2.0) < attention_lost(1.0) < attention_lost(0.0)


def test_large_tokens_are_dearer_to_merge() -> None:
    tokens = torch.tensor([[[0.0], [1.0], [10.0], [11.0]]])
    sizes = torch.tensor([[4.0, 4.0, 1.0, 1.0]])
    match = match_least_harm(tokens, Rule(num_leaving=1), size=sizes)
    assert match.leaves.nonzero().tolist() == [[0, 2]]


def test_padding_leaves_first_and_takes_nobody_in() -> None:
    tokens = torch.randn(4, 10, 6)
    sizes = torch.ones(4, 10)
    sizes[:, 6:] = 0
    attention = torch.rand(4, 10) * sizes
    for number in (2, 4, 7):
        rule = Rule(num_leaving=number, protection=1.0)
        match = match_least_harm(tokens, rule, size=sizes, attention=attention)
        assert int(match.leaves[:, 6:].sum()) == 4 * min(number, 4)
        targets = match.target[match.leaves]
        assert bool((targets < 6).all())


def test_alternate_sides_and_where_they_do_not_suffice() -> None:
    tokens, attention = torch.randn(3, 13, 6), torch.rand(3, 13)
    rule = Rule(num_leaving=5, num_prefix=2, protection=1.0, alternate=True)
    match = match_least_harm(tokens, rule, attention=attention)
    assert not bool(match.leaves[:, 3::2].any())
    assert bool(((match.target[match.leaves] - 2) % 2 == 1).all())
    many = match_least_harm(tokens, replace(rule, num_leaving=9), attention=attention)
    assert many.leaves.sum(1).tolist() == [9, 9, 9]


def test_all_pairs_are_compared_where_that_is_cheap() -> None:
    short = replace(_site(num_in=196, num_out=100), width=192)
    sites = short, replace(short, num_in=576)
    supports = Matched(matching="auto"), Matched(matching="free"), Matched(matching="alternate")
    for support, expected in zip(supports, ([False, True], [False] * 2, [True] * 2), strict=True):
        mergers = [LTM(support=support, weights="uniform").build(site) for site in sites]
        assert [cast("MatchingMerger", merger).alternate for merger in mergers] == expected


def test_distances_in_one_product() -> None:
    x, y = torch.randn(2, 5, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    found = matching._squared_distances(x, x.square().sum(-1), y, y.square().sum(-1))
    assert torch.allclose(found, torch.cdist(x, y) ** 2, rtol=1e-5)


@pytest.mark.parametrize("name", SEQUENCES)
def test_sites_differ_within_a_network(name: str) -> None:
    model, images = toy(name), pictures(name)
    reference = model(images)
    config = LTM(
        sites=(0, 1, 2, 3),
        counts=(32, 24, 24, 16),
        support=Matched(
            operators=("merge", "prune_redundant", "none", "prune_unimportant"),
            protections=(0.0, 1.0, 0.0, 0.5),
        ),
    )
    merge_tokens_(model, config, image_size=images.shape[-1])
    assert token_counts(model) == [32, 24, 24, 16]
    with torch.no_grad():
        assert model(images).shape == reference.shape
    assert set(merge_maps(model, images)) == {0, 1, 3}
    set_ratio_(model, 0.8)
    assert token_counts(model)[1] == token_counts(model)[2]
    unmerge_tokens_(model)
    assert torch.equal(model(images), reference)


def test_attention_is_read_only_where_it_matters() -> None:
    assert _merger("norm", 0.0).needs == frozenset()
    assert _merger("norm", 0.5).needs == {"importance"}
    assert _merger("prune_unimportant", 0.0).needs == {"importance"}


def test_tokens_weigh_by_the_attention_of_their_patches() -> None:
    received, size = torch.tensor([[0.5, 0.1, 0.4]]), torch.tensor([[1.0, 1.0, 4.0]])
    tokens = torch.zeros(1, 3, 8)
    rule = Rule(num_leaving=1, num_prefix=1, protection=1.0, attended=Matched().attended)
    weight = by_attention(None, tokens, size, received, rule)
    assert torch.allclose(weight[:, 1:], (size * (3 * received / size).sqrt())[:, 1:])
    assert torch.equal(weight[:, :1], size[:, :1])  # the class token is nobody's patch
    assert torch.equal(by_attention(None, tokens, size, None, rule), size)


def test_sizes_count_by_their_power_after_a_matching_only() -> None:
    assert LTM(support=Matched(size_power=0.8)).counting() == 0.8
    assert LTM(support=Learned()).counting() == 1


def test_a_config_with_operators_is_plain_values() -> None:
    config = LTM(
        sites=(1, 3),
        counts=(20, 9),
        support=Matched(operators=("norm", "merge"), protections=(1, 0)),
    )
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_config_that_was_saved_before_a_setting_existed_is_what_it_was():
    values = LTM(ratio=0.6).to_dict()
    del values["attended"], values["size_power"]
    assert config_from_dict(values) == LTM(ratio=0.6)
    assert config_from_dict(values, saved=True) == LTM(
        ratio=0.6, support=ByFamily(matched=Matched(attended=0.0, size_power=1.0))
    )


def test_who_is_alone_in_a_group_and_the_prefix_stay_exactly_as_they_are():
    torch.manual_seed(0)
    tokens = torch.randn(3, 13, 16).bfloat16()
    merge = _merger("merge")(tokens, _hints(13, 8)).merge
    merged = merge.average(tokens)
    assert torch.equal(merged[:, 0], tokens[:, 0])
    for image in range(3):
        places = merge.assignment[image].tolist()
        for token, place in enumerate(places):
            if places.count(place) == 1:
                assert torch.equal(merged[image, place], tokens[image, token])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"operators": ("norm",)}, "operators: got 1 of them, and sites=None"),
        ({"operators": ("norm",), "sites": (1, 2)}, "one per site"),
        ({"protections": (1.0, 1.0), "sites": (2, 1)}, "ascending"),
        ({"operators": ("average",), "sites": (1,)}, "each 'merge' or 'norm' or 'prune"),
        ({"protections": (-1.0,), "sites": (1,)}, "each a number from 0 to 8"),
        ({"protection": -0.1}, "it must be a number from 0 to 8"),
        ({"attended": -0.1}, "attended: got -0.1; it must be a number from 0 to 8"),
        ({"size_power": -0.1}, "size_power: got -0.1; it must be a number from 0 to 8"),
        ({"operators": ("norm",), "sites": (1,), "support": "learned"}, "support='matching'"),
        (
            {"support": "learnt"},
            "support: got 'learnt'; it must be 'matching' or 'learned' or 'by_family', or None",
        ),
        ({"eta": "a"}, "eta: got 'a'; it must be a number"),
        ({"gain": float("nan")}, "gain: got nan; it must be a number"),
        ({"mlp": "yes"}, "mlp: got 'yes'; it must be True or False"),
        ({"ratio": True}, "ratio: got True; it must be a number, or None"),
        ({"sites": (1.5,)}, "sites: got .*; it must be a sequence, each a whole number, or None"),
        ({"counts": ((7, 7), (5,))}, "each a whole number or .a whole number, a whole number., or"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_what_does_not_fit_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LTM.from_settings(settings)


def test_none_cannot_let_tokens_go() -> None:
    model = toy("vit")
    with pytest.raises(ValueError, match="'none' for block 2, where 36 tokens are to become 20"):
        merge_tokens_(model, LTM(sites=(2,), counts=(20,), support=Matched(operators=("none",))))
    model(pictures("vit"))


@pytest.mark.parametrize("given", [{"operators": ("merge",)}, {"protections": (0.5,)}])
def test_grids_that_are_kept_have_no_operators(
    given: dict[str, tuple[Operator | float, ...]],
) -> None:
    model, grid = toy("swin"), {"sites": (0,), "counts": ((20, 20),)}
    with pytest.raises(ValueError, match="belong to a matching, and this network keeps its grids"):
        merge_tokens_(model, LTM.from_settings({**grid, **given}), 112)
    support = Matched(**given)  # type: ignore[arg-type]
    merge_tokens_(model, LTM(sites=(0,), counts=(30,), support=support), 112)

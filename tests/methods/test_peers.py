"""PiToMe, DiffRate and DTEM against their published rules, written plainly."""

import copy
from itertools import pairwise

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import ltm
from ltm.api import mergers, watching
from ltm.core.relaxation import continuous_top_k
from ltm.core.schedule import falling_number
from ltm.methods import dtem
from ltm.methods.base import Hints, Merger, MethodConfig, Site
from toys import GRIDS, pictures, size_of, toy


def built(config: MethodConfig, num_in: int = 9, num_out: int = 6, block: int = 3) -> Merger:
    site = Site(
        block=block, depth=12, width=8, num_prefix=1, num_classes=3, grid=(3, 3),
        num_in=num_in, num_out=num_out,
    )  # fmt: skip
    return config.build(site).eval()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("block", "protects"), [(3, False), (6, True)])
def test_pitome_pairs_tokens_in_the_order_of_their_energy(
    tokens: Tensor, block: int, protects: bool
) -> None:
    keys = torch.randn(2, 10, 4, generator=torch.Generator().manual_seed(1))
    config = ltm.PiToMe(margin=0.9)
    decision = built(config, block=block)(tokens, Hints(num_out=6, keys=keys))
    margin = 0.9 * (1 - block / 12)
    for image in range(2):
        unit = torch.nn.functional.normalize(keys[image, 1:], dim=-1)
        similarity = unit @ unit.T
        energies = [
            sum(float(x - margin if x > margin else torch.exp(x - margin) - 1) for x in row) / 9
            for row in similarity
        ]
        order = sorted(range(9), key=lambda i: -energies[i])
        order = order[:6] if protects else order
        sources, targets = order[::2], order[1::2]
        best = {i: max(targets, key=lambda j, i=i: float(similarity[i, j])) for i in sources}
        sources = sorted(sources, key=lambda i: -float(similarity[i, best[i]]))[:3]
        groups = {i: [i] for i in range(9) if i not in sources}
        for source in sources:
            groups[best[source]].append(source)
        wanted = [tokens[image, 0]]
        wanted += [tokens[image, [1 + i for i in groups[at]]].mean(0) for at in sorted(groups)]
        torch.testing.assert_close(decision.merge(tokens)[image], torch.stack(wanted))


def test_pitome_takes_more_than_half_away(tokens: Tensor) -> None:
    merge = built(ltm.PiToMe(), num_out=2)(tokens, Hints(num_out=2, keys=tokens)).merge
    assert merge(tokens).shape == (2, 3, 8)
    assert merge.sizes(torch.ones(1, 10)).sum(1).tolist() == [10, 10]


@pytest.mark.parametrize("dropped", [0.0, 2 / 3, 1.0])
def test_diffrate_drops_the_last_and_merges_those_before(tokens: Tensor, dropped: float) -> None:
    importance = torch.rand(2, 10, generator=torch.Generator().manual_seed(2))
    config = ltm.DiffRate(dropped=dropped)
    merge = built(config)(tokens, Hints(num_out=6, importance=importance)).merge
    for image in range(2):
        order = sorted(range(1, 10), key=lambda i: -float(importance[image, i]))
        stays, gone = order[:6], order[9 - round(3 * dropped) :]
        unit = torch.nn.functional.normalize(tokens[image], dim=-1)
        groups, counted = {i: [i] for i in stays}, dict.fromkeys(stays, 1.0)
        for source in order[6 : 9 - len(gone)]:
            target = max(stays, key=lambda j: float(unit[source] @ unit[j]))
            groups[target].append(source)
            counted[target] += max(0.0, float(unit[source] @ unit[target]))
        wanted = [tokens[image, 0], *(tokens[image, groups[i]].mean(0) for i in sorted(groups))]
        torch.testing.assert_close(merge(tokens)[image], torch.stack(wanted))
        sizes = torch.tensor([1.0, *(counted[i] for i in sorted(groups))])
        torch.testing.assert_close(merge.sizes(torch.ones(2, 10))[image], sizes)


def test_diffrate_spreads_as_its_authors_learned_for_deit_ti() -> None:
    """The published counts of patches at 0.7 GFLOPs, before the drop in the last block."""
    published = [195, 191, 157, 132, 102, 87, 71, 63, 57, 48]
    model = timm.create_model("vit_tiny_patch16_224")
    found = ltm.merge_tokens_(model, ltm.DiffRate(ratio=0.62))
    assert [site.block for site in found.sites] == list(range(1, 12))
    counts = [site.num_out for site in found.sites[:-1]]
    assert all(abs(a - b) <= 8 for a, b in zip(counts, published, strict=True)), counts


def test_diffrate_lets_calibration_choose_what_is_dropped() -> None:
    config = ltm.DiffRate(ratio=0.6)
    chosen = config.scheduled(counts=(90, 40), sites=(3, 8), choices=config.choices[1:])
    assert isinstance(chosen, ltm.DiffRate)
    assert chosen.dropped_at == (0.0, 1.0)
    assert [str(chosen.choice_at(block)) for block in (3, 8)] == [
        "0% of them dropped",
        "100% of them dropped",
    ]
    with pytest.raises(ValueError, match="dropped_at: got 1 of them"):
        ltm.DiffRate(sites=(3, 8), dropped_at=(0.5,))


@pytest.mark.parametrize("sites", [(8, 3), (3, 3)])
def test_shares_of_diffrate_belong_to_sites_in_order(sites: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"dropped_at: .* sites in ascending order"):
        ltm.DiffRate(sites=sites, dropped_at=(1.0, 0.0))


def test_dtem_without_embedding_is_tome() -> None:
    one, other = toy("vit"), toy("vit")
    ltm.merge_tokens_(one, ltm.DTEM(ratio=0.8), size_of("vit"))
    ltm.merge_tokens_(other, ltm.ToMe(counts=tuple(ltm.token_counts(one))), size_of("vit"))
    with torch.no_grad():
        for _, merger in mergers(one):
            merger.embedding.weight.zero_()  # type: ignore[union-attr, operator]
        torch.testing.assert_close(one(pictures("vit")), other(pictures("vit")))


def test_dtem_learns_through_soft_choices() -> None:
    model, images = toy("vit"), pictures("vit")
    ltm.merge_tokens_(model, ltm.DTEM(ratio=0.8), size_of("vit"))
    model.train()(images).square().sum().backward()
    for _, merger in list(mergers(model))[:-1]:  # what leaves the last block is not read
        gradient = merger.embedding.weight.grad  # type: ignore[union-attr]
        assert isinstance(gradient, Tensor)
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0


def test_a_cold_top_k_is_hard() -> None:
    order = [torch.randperm(15, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    scores = torch.stack(order).view(2, 5, 3) / 15
    found = continuous_top_k(scores, 3, 1e-3)
    best = scores.amax(dim=2)
    for image in range(2):
        rows = best[image].topk(3).indices
        expected = torch.zeros(5, 3)
        expected[rows, scores[image, rows].argmax(dim=1)] = 1
        torch.testing.assert_close(found[image], expected, atol=1e-2, rtol=0)
    warm = continuous_top_k(scores, 3, 1.0)
    assert (warm.sum(dim=2) <= 1 + 1e-6).all()


def test_a_soft_merge_moves_masses() -> None:
    model, images = toy("vit"), pictures("vit")
    ltm.merge_tokens_(model, ltm.DTEM(ratio=0.8, temperature=0.01), size_of("vit"))
    cold = copy.deepcopy(model)
    with torch.no_grad():
        soft = cold.train()(images)
        hard = model.eval()(images)
    torch.testing.assert_close(soft, hard, atol=2e-2, rtol=0)


def test_dtem_takes_tokens_in_half_precision() -> None:
    model = toy("vit")
    ltm.merge_tokens_(model, ltm.DTEM(ratio=0.8), size_of("vit"))
    for dtype in (torch.bfloat16, torch.float64):
        model.to(dtype)
        for training in (False, True):
            assert model.train(training)(pictures("vit").to(dtype)).dtype == dtype


@pytest.mark.parametrize("size", [48, 72])
def test_dtem_trains_as_many_tokens_as_it_merges(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    model = VisionTransformer(48, 8, embed_dim=32, depth=4, num_heads=2, dynamic_img_size=True)
    ltm.merge_tokens_(model.eval(), ltm.DTEM(ratio=0.8), 48)
    images, leaving = torch.randn(1, 3, size, size), []
    with torch.no_grad(), watching(model) as records:
        model(images)
    counts = [(size // 8) ** 2, *(record.merged.shape[1] - 1 for record in records)]
    soft = dtem.continuous_top_k
    monkeypatch.setattr(
        dtem, "continuous_top_k", lambda s, n, t: leaving.append(n) or soft(s, n, t)
    )
    model.train()(images)
    assert leaving == [before - after for before, after in pairwise(counts)]


@pytest.mark.parametrize("config", [ltm.PiToMe, ltm.DiffRate, ltm.DTEM])
def test_grids_are_refused(config: type[MethodConfig]) -> None:
    name = next(iter(GRIDS))
    with pytest.raises(ValueError, match=f"method: got {config.name}; it merges sequences"):
        ltm.merge_tokens_(toy(name), config(ratio=0.8), size_of(name))


def test_a_decreasing_schedule_takes_ever_fewer() -> None:
    counts = [196, *falling_number(0.9, 196, 12)]
    leaving = [before - after for before, after in pairwise(counts)]
    assert leaving == sorted(leaving, reverse=True)
    assert counts[-1] == 20
    model = toy("vit")
    report = ltm.merge_tokens_(model, ltm.ToMe(ratio=0.8, schedule="decreasing"), size_of("vit"))
    assert 0.75 < report.share <= 0.8
    assert "schedule" not in ltm.ToMe().to_dict()

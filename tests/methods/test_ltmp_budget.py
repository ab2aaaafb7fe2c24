"""LTMP's share of MACs: exact, differentiable, and met on images."""

import copy
from functools import cache, partial

import pytest
import timm
import torch
from torch import Tensor, nn

import ltm
from ltm.api import MacShare, fit_, mac_share, measure_share, mergers, report, watching
from ltm.methods.ltmp import LTMPMerger, set_thresholds_, tokens_left


@cache
def _vit() -> tuple[nn.Module, MacShare]:
    model = timm.create_model(
        "vit_tiny_patch16_224",
        num_classes=3,
        img_size=64,
        patch_size=8,
        embed_dim=64,
        depth=3,
        num_heads=2,
    )
    ltm.merge_tokens_(model, ltm.LTMP(ratio=0.8))
    return model.eval(), mac_share(model)


def thresholds(model: nn.Module) -> list[LTMPMerger]:
    return [merger for _, merger in mergers(model) if isinstance(merger, LTMPMerger)]


def expected_share(model: nn.Module, share: MacShare) -> Tensor:
    return share(tokens_left(thresholds(model)))


def meet_(
    model: nn.Module, images: Tensor, target: float, share: MacShare, tolerance: float = 0.005
) -> float:
    measure = partial(measure_share, model, images, share)
    return set_thresholds_(thresholds(model), measure, target, tolerance=tolerance)


def vit() -> nn.Module:
    return copy.deepcopy(_vit()[0])


def values(model: nn.Module) -> list[tuple[float, float]]:
    return [(m.merge_threshold.item(), m.prune_threshold.item()) for m in thresholds(model)]


def swin() -> nn.Module:
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        num_classes=3,
        img_size=56,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(2, 4),
    )
    ltm.merge_tokens_(model, ltm.LTMP(ratio=0.9), 56)
    return model.eval()


def mobilevit() -> nn.Module:
    model = timm.create_model("mobilevit_xxs", num_classes=3)
    host = model.stages[3][1]
    host.transformer = host.transformer[:1]
    ltm.merge_tokens_(model, ltm.LTMP(ratio=0.9), 128)
    return model.eval()


@pytest.mark.slow
def test_a_map_of_few_tokens_costs_all_of_it_where_nothing_leaves() -> None:
    """Its last stage has four tokens, which cannot fall often enough to tell their cost."""
    model = mobilevit()
    whole = [float(m.site.grid[0] * m.site.grid[1]) for m in thresholds(model)]
    assert float(mac_share(model)(torch.tensor(whole))) == pytest.approx(1.02, abs=0.02)
    images = torch.randn(8, 3, 128, 128)
    fit_(model, images, tolerance=0.02)
    assert measure_share(model, images) == pytest.approx(0.9, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("build", [vit, swin])
def test_the_share_is_that_of_the_plan(build: object) -> None:
    model = build()  # type: ignore[operator]
    done = report(model)
    planned = torch.tensor([float(site.num_out) for site in done.sites if site.merges])
    assert float(mac_share(model)(planned)) == pytest.approx(done.share, abs=2e-3)


@pytest.mark.slow
def test_measured_tokens_are_those_that_are_computed() -> None:
    """One image alone has no padding: what is left is what the network really runs on."""
    model, images = vit(), torch.randn(3, 3, 64, 64)
    for merger in thresholds(model):
        merger.merge_threshold.data.fill_(0.3)
    share = _vit()[1]
    alone = []
    for image in images.split(1):
        with torch.no_grad(), watching(model) as records:
            model(image)
        left = torch.tensor([float(record.merged.shape[1] - 1) for record in records])
        alone.append(float(share(left)))
    assert len(set(alone)) > 1
    assert measure_share(model, images, share) == pytest.approx(sum(alone) / 3, abs=1e-6)


@pytest.mark.parametrize("target", [0.8, 0.65])
def test_thresholds_meet_the_target_on_images(target: float) -> None:
    model, images = vit(), torch.randn(12, 3, 64, 64)
    share = _vit()[1]
    reached = meet_(model, images, target, share, tolerance=0.02)
    assert reached == pytest.approx(target, abs=0.02)
    assert measure_share(model, images, share) == pytest.approx(reached, abs=1e-9)
    # Met already: nothing moves.
    before = values(model)
    meet_(model, images, reached, share)
    assert values(model) == before


def test_the_loss_pulls_thresholds_towards_the_target() -> None:
    model, images = vit(), torch.randn(8, 3, 64, 64)
    share = _vit()[1]
    with pytest.raises(ValueError, match="no forward in training mode"):
        expected_share(model, share)
    for merger in thresholds(model):
        merger.merge_threshold.data.fill_(0.5)
    merge = [merger.merge_threshold for merger in thresholds(model)]
    optimizer = torch.optim.Adam(merge, lr=0.1)
    model.train()
    shares = []
    for _ in range(12):
        model(images)
        loss = (expected_share(model, share) - 0.6).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shares.append(expected_share(model, share).item())
    assert shares[0] > 0.7
    copy.deepcopy(model)  # what the loss reads is a part of a graph, and stays behind
    assert min(abs(share - 0.6) for share in shares) < 0.5 * abs(shares[0] - 0.6)


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_raises_no_threshold_while_too_much_is_left(seed: int) -> None:
    torch.manual_seed(seed)
    model, images = vit().train(), torch.randn(8, 3, 64, 64)
    found = thresholds(model)
    for merger in found:
        merger.merge_threshold.data.fill_(0.5)
    model(images)
    for merger in found:  # tokens leave whole
        assert merger.kept is not None
        left = merger.kept.item() * 64 * len(images)
        assert left == pytest.approx(round(left), abs=1e-3)
    (expected_share(model, _vit()[1]) - 0.6).square().backward()
    for merger in found:
        assert merger.merge_threshold.grad is not None
        assert 0 < merger.merge_threshold.grad < 1
        assert merger.prune_threshold.grad is not None
        assert merger.prune_threshold.grad < 0


def test_training_and_evaluation_agree_on_the_share() -> None:
    model, images = vit(), torch.randn(4, 3, 64, 64)
    share = _vit()[1]
    measured = measure_share(model, images, share)
    model.train()
    model(images)
    assert expected_share(model, share).item() == pytest.approx(measured, abs=0.01)


def test_what_cannot_be_met_is_said() -> None:
    model, images = vit(), torch.randn(4, 3, 64, 64)
    before = values(model)
    with pytest.raises(ValueError, match=r"target: got 0\.05; LTMP reaches"):
        meet_(model, images, 0.05, _vit()[1])
    assert values(model) == before


def test_methods_without_thresholds_take_nothing_from_images() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2)
    ltm.merge_tokens_(model, ltm.ToMe(per_block=0.8))
    assert not ltm.ToMe(ratio=0.5).needs_images()
    fit_(model, [])

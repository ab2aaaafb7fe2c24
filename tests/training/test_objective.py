"""What is minimised, and the class statistics behind it."""

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ltm
from ltm.api import mergers, merging_off, observe_, watching
from ltm.core.bottleneck import ClassStatistics, class_membership
from ltm.data.loading import Batch
from ltm.methods.ltm.step import LTMMerger
from ltm.training.objective import (
    Objective,
    class_tokens,
    mean_bound,
    refresh_statistics_,
    statistical_mergers,
    take_statistics_,
)
from ltm.training.settings import ObjectiveSettings
from strategies import sample_bounds


def build(method: Any = None) -> nn.Module:
    model = timm.create_model(
        "vit_tiny_patch16_224",
        num_classes=3,
        img_size=32,
        patch_size=8,
        embed_dim=16,
        depth=3,
        num_heads=2,
    )
    ltm.merge_tokens_(model, method or ltm.LTM(per_block=0.8, sites=(1, 2)))
    return model


def batches() -> list[Batch]:
    return [Batch(torch.randn(6, 3, 32, 32), torch.arange(6) % 3) for _ in range(3)]


def informed() -> tuple[nn.Module, list[Batch]]:
    model, data = build(), batches()
    ltm.collect_statistics_(model, data, passes=2)
    return model, data


def site_features(model: nn.Module, images: Tensor) -> list[Tensor]:
    model.eval()
    with torch.no_grad(), watching(model) as records:
        model(images)
    found = []
    for record in records:
        if isinstance(record.merger, LTMMerger) and record.decision is not None:
            assert record.size is not None
            found.append(record.merger.feature(record.merged, record.size))
    return found


def test_cross_entropy_alone_is_the_default() -> None:
    model, data = informed()
    images, labels = data[0]
    losses = Objective(model, ObjectiveSettings())(model, images, labels)
    assert losses.total.equal(F.cross_entropy(losses.logits, labels))
    assert not losses.records
    smooth = Objective(model, ObjectiveSettings(), smoothing=0.1)(model, images, labels)
    assert smooth.total.item() == pytest.approx(
        F.cross_entropy(smooth.logits, labels, label_smoothing=0.1).item()
    )
    soft = F.one_hot(labels, 3).float()
    assert Objective(model, ObjectiveSettings(), smoothing=0.1)(
        model, images, soft
    ).total.item() == pytest.approx(losses.total.item(), rel=1e-5)


def test_the_bound_is_the_papers_up_to_the_inputs_share() -> None:
    model, data = informed()
    images, labels = data[0]
    model.eval()
    with watching(model) as records:
        model(images)
    expected = []
    for merger, feature in zip(
        statistical_mergers(model), site_features(model, images), strict=True
    ):
        step = merger.informative
        assert step is not None
        phi = class_membership(feature, step.centroids, merger.weights.beta, step.present)
        certain = F.one_hot(labels, 3).float()  # inputs of zero entropy: no share of theirs
        q = (-step.costs).exp().mT
        expected.append(sample_bounds(phi, certain, labels, q).mean())
    assert mean_bound(records, labels).item() == pytest.approx(
        torch.stack(expected).mean().item(), rel=1e-4
    )
    weighted = Objective(model, ObjectiveSettings(bound_weight=2.0))(model, images, labels)
    extra = weighted.total - weighted.cross_entropy
    assert extra.item() == pytest.approx(2 * mean_bound(records, labels).item(), rel=1e-4)
    one_hot = F.one_hot(labels, 3).float()
    torch.testing.assert_close(mean_bound(records, one_hot), mean_bound(records, labels))
    weighted.total.backward()


def test_without_statistics_there_is_no_bound() -> None:
    model, (images, labels) = build(), batches()[0]
    losses = Objective(model, ObjectiveSettings(bound_weight=2.0))(model, images, labels)
    assert losses.total.equal(losses.cross_entropy)


def test_distillation_comes_from_the_same_network_without_merging() -> None:
    model, data = informed()
    images, labels = data[0]
    objective = Objective(model, ObjectiveSettings(distill_weight=0.5, distill_temperature=2.0))
    losses = objective(model.eval(), images, labels)
    with torch.no_grad(), merging_off(model):
        teacher = model(images)
    log_p, log_q = (F.log_softmax(x / 2, dim=1) for x in (losses.logits, teacher))
    divergence = 4 * (log_q.exp() * (log_q - log_p)).sum(dim=1).mean()
    assert divergence.item() > 0
    expected = 0.5 * losses.cross_entropy + 0.5 * divergence
    assert losses.total.item() == pytest.approx(expected.item(), rel=1e-4)
    # In warm-up epochs there is nothing to distil.
    with merging_off(model):
        warm = objective(model, images, labels, merging=False)
    assert warm.total.equal(warm.cross_entropy)


def test_a_teacher_is_the_network_before_training_and_needs_no_labels() -> None:
    model, (images, labels) = build(ltm.LTM(per_block=0.5, sites=(1, 2))), batches()[0]
    objective = Objective(model.eval(), ObjectiveSettings(teacher="self"))
    with torch.no_grad(), merging_off(model):
        teacher = model(images)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # the teacher stays
    losses = objective(model, images, labels)
    log_p, log_q = losses.logits.log_softmax(-1), teacher.log_softmax(-1)
    divergence = (log_q.exp() * (log_q - log_p)).sum(dim=1).mean()
    assert losses.total.item() == pytest.approx(divergence.item(), rel=1e-4)
    assert divergence.item() > 0
    assert objective(model, images, 2 - labels).total.equal(losses.total)


@pytest.mark.slow
def test_ltmp_adds_its_budget() -> None:
    model = build(ltm.LTMP(ratio=0.8, budget_weight=3.0))
    images, labels = batches()[0]
    losses = Objective(model, ObjectiveSettings())(model.train(), images, labels)
    assert losses.share is not None
    expected = losses.cross_entropy + 3.0 * (losses.share - 0.8) ** 2
    assert losses.total.item() == pytest.approx(expected.item())
    losses.total.backward()
    for _, merger in mergers(model):
        assert merger.merge_threshold.grad is not None  # type: ignore[union-attr]


def test_an_epoch_gives_q_from_the_last_centroids_and_new_centroids() -> None:
    """Algorithm 1: Q(t) by membership in centroids(t - 1), then centroids(t)."""
    model, data = informed()
    old = [m.informative.centroids.clone() for m in statistical_mergers(model)]  # type: ignore[union-attr]
    fresh = batches()
    expected = []
    for site, (merger, centroids) in enumerate(zip(statistical_mergers(model), old, strict=True)):
        sums = ClassStatistics.zeros(3, centroids.shape[1])
        for images, labels in fresh:
            feature = site_features(model, images)[site]
            sums.update(feature, labels, class_membership(feature, centroids, merger.weights.beta))
        expected.append(sums)
    refresh_statistics_(model, fresh)
    for merger, sums in zip(statistical_mergers(model), expected, strict=True):
        step = merger.informative
        assert step is not None
        torch.testing.assert_close(step.centroids, sums.centroids().float())
        torch.testing.assert_close((-step.costs).exp().mT, sums.q().float())
    assert data


def test_batches_of_an_epoch_observed_one_by_one_are_a_pass() -> None:
    passed, data = informed()
    seen, _ = build(), None
    seen.load_state_dict(passed.state_dict())
    refresh_statistics_(passed, data)
    for images, labels in data:
        with torch.no_grad(), watching(seen.eval()) as records:
            seen(images)
        observe_(records, labels)
    take_statistics_(seen)
    for name, value in passed.state_dict().items():
        torch.testing.assert_close(seen.state_dict()[name], value)


def test_features_are_compared_block_by_block() -> None:
    model, (images, labels) = build(ltm.LTM(per_block=0.5, sites=(1, 2))), batches()[0]
    plain = Objective(model.eval(), ObjectiveSettings(teacher="self"))
    compared = Objective(model, ObjectiveSettings(teacher="self", feature_weight=2.0))
    with torch.no_grad(), merging_off(model), class_tokens(model) as wanted:
        model(images)
    with torch.no_grad(), class_tokens(model) as found:
        model(images)
    assert len(found) == len(wanted) == len(model.blocks)  # type: ignore[arg-type]
    apart = [(one - other).square().mean() for one, other in zip(found, wanted, strict=True)]
    expected = plain(model, images, labels).total + 2 * sum(apart) / len(apart)
    assert compared(model, images, labels).total.item() == pytest.approx(expected.item(), rel=1e-4)
    assert not any(block._forward_hooks for block in model.blocks)  # type: ignore[union-attr]

"""Accuracy against independent recomputation, in one process and in several."""

import math

import pytest
import timm
import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

import ltm
from evaluation_worker import Scripted
from ltm.evaluation.accuracy import (
    calibration_error,
    evaluate,
    paired_interval,
    summarise,
    wilson_interval,
)


def scripted(
    num_images: int, num_classes: int
) -> tuple[nn.Module, nn.Module, list[tuple[Tensor, Tensor]]]:
    """Two models whose logits are in the images themselves, and uneven batches of them."""
    images = torch.randn(num_images, 2, 1, num_classes)
    labels = torch.randint(num_classes, (num_images,))
    batches = list(zip(images.split(7), labels.split(7), strict=True))
    return Scripted(0), Scripted(1), batches


def test_every_number_is_what_an_independent_computation_gives() -> None:
    first, second, batches = scripted(50, 9)
    outputs = evaluate({"a": first, "b": second}, batches, original="a")
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    a, b = (3 * images[:, i, 0] for i in (0, 1))
    row = summarise(outputs["b"])
    assert row.num_images == 50
    assert row.top1 == pytest.approx(float(multiclass_accuracy(b, labels, 9, average="micro")))
    top5 = multiclass_accuracy(b, labels, 9, average="micro", top_k=5)
    assert row.top5 == pytest.approx(float(top5))
    assert row.loss == pytest.approx(float(nn.functional.cross_entropy(b, labels)), rel=1e-5)
    expected = multiclass_calibration_error(b.softmax(1), labels, 9, n_bins=15)
    assert row.calibration_error == pytest.approx(float(expected), abs=1e-6)
    assert row.agreement == pytest.approx(float((a.argmax(1) == b.argmax(1)).float().mean()))
    p, q = a.softmax(1), b.softmax(1)
    divergence = (p * (p / q).log()).sum(1).mean()
    assert row.divergence == pytest.approx(float(divergence), rel=1e-4)
    original = summarise(outputs["a"])
    assert original.agreement == 1
    assert original.divergence == pytest.approx(0, abs=1e-6)


def test_two_classes_have_all_labels_among_five() -> None:
    first, _, batches = scripted(10, 2)
    row = summarise(evaluate({"a": first}, batches)["a"])
    assert row.top5 == 1
    assert row.agreement is None
    assert row.divergence is None


def test_models_are_given_back_as_they_were() -> None:
    model = timm.create_model("test_vit", num_classes=3).train()
    model.get_submodule("patch_embed").eval()
    ltm.merge_tokens_(model, ltm.ToMe(ratio=0.8))
    evaluate({"a": model}, [(torch.randn(2, 3, 160, 160), torch.tensor([0, 2]))])
    assert model.training
    assert not model.get_submodule("patch_embed").training


@pytest.mark.parametrize(
    ("models", "original", "sentence"),
    [({}, None, "there are none"), ({"a": Scripted(0)}, "b", "it must be one of a")],
)
def test_bad_models_are_refused(models: dict, original: str | None, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        evaluate(models, [], original=original)


def test_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match="there are no images"):
        evaluate({"a": Scripted(0)}, [])


def test_perfect_confidence_is_perfectly_calibrated() -> None:
    assert calibration_error(torch.ones(8), torch.ones(8, dtype=torch.bool)) == 0
    assert calibration_error(torch.ones(8), torch.zeros(8, dtype=torch.bool)) == 1
    assert calibration_error(torch.zeros(8), torch.zeros(8, dtype=torch.bool)) == 0


def test_paired_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Two networks, 300 images, 92% and 94% right, often on the same images."""
    generator = torch.Generator().manual_seed(1)
    hits, trials = 0, 600
    for _ in range(trials):
        luck = torch.rand(300, generator=generator)
        flips = torch.rand(300, generator=generator) < 0.03
        a, b = luck < 0.92, (luck < 0.94) ^ flips
        truth = 0.92 - (0.94 - 0.03 * (0.94 - 0.06))
        found = paired_interval(a, b)
        assert found.low <= found.difference <= found.high
        hits += found.low <= truth <= found.high
    assert 0.925 <= hits / trials <= 0.985


def test_paired_interval_of_equal_networks_is_not_empty() -> None:
    same = torch.rand(100) < 0.7
    found = paired_interval(same, same)
    assert found.difference == 0
    assert found.low < 0 < found.high < 0.03


def test_pairing_narrows_the_interval() -> None:
    a = torch.arange(1000) % 4 > 0
    b = a.clone()
    b[:8] = False
    found = paired_interval(a, b)
    assert found.difference == pytest.approx(0.006)
    low, high = wilson_interval(750, 1000)
    assert found.high - found.low < (high - low) / 3


@pytest.mark.parametrize(("first", "second"), [(3, 4), (0, 0)])
def test_bad_pairs_are_refused(first: int, second: int) -> None:
    with pytest.raises(ValueError, match="the same images"):
        paired_interval(torch.ones(first), torch.ones(second))


def test_wilson_interval_is_the_textbook_one() -> None:
    low, high = wilson_interval(8, 10)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert math.isclose(sum(wilson_interval(5, 10)), 1)

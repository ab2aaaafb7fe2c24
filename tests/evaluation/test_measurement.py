"""Measurements of networks side by side."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ltm.evaluation.latency import BASE
from ltm.evaluation.measurement import Measurements


class Counting(nn.Module):
    """A network that counts the images it has seen."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return self.head(images)


def batches() -> list[Any]:
    images = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    return list(zip(images.split(8), (torch.arange(30) % 3).split(8), strict=True))


@pytest.mark.parametrize("labelled", [True, False])
def test_a_network_that_is_added_is_compared_without_running_the_original_again(
    labelled: bool,
) -> None:
    base, other = Counting(0), Counting(1)
    together = Measurements({BASE: base, "other": other}, labelled=labelled)
    together.measure_accuracy(batches())
    added = Measurements({BASE: base}, labelled=labelled)
    added.measure_accuracy(batches())
    seen, labels = base.seen, added.outputs[BASE].label
    again = zip((images for images, _ in batches()), labels.split(8), strict=True)
    added.add_accuracy("other", other, list(again))
    assert base.seen == seen
    for name in ("label", "prediction", "correct", "agrees"):
        one, two = (getattr(m.outputs["other"], name) for m in (together, added))
        assert torch.equal(one, two)
    assert added.difference("other", BASE) == together.difference("other", BASE)
    assert added.difference("other", BASE).difference != 0


def test_without_labels_the_predictions_of_the_original_are_right() -> None:
    base, other = Counting(0), Counting(1)
    measured = Measurements({BASE: base, "other": other}, labelled=False)
    measured.measure_accuracy(batches())
    assert measured.outputs[BASE].correct.all()
    outputs = measured.outputs["other"]
    assert torch.equal(outputs.correct, outputs.agrees)
    assert 0 < outputs.correct.double().mean() < 1

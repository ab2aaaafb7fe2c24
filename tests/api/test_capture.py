"""Captured networks: what goes in and comes out; that graphs are right, only a GPU can show."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ltm
from ltm.api.graphs import Captured
from toys import pictures, toy


def recorded(run: Callable[[Tensor], Any], images: Tensor) -> tuple[Callable[[], None], Any]:
    """A graph on the processor: whatever is in `images` later goes to the same output."""
    output = run(images)

    def replay() -> None:
        for kept, new in zip(output, run(images), strict=True):
            kept.copy_(new)

    return replay, output


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("ltm.api.graphs._record", recorded)
    return Captured(lambda x: (x.sum((1, 2, 3)), -x[:, 0]), torch.randn(4, 3, 2, 2))


@pytest.mark.parametrize("number", [4, 3, 1])
def test_smaller_batches_are_part_of_a_larger_one(captured: Any, number: int) -> None:
    images, others = torch.randn(2, number, 3, 2, 2)
    sums, negative = captured(images)
    captured(others)
    torch.testing.assert_close(sums, images.sum((1, 2, 3)))
    torch.testing.assert_close(negative, -images[:, 0])


@pytest.mark.parametrize("shape", [(5, 3, 2, 2), (4, 3, 2, 4), (4, 1, 2, 2)])
def test_other_batches_are_refused(captured: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"captured for at most \[4, 3, 2, 2\]"):
        captured(torch.randn(shape))


def test_nothing_is_captured_without_a_gpu() -> None:
    with pytest.raises(ValueError, match="they are on cpu; CUDA graphs need an NVIDIA GPU"):
        ltm.capture(nn.Identity().eval(), torch.randn(1, 3, 2, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_forward_is_the_forward() -> None:
    model = toy("vit").cuda()
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.9))
    images = pictures("vit", 4).cuda()
    others = images.flip(0)
    with pytest.raises(ValueError, match="training mode"):
        ltm.capture(model.train(), images)
    run = ltm.capture(model.eval(), images)
    with torch.no_grad():
        expected = model(images), model(others)
    del model
    torch.cuda.empty_cache()
    torch.testing.assert_close(run(images), expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run(others[:3]), expected[1][:3], atol=1e-4, rtol=1e-4)

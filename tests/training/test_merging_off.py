"""A converted model can stand in for its original: warm-up epochs and distillation rely on it."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch import nn

import ltm
from ltm.api import conversion_of, mergers, merging_off, reconvert_

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 64, "depth": 4, "embed_dim": 48, "num_heads": 3}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 56, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)},
    ),
    "mobilevit": ("mobilevit_xxs", {}),
    "efficientvit": ("efficientvit_b0", {}),
}


def build(family: str) -> nn.Module:
    name, arguments = MODELS[family]
    return timm.create_model(name, num_classes=5, **arguments).eval()


def size_of(family: str) -> int:
    return {"vit": 64, "swin": 56}.get(family, 64)


@pytest.mark.parametrize("family", MODELS)
def test_without_merging_a_converted_model_is_its_original(family: str) -> None:
    model, images = build(family), torch.randn(2, 3, size_of(family), size_of(family))
    with torch.no_grad():
        original = model(images)
        ltm.merge_tokens_(model, ltm.LTM(per_block=0.5), size_of(family))
        merged = model(images)
        with merging_off(model):
            paused = model(images)
        again = model(images)
    torch.testing.assert_close(paused, original, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(merged, original, atol=1e-4)
    assert torch.equal(again, merged)


def test_windows_that_were_fitted_to_fewer_tokens_come_back() -> None:
    """Deep in a Swin the map gets smaller than the window, whose bias is then indexed anew."""
    model, images = build("swin"), torch.randn(1, 3, 56, 56)
    with torch.no_grad():
        original = model(images)
        ltm.merge_tokens_(model, ltm.LTM(per_block=0.6), 56)
        assert any(getattr(m, "slot", None) and m.slot.original for m in model.modules())  # type: ignore[union-attr]
        merged = model(images)
        with merging_off(model):
            assert torch.equal(model(images), original)
        assert torch.equal(model(images), merged)


def test_nothing_is_kept_for_merges_that_do_not_happen() -> None:
    model, images = build("vit"), torch.randn(1, 3, 64, 64)
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.6))
    state = conversion_of(model).state
    with torch.no_grad(), merging_off(model):
        model(images)
    assert not state.frame.projected


def test_a_changed_ratio_keeps_the_statistics_at_work() -> None:
    model = build("vit")
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.8, sites=(1, 2)))
    images, labels = torch.randn(10, 3, 64, 64), torch.arange(10) % 5
    ltm.collect_statistics_(model, [(images, labels)])
    reconvert_(model, ltm.LTM(per_block=0.7, sites=(1, 2)))
    assert all(merger.active for _, merger in mergers(model))


@pytest.mark.parametrize("family", MODELS)
def test_a_copy_that_is_made_while_merging_is_off_merges(family: str) -> None:
    """In 0.1.0 a copy of a Swin merged with the attention windows of the original."""
    model, images = build(family), torch.randn(2, 3, size_of(family), size_of(family))
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.5), size_of(family))
    with torch.no_grad():
        merged = model(images)
        with merging_off(model):
            copied = copy.deepcopy(model)
            with merging_off(model):
                whole = model(images)
            assert torch.equal(model(images), whole)
        assert torch.equal(copied(images), merged)
        assert torch.equal(model(images), merged)
        with merging_off(copied):
            assert torch.equal(copied(images), whole)

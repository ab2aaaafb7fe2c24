"""LoRA adapters before and after conversion, and folded in."""

import copy
import sys
from typing import Any

import pytest
import timm
import torch
from torch import nn

import ltm
from ltm.api import merging_off
from ltm.training.settings import TuneSettings
from ltm.training.trainable import (
    add_lora_,
    choose_trainable_,
    has_lora,
    is_lora,
    merge_lora_,
    without_lora,
)

pytest.importorskip("peft")

MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "vit": (
        "vit_tiny_patch16_224",
        {"img_size": 48, "embed_dim": 16, "num_heads": 2, "depth": 3},
        48,
    ),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 56, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2)},
        56,
    ),
    "mobilevit": ("mobilevit_xxs", {}, 64),
    "efficientvit": ("efficientvit_b0", {}, 64),
}


def build(family: str) -> tuple[nn.Module, int]:
    name, arguments, size = MODELS[family]
    return timm.create_model(name, num_classes=3, **arguments).eval(), size


def spread_adapters_(model: nn.Module) -> None:
    """Adapters start as nothing: give them something to add."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        if is_lora(name):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "vit",
        "swin",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("mobilevit", "efficientvit")),
    ],
)
def test_before_and_after_conversion_and_folded_are_the_same(family: str) -> None:
    plain, size = build(family)
    images = torch.randn(2, 3, size, size)
    # ToMe reads the keys from the adapted projection: reading them without would merge others.
    method = ltm.ToMe(per_block=0.7)
    before, after = copy.deepcopy(plain), copy.deepcopy(plain)
    add_lora_(before, rank=2)
    ltm.merge_tokens_(before, method, size)
    ltm.merge_tokens_(after, method, size)
    add_lora_(after, rank=2)
    for model in (before, after):
        spread_adapters_(model)
        model.eval()
    with torch.no_grad():
        expected = after(images)
        torch.testing.assert_close(before(images), expected)
        ltm.merge_tokens_(plain, method, size)
        assert not torch.allclose(plain(images), expected, atol=1e-3)
        folded = without_lora(after)
        # Rounding decides near ties between keys of random networks, so nothing is merged here.
        with merging_off(folded), merging_off(after):
            torch.testing.assert_close(folded(images), after(images), rtol=1e-4, atol=1e-4)
    assert has_lora(after)
    assert folded.state_dict().keys() == plain.state_dict().keys()
    ltm.unmerge_tokens_(folded)


def test_adapters_and_mask_modules_train_and_nothing_else() -> None:
    model, _ = build("vit")
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.8))
    choose_trainable_(model, TuneSettings(trainable="mergers", lora_rank=2, unfreeze=("head.*",)))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    kinds = (".lora_", ".merger.", "head.")
    assert all(any(kind in name for kind in kinds) for name in trained)
    assert all(any(kind in name for name in trained) for kind in kinds)
    model.train()
    model(torch.randn(2, 3, 48, 48)).sum().backward()
    assert merge_lora_(model) == 6


def test_what_cannot_be_adapted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build("vit")
    with pytest.raises(ValueError, match="no projection of this network is named query"):
        add_lora_(model, rank=2, targets=("query",))

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"peft is not installed.* pip install 'ltm\[train\]'"):
        add_lora_(model, rank=2)

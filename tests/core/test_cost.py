"""Counting MACs."""

import pytest
import timm
import torch

import ltm
from ltm.core.cost import channels_of, count_macs, evaluating, meta_copy, meta_images


def test_known_networks():
    """Fused attention is counted: ViT-S is 4.60 G, not the 4.25 G that fvcore reads."""
    with torch.device("meta"):
        vit = timm.create_model("vit_small_patch16_224")
    assert abs(ltm.gmacs(vit) - 4.60) < 0.02


def test_a_meta_copy_holds_nothing_and_changes_nothing():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3)
    model.train()
    twin = meta_copy(model)
    assert all(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers()))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    macs = count_macs(twin, meta_images(twin, (224, 224)))
    assert macs > 1e9
    assert all(module.training for module in twin.modules())


def test_modes_come_back():
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.BatchNorm1d(2).eval())
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [m.training for m in model.modules()] == [True, True, False]


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "mobilevit_xxs"]
)
def test_images_have_the_channels_that_a_network_takes(name):
    with torch.device("meta"):
        grey, coloured, wide = (timm.create_model(name, in_chans=n) for n in (1, 3, 4))
    assert [channels_of(model) for model in (grey, coloured, wide)] == [1, 3, 4]
    assert ltm.gmacs(grey) < ltm.gmacs(coloured) < ltm.gmacs(wide)
    assert channels_of(torch.nn.Linear(2, 2)) == 3

"""Patches embedded by a product are those of the convolution."""

import copy

import pytest
import timm
import torch
from torch import nn

from ltm.core.patches import PatchProduct, embed_by_product_, embed_patches


@pytest.mark.parametrize("sides", [(32, 32), (32, 48), (37, 20)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_convolution(sides: tuple[int, int], bias: bool) -> None:
    conv = nn.Conv2d(3, 24, (8, 4), stride=(8, 4), bias=bias)
    images = torch.randn(2, 3, *sides)
    found = embed_patches(images, conv.weight, conv.bias)
    torch.testing.assert_close(found, conv(images), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "number"),
    [("vit_tiny_patch16_224", 1), ("swin_tiny_patch4_window7_224", 1), ("mobilevit_xxs", 0)],
)
def test_patch_embeddings_are_found_and_nothing_else(name: str, number: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    assert embed_by_product_(model) == number
    assert sum(isinstance(module, PatchProduct) for module in model.modules()) == number
    assert embed_by_product_(model) == 0


def test_networks_keep_their_weights_and_say_the_same() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
    changed = copy.deepcopy(model)
    embed_by_product_(changed)
    assert changed.state_dict().keys() == model.state_dict().keys()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(changed(images), expected)
        proj = changed.patch_embed.proj
        proj.forward = lambda x: embed_patches(x, proj.weight, proj.bias)
        torch.testing.assert_close(changed(images), expected, atol=1e-5, rtol=1e-4)


def test_images_smaller_than_a_patch_are_refused() -> None:
    with pytest.raises(ValueError, match="images are 8x40, smaller than a patch of 16x16"):
        embed_patches(torch.randn(1, 3, 8, 40), torch.randn(4, 3, 16, 16), None)

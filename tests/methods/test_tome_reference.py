"""Our ToMe against the published algorithm, written a second time: equal with the same weights."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import ltm
from ltm.api import unmerge_tokens_
from ltm.evaluation.reference_tome import ReferenceToMe

PLAIN: dict[str, dict[str, Any]] = {
    "class token": {},
    "distilled": {"model": "deit_tiny_distilled_patch16_224"},
    "no prefix": {"class_token": False, "global_pool": "avg", "fc_norm": False},
    "odd grid": {"img_size": (80, 112)},
}


def small_vit(model: str = "vit_tiny_patch16_224", **options: Any) -> VisionTransformer:
    options = {"img_size": 96, "depth": 4, "embed_dim": 48, "num_heads": 3, **options}
    vit = timm.create_model(model, num_classes=7, **options).eval()
    assert isinstance(vit, VisionTransformer)
    return vit


@pytest.mark.filterwarnings("ignore:This network gives merged tokens")
@pytest.mark.parametrize("num_leaving", [(1, 1, 1, 1), (6, 6, 6, 6), (12, 7, 0, 3)])
@pytest.mark.parametrize("kind", PLAIN)
def test_tome_is_the_published_algorithm(kind: str, num_leaving: tuple[int, ...]) -> None:
    host = small_vit(**PLAIN[kind])
    images = torch.randn(3, 3, *(host.patch_embed.img_size or ()))
    left = [host.patch_embed.num_patches - sum(num_leaving[: i + 1]) for i in range(4)]
    ltm.merge_tokens_(host, ltm.ToMe(counts=tuple(left)))
    with torch.no_grad():
        ours, our_tokens = host(images), host.forward_features(images)
        unmerge_tokens_(host)
        untouched = host(images)
        reference = ReferenceToMe(host, num_leaving).eval()
        tokens = reference.forward_features(images)
    assert our_tokens.shape == tokens.shape
    torch.testing.assert_close(our_tokens, tokens, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(ours, untouched, atol=1e-5)
    if kind != "no prefix":  # whose published head averages without regard to sizes
        torch.testing.assert_close(ours, reference(images), atol=1e-4, rtol=1e-4)


def test_reference_without_merging_is_the_host() -> None:
    host = small_vit()
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(ReferenceToMe(host, 0)(images), host(images))


def test_reference_refuses_what_it_was_not_written_for() -> None:
    with pytest.raises(ValueError, match="not the plain ones"):
        ReferenceToMe(small_vit(init_values=0.1), 2)
    with pytest.raises(ValueError, match="is not a ViT"):
        ReferenceToMe(nn.Linear(2, 2), 2)
    with pytest.raises(ValueError, match="one number from 0 per block"):
        ReferenceToMe(small_vit(), [1, 2])


@pytest.mark.real
def test_tome_is_the_published_algorithm_on_trained_weights(real_data: Path) -> None:
    from safetensors.torch import load_file

    host = timm.create_model("vit_tiny_patch16_224").eval()
    weights = load_file(real_data / "vit_tiny_patch16_224.fp16.safetensors")
    host.load_state_dict({name: value.float() for name, value in weights.items()})
    images = torch.nn.functional.interpolate(torch.randn(2, 3, 14, 14), 224, mode="bicubic")
    ltm.merge_tokens_(host, ltm.ToMe(counts=tuple(range(188, 92, -8))))
    with torch.no_grad():
        ours = host(images)
        unmerge_tokens_(host)
        reference = ReferenceToMe(host, 8)(images)
    scale = float(reference.abs().max())
    torch.testing.assert_close(ours / scale, reference / scale, atol=1e-4, rtol=0)

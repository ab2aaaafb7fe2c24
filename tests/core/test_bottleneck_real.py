"""The theorem on real features: a trained ViT-Ti on ImageNet validation images."""

import io
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from ltm.core.bottleneck import image_features, information_bottleneck

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def images(real_data: Path) -> torch.Tensor:
    """Both images of twelve classes, in class order."""
    with zipfile.ZipFile(real_data / "imagenet-val.zip") as archive:
        names = sorted(name for name in archive.namelist() if not name.endswith("/"))
        chosen = [name for name in names if int(Path(name).parent.name) in range(0, 960, 80)]
        pictures = [Image.open(io.BytesIO(archive.read(name))).convert("RGB") for name in chosen]
    crops = [picture.resize((224, 224)) for picture in pictures]
    pixels = [torch.frombuffer(bytearray(crop.tobytes()), dtype=torch.uint8) for crop in crops]
    return torch.stack(pixels).view(-1, 224, 224, 3).permute(0, 3, 1, 2).float() / 127.5 - 1


@pytest.fixture(scope="module")
def tokens(real_data: Path, images: torch.Tensor) -> torch.Tensor:
    import timm
    from safetensors.torch import load_file

    model = timm.create_model("vit_tiny_patch16_224").eval()
    weights = load_file(real_data / "vit_tiny_patch16_224.fp16.safetensors")
    model.load_state_dict({name: value.float() for name, value in weights.items()}, strict=True)
    with torch.inference_mode():
        return model.forward_features(images)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("beta", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("space", ["class token", "pooled", "token"])
def test_the_bound_holds(
    images: torch.Tensor, tokens: torch.Tensor, space: str, beta: float
) -> None:
    merged = {"class token": tokens[:, 0], "pooled": tokens[:, 1:].mean(1), "token": tokens[:, 1:]}
    labels = torch.arange(12).repeat_interleave(2)
    result = information_bottleneck(merged[space], image_features(images), labels, 1000, beta)
    assert result.loss <= result.bound - result.c0 + 1e-5
    assert result.label_information > 0

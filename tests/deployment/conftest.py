"""A small converted network, exported once for all tests that only read the file."""

from pathlib import Path

import pytest
import torch
from jaxtyping import config as jaxtyping_config
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import ltm
from ltm.data.transforms import ImageSpec
from ltm.deployment.export import Export
from ltm.deployment.information import describe
from toys import pictures

# Counts need no search for a budget.
MERGING = ltm.LTM(counts=(24,), sites=(0,))
CLASSES = tuple(f"class {index}" for index in range(10))


def small_vit(config: ltm.LTM | ltm.ToMe | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=48, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10
    ).eval()
    if config is not None:
        ltm.merge_tokens_(model, config)
    return model


@pytest.fixture
def vit() -> nn.Module:
    """A ViT of two blocks that merges by matching."""
    return small_vit(MERGING)


@pytest.fixture(scope="session")
def images() -> Tensor:
    return pictures("vit", 16)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, images: Tensor) -> Export:
    """A folder with model.onnx and model.pt2 of such a ViT."""
    jaxtyping_config.update("jaxtyping_disable", True)
    model = small_vit(MERGING)
    spec = ImageSpec(size=(48, 48), crop_ratio=1.0, mean=(0.5,) * 3, std=(0.25,) * 3)
    folder: Path = tmp_path_factory.mktemp("exported")
    job = Export(model, folder, describe(model, class_names=CLASSES, spec=spec))
    job.write(("onnx", "program"), images)
    jaxtyping_config.update("jaxtyping_disable", False)
    return job

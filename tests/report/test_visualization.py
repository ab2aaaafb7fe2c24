"""`ltm.visualize` from Python: pictures in memory, the caller's network left alone."""

from pathlib import Path

import timm
import torch

import ltm
from ltm.api import is_merging
from ltm.data.shapes import example_pictures


def test_pictures_are_drawn_and_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "test_vit", img_size=64, depth=3, embed_dim=24, num_heads=2, num_classes=4
    ).eval()
    images = [picture.image for picture in example_pictures(2, 64)]
    result = ltm.visualize(model, images, method="tome", against="none", ratio=0.9, gif=True)
    assert not is_merging(model)
    assert result.methods == ("ToMe",)
    assert {row["image"] for row in result.tokens} == {"image 1", "image 2"}
    assert result._repr_png_().startswith(b"\x89PNG")
    paths = result.save(tmp_path)
    assert all(path.is_file() for path in paths)
    assert [path.suffix for path in paths] == [".png", ".png", ".gif", ".gif"]
    assert "weights-block" in repr(result)

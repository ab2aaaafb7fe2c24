"""From data to batches: images of the size that a model takes."""

from typing import Any

import pytest
import timm

import ltm
from ltm.data.config import DataConfig
from ltm.deployment.export import ExportSettings, model_information
from ltm.evaluation.images import expected_images, load_batches, open_images

DATA = "shapes:classes=3,size=32,val_images=4"


@pytest.fixture(scope="module")
def oblong() -> Any:
    """A network whose tokens were planned for images that are not square."""
    arguments: dict[str, Any] = {"depth": 2, "embed_dim": 24, "num_heads": 2}
    model = timm.create_model("test_vit", num_classes=3, dynamic_img_size=True, **arguments)
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.8), image_size=(96, 64))
    return model.eval()


def test_images_need_not_be_square(oblong: Any) -> None:
    assert expected_images(oblong, DataConfig(crop_ratio=0.5)).size == (96, 64)
    images = load_batches(open_images(DATA, "val"), DATA, oblong, batch_size=2, workers=0)
    assert next(iter(images))[0].shape == (2, 3, 96, 64)
    spec = model_information(oblong, ExportSettings(data=DATA, crop_ratio=0.5)).spec
    assert (spec.size, spec.crop_ratio) == ((96, 64), 0.5)

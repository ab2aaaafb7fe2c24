"""From data to batches: images of the size that a model takes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm

import ltm
from ltm.data.config import DataConfig
from ltm.data.shapes import ShapesClassification
from ltm.deployment.information import known_about
from ltm.deployment.settings import ExportSettings
from ltm.evaluation.images import expected_images, load_batches, open_images, part_images
from written import write_shards

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
    spec = known_about(oblong, ExportSettings(crop_ratio=0.5), source=DATA).spec
    assert (spec.size, spec.crop_ratio) == ((96, 64), 0.5)


def test_a_few_images_of_tar_shards_are_of_all_classes(tmp_path: Path) -> None:
    whole = ShapesClassification("val", 120, 16, num_classes=3)
    by_class = whole.select(sorted(range(120), key=lambda index: index % 3))
    write_shards(by_class, tmp_path, images_per_shard=50)
    assert open_images(str(tmp_path), "val", 6).labels.tolist() == [0, 0, 1, 1, 2, 2]
    pattern = f"{tmp_path}/val-*.tar"
    parts = part_images(pattern, split="val", images=9, calibration_images=40)
    assert parts.calibration is not None
    assert np.bincount(parts.evaluation.labels).tolist() == [3, 3, 3]
    assert np.bincount(parts.calibration.labels).tolist() == [14, 13, 13]
    assert not set(parts.evaluation.indices) & set(parts.calibration.indices)


def test_shards_are_calibrated_on_the_training_split_unless_it_shares_one(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_shards(ShapesClassification(split, 12, 16, num_classes=3), tmp_path)
    parts = part_images(str(tmp_path), split="test", images=None, calibration_images=6)
    assert parts.calibration is not None
    assert sorted(parts.calibration.labels.tolist()) == [0, 0, 1, 1, 2, 2]
    (tmp_path / "train-000.tar").rename(tmp_path / "other-000.tar")
    parts = part_images(str(tmp_path), split="test", images=None, calibration_images=6)
    assert parts.calibration is None
    assert "test-000.tar is a shard of both train and test" in parts.reason

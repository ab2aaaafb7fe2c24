"""Generated scenes, and the same as files in COCO's layout, written once."""

from pathlib import Path

import pytest

from ltm.data.shapes import ShapesDetection
from ltm.data.writing import write_coco_folder


@pytest.fixture(scope="session")
def scenes() -> ShapesDetection:
    return ShapesDetection("val", num_images=8, image_size=64, empty_ratio=0.4, seed=1)


@pytest.fixture(scope="session")
def coco_folder(scenes, tmp_path_factory) -> Path:
    return write_coco_folder(scenes, tmp_path_factory.mktemp("coco"))

"""Small generated data sets as files, written once."""

from pathlib import Path

import pytest

from ltm.data.shapes import ShapesClassification
from written import write_archive, write_image_folder, write_shards


@pytest.fixture(scope="session")
def splits() -> tuple[ShapesClassification, ShapesClassification]:
    return (
        ShapesClassification("train", num_images=24, image_size=32, num_classes=4),
        ShapesClassification("val", num_images=10, image_size=32, num_classes=4),
    )


@pytest.fixture(scope="session")
def folder(splits, tmp_path_factory) -> Path:
    return write_image_folder(splits, tmp_path_factory.mktemp("folder") / "pictures")


@pytest.fixture(scope="session")
def archive(splits, tmp_path_factory) -> Path:
    return write_archive(splits, tmp_path_factory.mktemp("archive") / "pictures.zip")


@pytest.fixture(scope="session")
def shards(splits, tmp_path_factory) -> Path:
    """Return a folder of three training shards (10, 10 and 4 images) and one of validation."""
    root = tmp_path_factory.mktemp("shards")
    for dataset in splits:
        write_shards(dataset, root, images_per_shard=10)
    return root

"""A saved detector from Python: what `ltm detect evaluate` and `predict` do."""

import json
from pathlib import Path

import pytest

from ltm import detection
from ltm.detection.coco import open_detection
from ltm.detection.saving import save_detector
from ltm.detection.ssdlite import SSDLiteConfig

DATA = "shapes:classes=2,size=48,images=2,val_images=2"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = SSDLiteConfig(backbone="mobilevit_xxs", num_classes=2, image_size=(64, 64))
    data = open_detection(DATA)
    names, numbers = data.class_names, data.category_ids
    folder = tmp_path / "saved"
    return save_detector(config.build(), config, folder, class_names=names, category_ids=numbers)


def test_an_evaluation_is_printed_and_saved(saved: Path, tmp_path: Path) -> None:
    found = detection.evaluate_detector(saved, DATA, device="cpu", workers=0, pictures=1)
    assert repr(found).startswith("boxes: AP 0")
    folder = found.save(tmp_path / "scores")
    assert json.loads((folder / "metrics.json").read_text())["num_images"] == 2
    assert json.loads((folder / "results.json").read_text()) == found.results
    assert len(list((folder / "pictures").iterdir())) == 1
    with pytest.raises(ValueError, match="is for ltm detect, not ltm segment"):
        detection.evaluate_detector(saved, DATA, device="cpu", task="mask_rcnn")


def test_objects_are_found_and_drawn(saved: Path, tmp_path: Path) -> None:
    found = detection.predict_objects(saved, [DATA], device="cpu", threshold=0.0)
    assert repr(found) == f"{len(found.results)} objects on 2 images"
    folder = found.save(tmp_path / "pictures")
    assert len(list(folder.glob("*.png"))) == 2
    with pytest.raises(ValueError, match=r"threshold is 2\.0, but must be at least 0 and at most"):
        detection.predict_objects(saved, [DATA], threshold=2.0)
    with pytest.raises(ValueError, match="images: give image files"):
        detection.predict_objects(saved, [])

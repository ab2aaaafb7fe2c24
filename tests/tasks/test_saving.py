"""Detectors survive being saved."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import timm
import torch

import ltm
from ltm.methods import LTM
from ltm.tasks.detection import SSDLiteConfig
from ltm.tasks.saving import DetectorConfig, load_detector, save_detector
from ltm.tasks.segmentation import MaskRCNNConfig

pytestmark = pytest.mark.slow

MERGING = LTM(per_block=0.5, support="learned")
CONFIGS = {
    "ssdlite": SSDLiteConfig(backbone="mobilevit_xxs", num_classes=2, image_size=(64, 64)),
    "ssdlite_ltm": SSDLiteConfig(
        backbone="mobilevit_xxs", num_classes=2, image_size=(64, 64), merging=MERGING, restore=False
    ),
    "mask_rcnn_ltm": MaskRCNNConfig(
        backbone="efficientvit_b0", num_classes=2, image_size=(64, 96), merging=MERGING, width=32
    ),
}
CATEGORIES = {"class_names": ("cat", "dog"), "category_ids": (17, 18)}


def same_outputs(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    images = torch.rand(2, 3, 64, 96)
    with torch.no_grad():
        maps: list[Any] = [cast("Any", model.eval()).backbone(images) for model in (one, other)]
    return all(torch.equal(maps[0][name], maps[1][name]) for name in maps[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_detector_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    config: DetectorConfig = CONFIGS[name]
    model = config.build()
    save_detector(model, config, tmp_path, **CATEGORIES)
    loaded = load_detector(tmp_path)
    assert loaded.config == config
    assert (loaded.class_names, loaded.category_ids) == (("cat", "dog"), (17, 18))
    assert not loaded.model.training
    assert same_outputs(model, loaded.model)
    # Again, now that it was loaded.
    save_detector(loaded.model, loaded.config, tmp_path / "again", **CATEGORIES)
    assert same_outputs(model, load_detector(tmp_path / "again").model)


def test_a_detector_on_a_saved_network_needs_it_no_more(tmp_path: Path) -> None:
    classifier = timm.create_model("efficientvit_b0", num_classes=4)
    ltm.merge_tokens_(classifier, MERGING, image_size=64)
    network = ltm.save(classifier, tmp_path / "network")
    config = SSDLiteConfig(backbone=str(network), num_classes=2, image_size=(64, 64))
    model = config.build()
    save_detector(model, config, tmp_path / "detector", **CATEGORIES)
    for file in network.iterdir():
        file.unlink()
    network.rmdir()
    loaded = load_detector(tmp_path / "detector")
    assert same_outputs(model, loaded.model)
    save_detector(loaded.model, loaded.config, tmp_path / "again", **CATEGORIES)
    assert same_outputs(model, load_detector(tmp_path / "again").model)


def test_what_is_no_detector_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no config\.json"):
        load_detector(tmp_path)
    config = CONFIGS["ssdlite"]
    save_detector(config.build(), config, tmp_path, **CATEGORIES)
    description = json.loads((tmp_path / "config.json").read_text())
    description["detector"]["num_classes"] = 5
    (tmp_path / "config.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="weights do not fit the detector"):
        load_detector(tmp_path)
    for text, message in (("{", "it is no JSON"), ('{"task": "x"}', "describes no detector")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_detector(tmp_path)

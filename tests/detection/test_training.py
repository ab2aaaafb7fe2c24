"""Detectors in training: settings, warm-up without merging, faults, several categories."""

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ltm.api import merging_network
from ltm.data.shapes import ShapesDetection
from ltm.detection.settings import (
    RECIPES,
    DetectionSettings,
    find_detection_recipe,
)
from ltm.detection.task import Detection, DetectionRow, detector_config
from ltm.methods import LTM
from ltm.models import changed
from ltm.training.fabric import make_fabric
from ltm.training.non_finite import NonFiniteLossError
from ltm.training.settings import read_settings, to_yaml
from ltm.training.trainer import Trainer
from written import write_coco_folder

pytestmark = pytest.mark.slow

TINY = {
    "detector": {"image_size": [64, 64]},
    "data": {"source": "shapes:size=48,images=4,val_images=2,classes=2", "batch_size": 2},
    "merge": {"per_block": 0.5},
    "optim": {"epochs": 2},
    "run": {"device": "cpu"},
}


def tiny(recipe: str = "shapes_ssdlite", **changes: Any) -> DetectionSettings:
    settings = changed(RECIPES[recipe], TINY)
    return changed(settings, changes)


def trainer_of(settings: DetectionSettings) -> Trainer:
    task = Detection(settings)
    task.open_data()
    torch.manual_seed(0)
    return Trainer(make_fabric(settings.run), task, task.build(print))


def test_pytorch_lightning_does_as_well_as_lightning() -> None:
    code = "import sys; sys.modules['lightning'] = None; import ltm.detection.task"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_paper_s_recipes() -> None:
    ssdlite = find_detection_recipe("ssdlite", "ssdlite")
    assert ssdlite.detector.image_size == (320, 320)
    assert (ssdlite.optim.optimizer, ssdlite.optim.schedule) == ("adamw", "cosine")
    assert (ssdlite.optim.lr, ssdlite.optim.min_lr) == (9e-4, 1.6e-6)
    mask_rcnn = find_detection_recipe("mask_rcnn", "mask_rcnn")
    assert (mask_rcnn.optim.epochs, mask_rcnn.optim.lr) == (12, 1e-3)
    assert mask_rcnn.detector.backbone == "efficientvit_b1"


@pytest.mark.parametrize("name", RECIPES)
def test_settings_survive_their_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(RECIPES[name]))
    assert read_settings(path, DetectionSettings()) == RECIPES[name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": {"epochs": 0}}, "epochs is 0"),
        ({"optim": {"lr": 0.0}}, "lr is 0.0, but must be positive"),
        ({"detector": {"image_size": [16, 64]}}, "image_size is 16"),
        ({"data": {"hflip": 2.0}}, "hflip is 2.0"),
        ({"optim": {"ema": 1.0}}, "ema is 1.0"),
        ({"eval_every": 0}, "eval_every is 0"),
        ({"detector": {"task": "mask_rcnn", "restore": False}}, "restore is off"),
        ({"merge": {"method": "ltmp"}}, "choose from ltm, tofu, tome, diffrate"),
        ({"colour": 3}, "colour is no setting"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(DetectionSettings(), changes)


def test_files_of_settings_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text, message in (("[", "no readable YAML"), ("5", "holds no settings")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_settings(path, DetectionSettings())


def test_a_detector_is_what_its_settings_say() -> None:
    config = detector_config(tiny(), 3)
    assert config.merging == LTM(per_block=0.5)
    assert detector_config(tiny(merge={"method": "none", "per_block": None}), 3).merging is None


def test_warm_epochs_do_not_merge_and_evaluation_is_due_at_the_end() -> None:
    trainer = trainer_of(tiny(merge={"warm_epochs": 1, "noise": 1.0}, eval_every=2))
    network = merging_network(trainer.model)
    assert network is not None
    first, second = (cast("DetectionRow", trainer.run_epoch(epoch)) for epoch in range(2))
    assert (first.merging, second.merging) == (False, True)
    assert first.box_ap is None
    assert second.box_ap is not None
    assert second.score == second.box_ap
    assert "not merging" in first.line(2, 0.0)
    assert "box AP" in second.line(2, 0.0)
    assert first.train_loss > 0


def test_averaged_weights_are_the_ones_that_count() -> None:
    trainer = trainer_of(tiny(optim={"ema": 0.9, "epochs": 1}, eval_every=5))
    trainer.run_epoch(0)
    assert trainer.evaluated is not trainer.model
    assert trainer.updates == 2


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    trainer = trainer_of(tiny())
    with torch.no_grad():
        next(cast("Any", trainer.model).head.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteLossError, match="not finite in epoch 1"):
        trainer.run_epoch(0)


def test_category_ids_with_gaps_come_back_in_the_results(tmp_path: Path) -> None:
    folder = write_coco_folder(ShapesDetection("train", 4, 48, 2), tmp_path)
    path = folder / "instances.json"
    path.write_text(
        path.read_text()
        .replace('"category_id": 2', '"category_id": 90')
        .replace('{"id": 2, "name"', '{"id": 90, "name"')
    )
    trainer = trainer_of(tiny(data={"source": str(folder)}))
    assert cast("Detection", trainer.task).splits.val.category_ids == (1, 90)
    found = trainer.evaluate()
    assert {result["category_id"] for result in found.results} <= {1, 90}
    assert found.scores.num_images == 4


def test_evaluating_on_the_training_images_is_said(tmp_path: Path) -> None:
    folder = write_coco_folder(ShapesDetection("train", 4, 48, 2), tmp_path)
    told = "is used for training and for evaluation, so the scores are too high"
    for source, said in ((str(folder), True), (TINY["data"]["source"], False)):
        trainer = trainer_of(tiny(data={"source": source}))
        lines = list(trainer.task.describe(trainer.model))
        assert any(told in line for line in lines) == said

"""`ltm.train` and `ltm.finetune`: the commands, from Python."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

import ltm
from ltm.api import conversion_of
from ltm.models import changed
from ltm.training.classification import Classification
from ltm.training.recipes import FINETUNE, SCRATCH
from ltm.training.settings import OptimSettings, with_options

DATA = "shapes:classes=3,size=32,images=24,val_images=9"
ARGS = ("img_size=32", "patch_size=8", "embed_dim=16", "depth=3", "num_heads=2")
TINY: dict[str, Any] = {"epochs": 1, "batch_size": 8, "workers": 0, "device": "cpu"}


def test_a_result_is_saved_and_fine_tuned(tmp_path: Path) -> None:
    options = {**TINY, "model_args": ARGS, "image_size": 32, "warm_epochs": 0}
    said: list[str] = []
    result = ltm.train("vit_tiny_patch16_224", DATA, "shapes_vit", say=said.append, **options)
    assert result.folder is None
    assert repr(result) == f"TrainResult: {result.line} after epoch 1 of 1"
    assert said[-1] == f"{result.line} after epoch 1"
    folder = result.save(tmp_path / "kept")
    assert json.loads((folder / "metrics.json").read_text()) == result.metrics
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.yaml", "curves.png", "log.csv", "metrics.json", "model"}
    tuned = ltm.finetune(folder, DATA, lr=1e-3, **TINY)
    assert tuned.settings.tune.trainable == "mergers"
    assert conversion_of(tuned.model).config == conversion_of(result.model).config


def test_a_network_of_one_s_own_is_trained_in_place() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, depth=3)
    result = ltm.finetune(model, DATA, method="tome", unfreeze=("head.*",), ratio=0.8, **TINY)
    assert result.model is model
    assert conversion_of(model).config == ltm.ToMe(ratio=0.8)
    assert result.settings.model.name == "vit_tiny_patch16_224"


def test_a_given_network_merges_as_it_is_asked_to() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, depth=3)
    ltm.merge_tokens_(model, ltm.ToMe(ratio=0.9))
    for asked, match in (
        ({"method": "ltm", "ratio": 0.8}, "merges tokens with tome, not with ltm; use method=tome"),
        ({"method": "none"}, "with tome, not with none"),
        ({"method": "tome", "per_block": 0.8}, r"per_block=None, not 0\.8"),
        (
            {"method": "tome", "method_options": ("schedule=decreasing",)},
            "schedule=constant, not decreasing",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            ltm.finetune(model, DATA, unfreeze=("head.*",), **asked, **TINY)
    result = ltm.finetune(model, DATA, method="tome", ratio=0.8, unfreeze=("head.*",), **TINY)
    assert conversion_of(model).config == ltm.ToMe(ratio=0.8)
    assert result.metrics["method"] == "tome"
    ltm.unmerge_tokens_(model)
    found = ltm.finetune(model, DATA, method="none", unfreeze=("head.*",), **TINY)
    assert found.metrics["method"] == "none"


def test_a_run_names_the_network_that_it_was_given(tmp_path: Path) -> None:
    model = timm.create_model("deit_tiny_patch16_224", num_classes=3, img_size=32, depth=2)
    settings = FINETUNE["general"]  # whose network is another
    result = ltm.finetune(model, DATA, settings, unfreeze=("head.*",), output=tmp_path, **TINY)
    assert result.metrics["model"] == "deit_tiny_patch16_224"
    assert "name: deit_tiny_patch16_224" in (tmp_path / "config.yaml").read_text()


def test_a_network_with_fewer_classes_than_the_data_is_refused() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=2, img_size=32, depth=2)
    with pytest.raises(ValueError, match="the network has 2 classes, but the data have 3"):
        ltm.train(model, DATA, **TINY)


def test_options_are_those_of_the_command() -> None:
    base = SCRATCH["shapes_vit"]
    changed = with_options(base, {"epochs": 3, "ratio": 0.6, "augment": {"mixup": 0.4}})
    assert (changed.optim.epochs, changed.merge.ratio, changed.augment.mixup) == (3, 0.6, 0.4)
    assert with_options(base, {"optim": {"lr": 1.0}, "epochs": 3}).optim.lr == 1.0
    with pytest.raises(ValueError, match="epochz is no setting; did you mean"):
        with_options(base, {"epochz": 3})
    group = {"lr": 1.0}
    assert with_options(base, {"optim": group, "epochs": 3}).optim.epochs == 3
    assert group == {"lr": 1.0}
    whole = with_options(base, {"epochs": 3, "optim": OptimSettings(lr=1.0, epochs=4)}).optim
    assert whole == OptimSettings(lr=1.0, epochs=3)
    with pytest.raises(ValueError, match="optim is 3, but must be a group of settings"):
        with_options(base, {"optim": 3, "epochs": 3})
    with pytest.raises(ValueError, match="no recipe is named shapes"):
        ltm.train(settings="shapes")


def test_numbered_folders_keep_the_head_and_random_weights_are_named(tmp_path: Path) -> None:
    picture = Image.new("RGB", (32, 32))
    for split in ("train", "val"):
        for name in ("0000", "0001"):
            (folder := tmp_path / "data" / split / name).mkdir(parents=True)
            picture.save(folder / "a.png")
    vit = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2}
    weights = timm.create_model("vit_tiny_patch16_224", num_classes=5, **vit).state_dict()
    torch.save(weights, tmp_path / "five.pt")

    def told(**model: object) -> str:
        values = {"model_args": tuple(f"{k}={v}" for k, v in vit.items()), **model}
        data = {"source": str(tmp_path / "data"), "image_size": 32}
        task = Classification(changed(FINETUNE["general"], {"model": values, "data": data}))
        task.open_data()
        return "\n".join(task.describe(task.build(said.append)))

    said: list[str] = []
    kept = told(weights=str(tmp_path / "five.pt"))
    assert "the head keeps its 5 classes, as the folders are numbered by class; --num-cl" in kept
    assert "random weights" not in kept
    assert "the head is new, for 2 classes" in told(
        weights=str(tmp_path / "five.pt"), num_classes=2
    )
    assert "warning: the network has random weights" in told()

"""`ltm calibrate`: a saved network that other commands take, and its manners."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import ltm
from ltm.cli import main

pytestmark = pytest.mark.slow

SMALL = {"depth": 3, "embed_dim": 24, "num_heads": 2}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("calibrate") / "model.safetensors"
    save_file(timm.create_model("test_vit", num_classes=5, img_size=48, **SMALL).state_dict(), path)
    return path


def call(weights: Path, *options: str) -> list[str]:
    return [
        "calibrate", "--data", "shapes:classes=5,size=48,val_images=40", "--model", "test_vit",
        "--num-classes", "5", "--image-size", "48",
        "--model-args", *(f"{name}={value}" for name, value in SMALL.items()), "--weights",
        str(weights), "--images", "40", "--trials", "2", "--workers", "0", *options,
    ]  # fmt: skip


def test_the_folder_is_a_network_for_other_commands(weights: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "calibrated"
    assert main(call(weights, "--budget", "0.8", "--output", str(folder))) == 0
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["share"] <= 0.8
    assert metrics["history"][-1]["num_images"] <= 40
    host = timm.create_model("test_vit", num_classes=5, img_size=48, **SMALL)
    model = ltm.load(folder, host)
    assert model(torch.zeros(1, 3, 48, 48)).shape == (1, 5)
    assert f"{metrics['share']:.3f} of the multiply-adds" in capsys.readouterr().out
    assert main(call(weights, "--budget", "0.8", "--output", str(folder))) == 2
    assert "--overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "give --budget or --budget-ms"),
        (("--budget", "1.5"), "budget: got 1.5"),
        (("--budget", "0.7", "--images", "0"), "images is 0, but must be at least 32"),
        (("--budget", "0.7", "--images", "-5"), "images is -5, but must be at least 32"),
        (("--budget", "0.01"), "cannot bring this network below"),
    ],
)
def test_bad_input_is_one_sentence(weights, options, says, capsys) -> None:
    assert main(call(weights, *options)) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1

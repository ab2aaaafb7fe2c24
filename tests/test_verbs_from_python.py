"""Verbs from Python: silent, with the names of the options, and the network stays as it is."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import ltm
from ltm.data.shapes import ShapesClassification
from written import write_shards

DATA = "shapes:classes=5,size=48,images=64,val_images=40"
FEW: dict[str, Any] = {"workers": 0, "device": "cpu"}


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    small = {"depth": 3, "embed_dim": 24, "num_heads": 2}
    return timm.create_model("test_vit", num_classes=5, img_size=48, **small).eval()


@pytest.mark.slow
def test_verbs_say_nothing_and_leave_the_network_alone(
    network: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = copy.deepcopy(network.state_dict())
    quick: dict[str, Any] = {"calibrate": False, "time": False, "bottleneck_images": 0}
    compressed = ltm.compress(network, DATA, ratio=0.8, compare=["tome"], **quick, **FEW)
    evaluated = ltm.evaluate(network, DATA, methods="tome", ratio=0.8, bottleneck=False, **FEW)
    calibrated = ltm.calibrate(network, DATA, budget=0.8, trials=1, images=32, **FEW)
    assert capsys.readouterr() == ("", "")
    assert not hasattr(network.blocks[0], "merger")  # type: ignore[index, union-attr]
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())

    assert "ToMe" in repr(compressed)
    assert "top-1 (%)" in repr(evaluated)
    assert "of the multiply-adds" in repr(calibrated)
    for result, name in ((compressed, "a"), (evaluated, "b"), (calibrated, "c")):
        result.save(tmp_path / name)
        assert json.loads((tmp_path / name / "metrics.json").read_text())
    for name in "ac":
        saved = ltm.load(tmp_path / name, copy.deepcopy(network))
        assert saved(torch.zeros(1, 3, 48, 48)).shape == (1, 5)
    command = json.loads((tmp_path / "a" / "metrics.json").read_text())["command"]
    assert command.startswith("ltm.compress('test_vit', 'shapes:classes=5")
    assert "ratio=0.8, compare=('tome',), calibrate=False" in command


def test_wrong_names_are_one_sentence(network: nn.Module) -> None:
    for verb in (ltm.compress, ltm.evaluate, ltm.calibrate):
        with pytest.raises(ValueError, match=r"^workrs is no setting; did you mean workers"):
            verb(network, DATA, workrs=0)
        with pytest.raises(ValueError, match=r"^images is 'many', but must be a whole number"):
            verb(network, DATA, images="many")


@pytest.mark.slow
def test_a_few_images_of_tar_shards_are_of_all_classes(network: nn.Module, tmp_path: Path) -> None:
    write_shards(ShapesClassification("val", 40, 48, 5), tmp_path, images_per_shard=10)
    data = f"{tmp_path}/val-*.tar"
    result = ltm.evaluate(network, data, images=10, bottleneck=False, **FEW)
    assert result.metrics["num_images"] == 10
    constant = copy.deepcopy(network)
    with torch.no_grad():
        constant.head.weight.zero_()  # type: ignore[union-attr]
        constant.head.bias.copy_(torch.arange(5.0))  # type: ignore[union-attr]
    result = ltm.evaluate(constant, data, images=10, bottleneck=False, **FEW)
    assert result.metrics["models"]["base"]["top1"] == pytest.approx(0.2)  # two of ten images


def test_the_settings_of_0_1_0_warn() -> None:
    from ltm.calibration import Settings

    with pytest.warns(DeprecationWarning, match=r"use ltm\.CalibrateSettings"):
        assert Settings(num_trials=3, num_sites=2) == ltm.CalibrateSettings(trials=3, sites=2)

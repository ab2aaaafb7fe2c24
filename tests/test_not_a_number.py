"""NaN and infinity are refused at every door, with the place named."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ltm
from ltm.calibration.settings import CalibrateSettings
from ltm.compression.settings import CompressSettings
from ltm.deployment.prediction import Classifier, open_writer
from ltm.evaluation.settings import EvaluateSettings
from tests.toys import toy

BAD = "blocks.1.attn.qkv.weight has 1 values that are NaN or infinite"


def _images(number: int = 8) -> Tensor:
    return torch.randn(number, 3, 48, 48, generator=torch.Generator().manual_seed(0))


def _broken(value: float = torch.nan) -> nn.Module:
    model = toy("vit")
    model.get_parameter("blocks.1.attn.qkv.weight").data[0, 0] = value
    return model


def _merging(model: nn.Module) -> nn.Module:
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.7))
    return model


def _predict(model: nn.Module, folder: Path) -> object:
    return ltm.predict(model, folder)


def _save(model: nn.Module, folder: Path) -> object:
    return ltm.save(_merging(model), folder / "new")


VERBS: dict[str, Callable[[nn.Module, Path], object]] = {
    "save": _save,
    "predict": _predict,
    "embed": lambda model, folder: ltm.embed(model, folder, folder / "new"),
    "visualize": lambda model, folder: ltm.visualize(model),
    "finetune": lambda model, folder: ltm.finetune(model, "shapes", output=folder / "new"),
    "tuning": lambda model, _: ltm.finetune(model, "shapes", teacher="self"),
    "export": lambda model, folder: ltm.export(model, folder / "new"),
    "calibrate": lambda model, _: ltm.calibrate(model, _images(32), CalibrateSettings(budget=0.7)),
    "compress": lambda model, _: ltm.compress(model, "shapes", CompressSettings(images=8)),
    "evaluate": lambda model, _: ltm.evaluate(model, "shapes", EvaluateSettings(images=8)),
}


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("verb", VERBS)
def test_weights_that_are_not_finite_are_refused_by_name(
    verb: str, value: float, tmp_path: Path
) -> None:
    """0.1.0 saved them, predicted a class with NaN for its probability, and compressed them."""
    with pytest.raises(ValueError, match=re.escape(BAD)):
        VERBS[verb](_broken(value), tmp_path)
    assert not (tmp_path / "new").exists()


def test_a_saved_folder_with_weights_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    """0.1.0 loaded it."""
    folder = ltm.save(_merging(toy("vit")), tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    for entry in [name for name in config if "checksum" in name or "sha" in name]:
        del config[entry]  # what somebody who edits weights has to do
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["blocks.1.attn.qkv.weight"][0, 0] = torch.inf
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(BAD)):
        ltm.load(folder, toy("vit"))


def test_a_bad_image_of_the_statistics_is_told_by_index() -> None:
    """0.1.0 took it, and gave NaN for every image from then on."""
    model, images = _merging(toy("vit")), _images()
    labels = torch.arange(8) % 4
    ltm.collect_statistics_(model, [(images, labels)])
    before = model(images)
    bad = images.clone()
    bad[5, 0, 3, 3] = torch.nan
    with pytest.raises(ValueError, match="batch 1: got NaN or infinite values in image 5 of 8"):
        ltm.collect_statistics_(model, [(images, labels), (bad, labels)])
    assert torch.equal(model(images), before)


def test_scores_that_are_not_finite_make_no_statistics() -> None:
    """0.1.0 made centroids of features that a broken layer gave."""
    model = _merging(toy("vit"))
    model.get_parameter("blocks.5.mlp.fc2.bias").data[0] = torch.inf
    with pytest.raises(ValueError, match=r"the model's scores: got NaN .* in image 0, 1, 2, 3, 4"):
        ltm.collect_statistics_(model, [_images()])


def test_statistics_that_are_not_finite_are_refused_by_block() -> None:
    """Whoever observes: a training loop that goes around `collect_statistics_`, say."""
    from ltm.api import conversion_of, statistical_mergers

    model = _merging(toy("vit"))
    merger = statistical_mergers(model)[0]
    from ltm.methods.base import Hints

    tokens = torch.randn(2, 20, 32)
    tokens[1, 3, 0] = torch.nan
    merger.observe(tokens, Hints(num_out=19, labels=torch.tensor([0, 1])))
    block = conversion_of(model).sites[0].block
    with pytest.raises(ValueError, match=f"class statistics of block {block}: features has"):
        merger.take_statistics_()
    assert not merger.active


def test_a_bad_image_of_a_calibration_is_told_by_index() -> None:
    """0.1.0 did not look, and said that the budget cannot be met."""
    images = _images(32)
    images[7, 1] = torch.inf
    with pytest.raises(ValueError, match="got NaN or infinite values in image 7 of 32"):
        ltm.calibrate(toy("vit"), images, CalibrateSettings(budget=0.7))


def test_predictions_are_valid_json_whatever_a_file_says(tmp_path: Path) -> None:
    """0.1.0 wrote a class with a probability of NaN, which is no JSON."""
    from PIL import Image

    path = tmp_path / "one.png"
    Image.new("RGB", (48, 48)).save(path)
    model = toy("vit")
    model.head.register_forward_hook(lambda _module, _inputs, scores: scores * torch.nan)
    classifier = Classifier(ltm.BatchPredictor(model, "top5", device="cpu"))
    written = io.StringIO()
    found = list(ltm.predict(classifier, path))
    open_writer("jsonl", written, classifier)(found[0])
    line = json.loads(written.getvalue(), parse_constant=pytest.fail)
    assert line["error"] == "the model's scores are NaN or infinite"


@pytest.mark.parametrize(
    "make",
    [
        lambda: ltm.Matched(size_power=1e5),
        lambda: ltm.Matched(attended=100),
        lambda: ltm.Matched(protection=1e3),
        lambda: ltm.Matched(protections=(1.0, 99.0)),
        lambda: ltm.Informative(eta=1e9),
        lambda: ltm.Informative(beta=1e12),
        lambda: ltm.Informative(gain=-1e9),
        lambda: ltm.LTMP(merge_threshold=1e9),
        lambda: ltm.LTMP(prune_threshold=-1e9),
        lambda: ltm.LTMP(temperature=1e-40),
        lambda: ltm.LTMP(merge_threshold_lr=1e9),
        lambda: ltm.LTMP(budget_weight=1e30),
        lambda: ltm.ToFu(switch=1.5),
    ],
)
def test_settings_are_bounded(make: Callable[[], object]) -> None:
    """0.1.0 took any finite number: `LTM(size_power=1e5, attended=100)` gave NaN."""
    with pytest.raises(
        ValueError, match=r"^\w+: got .*; it must be .*number (from|larger than) .*\d"
    ):
        make()


@pytest.mark.parametrize("number", [2, 11])
def test_there_is_one_class_name_per_class(number: int, tmp_path: Path) -> None:
    """0.1.0 saved too few, and every prediction of another class was an IndexError."""
    names = [f"kind {index}" for index in range(number)]
    with pytest.raises(ValueError, match=f"got {number} names, and the model has 10 classes"):
        ltm.save(_merging(toy("vit")), tmp_path / "new", class_names=names)
    assert not (tmp_path / "new").exists()

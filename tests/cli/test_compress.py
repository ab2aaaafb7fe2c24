"""`ltm compress` from end to end: its numbers against independent ones, bad input, Ctrl-C."""

import dataclasses
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageOps
from safetensors.torch import save_file
from timm.data import create_transform
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ltm
from ltm.api import conversion_of, report
from ltm.calibration import CalibrateResult, Calibration
from ltm.cli import main
from ltm.cli.commands import command_line
from ltm.compression.compress import Bisection, _halves, mixed
from ltm.compression.settings import CompressSettings
from ltm.data.shapes import ShapesClassification, example_pictures
from ltm.data.transforms import ImageSpec, evaluation_transform, image_spec
from ltm.deployment.forms import code_for
from ltm.evaluation.images import part_images
from ltm.evaluation.latency import Candidate, Conditions, Timing, did_not_run
from ltm.models import ModelSource

pytestmark = pytest.mark.slow

NAME = "vit_tiny_patch16_224"
ARGUMENTS: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 3,
}
WORDS = ["--model", NAME, "--model-args", *(f"{k}={v}" for k, v in ARGUMENTS.items())]
QUICK = ["--workers", "0", "--no-time", "--bottleneck-images", "0", "--pictures", "generated"]


def make_model() -> nn.Module:
    """A network of random weights whose predictions differ from image to image."""
    torch.manual_seed(1)
    model: Any = timm.create_model(NAME, num_classes=5, **ARGUMENTS).eval()
    images = ShapesClassification("test", 20, 32, 5)
    pixels = np.stack([np.asarray(images[index][0]) for index in range(20)])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
        scores = model(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1)
        model.head.bias.sub_(scores.mean(0))
        scale = 1 / (scores - scores.mean(0)).std(0)
        model.head.weight.mul_(scale[:, None])
        model.head.bias.mul_(scale)
    return model


def paint(folder: Path, split: str, per_class: int) -> None:
    images = ShapesClassification(split, 5 * per_class, 40, 5)
    for index in range(len(images)):
        image, label = images[index]
        path = (
            folder / f"{label}-{images.class_names[label].replace(' ', '-')}" / f"{index:03d}.png"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, split and not, and weights."""
    folder = tmp_path_factory.mktemp("place")
    paint(folder / "split" / "train", "train", 8)
    paint(folder / "split" / "val", "val", 8)
    paint(folder / "whole", "val", 24)
    save_file(make_model().state_dict(), folder / "weights.safetensors")
    return folder


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    """The folder of one complete run."""
    output = place / "finished"
    options = ["--data", str(place / "split"), "--weights", str(place / "weights.safetensors")]
    options += ["--compare", "tome,tofu,ltmp", "--ratio", "0.7", "--calibration-images", "40"]
    options += ["--no-calibrate", "--time-batches", "1", "--bottleneck-images", "20"]
    options += ["--forms", "eager"]
    options += ["--workers", "0", "--batch-size", "16", "--output", str(output)]
    assert main(["compress", *WORDS, *options]) == 0
    return output


def read(output: Path) -> dict[str, Any]:
    return json.loads((output / "metrics.json").read_text(encoding="utf-8"))


def predictions(model: nn.Module, folder: Path) -> Iterator[tuple[int, int]]:
    """Predicted and true class of every image: timm's transform, one image at a time."""
    transform: Any = create_transform((3, 32, 32), interpolation="bicubic", crop_pct=0.9,
                                      mean=(0.5,) * 3, std=(0.5,) * 3)  # fmt: skip
    for path in sorted(folder.rglob("*.png")):
        with Image.open(path) as image, torch.no_grad():
            scores = model(transform(image.convert("RGB"))[None])
        yield int(scores.argmax()), int(path.parent.name[0])


def test_the_numbers_are_those_of_a_plain_loop(finished: Path, place: Path) -> None:
    networks = read(finished)["networks"]
    assert list(networks) == ["base", "ltm", "tome", "tofu", "ltmp"]
    models = {"base": make_model(), "ltm": ltm.load(finished), "tome": make_model()}
    ltm.merge_tokens_(models["tome"], ltm.ToMe(ratio=0.7))
    said = {name: list(predictions(model, place / "split/val")) for name, model in models.items()}
    for name in models:
        right = [guess == label for guess, label in said[name]]
        same = [a == b for (a, _), (b, _) in zip(said[name], said["base"], strict=True)]
        accuracy = networks[name]["accuracy"]
        assert accuracy["num_images"] == len(right) == 40
        assert accuracy["top1"] == pytest.approx(np.mean(right))
        assert accuracy["agreement"] == pytest.approx(np.mean(same))
    assert len({guess for guess, _ in said["base"]}) > 2, "a constant would agree with anything"
    assert networks["ltm"]["accuracy"]["agreement"] < 1


def test_multiply_adds_are_those_of_the_counter(finished: Path) -> None:
    networks = read(finished)["networks"]
    for name, model in (("base", make_model()), ("ltm", ltm.load(finished))):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.to("meta")(torch.empty(1, 3, 32, 32, device="meta"))
        assert networks[name]["gmacs"] == pytest.approx(counter.get_total_flops() / 2e9)
        if name == "base":
            assert networks[name]["parameters"] == sum(p.numel() for p in model.parameters())
    assert networks["ltm"]["share"] <= 0.7
    assert networks["ltm"]["share"] == pytest.approx(
        networks["ltm"]["gmacs"] / networks["base"]["gmacs"]
    )
    assert networks["ltmp"]["share"] == pytest.approx(0.7, abs=0.03)


def test_a_run_leaves_a_model_a_card_and_a_report(finished: Path) -> None:
    metrics = read(finished)
    assert metrics["complete"]
    assert metrics["num_calibration_images"] == 40  # for LTMP's thresholds
    model = ltm.load(finished)
    assert conversion_of(model).frozen
    config = json.loads((finished / "config.json").read_text(encoding="utf-8"))
    assert config["label_names"][1] == "1-plain-triangle"
    assert [site["block"] for site in metrics["blocks"]] == [
        site.block for site in conversion_of(model).sites if site.merges
    ]
    card = (finished / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: timm\n")
    assert "--output finished" in card
    assert str(finished.parent) not in card
    report = (finished / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|<script|src=\"(?!data:)", report)
    assert "ltm compress" in report
    assert str(metrics["environment"]["packages"]["torch"]) in report
    assert len(re.findall(r"data:image/(png|gif|svg)", report)) >= 6
    timings = metrics["networks"]["ltm"]["timings"]
    assert [timing["batch_size"] for timing in timings] == [1]
    sites = metrics["networks"]["ltm"]["bottleneck"]
    assert all(site["loss"] <= site["bound"] - site["c0"] + 1e-6 for site in sites)
    assert len(sites) == ARGUMENTS["depth"]


def test_peers_keep_what_a_method_of_given_counts_keeps(place: Path, tmp_path: Path) -> None:
    options = ["--data", str(place / "split"), "--weights", str(place / "weights.safetensors")]
    options += ["--method", "ltm:counts=56+40,sites=0+1", "--compare", "tome"]
    assert main(["compress", *WORDS, *options, *QUICK, "--output", str(tmp_path)]) == 0
    shares = {name: network["share"] for name, network in read(tmp_path)["networks"].items()}
    kept = shares["ltm:counts=56+40,sites=0+1"]
    assert kept > 0.75
    assert kept - 0.03 < shares["tome"] <= kept


def test_images_need_not_be_square(place: Path, tmp_path: Path) -> None:
    arguments = [word for word in WORDS[3:] if "img_size" not in word]
    sizes = ["img_size=32x48", "num_classes=5"]
    model = ModelSource(model=NAME, model_args=[*arguments, *sizes]).load(untrained=True)
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    ltm.save(model, tmp_path / "run")
    options = ["--run", str(tmp_path / "run"), "--data", str(place / "split"), "--no-calibrate"]
    assert main(["compress", *options, *QUICK, "--output", str(tmp_path / "out")]) == 0
    assert conversion_of(ltm.load(tmp_path / "out")).image_size == (32, 48)


def test_a_run_is_not_overwritten_unasked(
    finished: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "metrics.json").read_text(encoding="utf-8")
    data = ["--data", str(place / "split"), "--output", str(finished)]
    assert main(["compress", *WORDS, *data]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (finished / "metrics.json").read_text(encoding="utf-8") == before


def test_an_earlier_run_can_be_compressed_further(
    finished: Path, tmp_path: Path, place: Path
) -> None:
    options = ["--run", str(finished), "--data", str(place / "split"), "--ratio", "0.6"]
    assert main(["compress", *options, "--no-calibrate", *QUICK, "--output", str(tmp_path)]) == 0
    before, after = (read(folder)["networks"] for folder in (finished, tmp_path))
    assert after["ltm"]["share"] <= 0.6
    assert after["base"]["accuracy"]["top1"] == before["base"]["accuracy"]["top1"]


def test_a_schedule_is_calibrated_on_images_set_aside(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", str(place / "whole"), "--weights", str(place / "weights.safetensors")]
    options += ["--calibration-trials", "2", *QUICK, "--output", str(tmp_path)]
    assert main(["compress", *WORDS, *options]) == 0
    assert "Calibrating on 40 images, without their labels" in capsys.readouterr().out
    metrics = read(tmp_path)
    assert metrics["num_calibration_images"] == metrics["calibration"]["num_images"] == 40
    assert metrics["networks"]["ltm"]["accuracy"]["num_images"] == 80
    assert metrics["networks"]["ltm"]["share"] <= 0.7
    found = metrics["calibration"]["config"]
    assert [site["block"] for site in metrics["blocks"]] == found["sites"]
    assert ltm.token_counts(ltm.load(tmp_path)) == found["counts"]
    assert "calibrated on 40 images" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_pictures_of_numbered_folders_have_the_names_that_the_network_knows(
    place: Path, tmp_path: Path
) -> None:
    for number, folder in enumerate(sorted((place / "split/val").iterdir())):
        shutil.copytree(folder, tmp_path / f"{number:04d}")
    model: Any = make_model()
    model.pretrained_cfg["label_names"] = ["tench, Tinca tinca", "dog", "cat", "owl", "carp"]
    found = ltm.compress(
        model, str(tmp_path), calibrate=False, time=False, bottleneck_images=0, workers=0
    )
    assert all("(tench; dog; cat; owl; carp)" in picture.alt for picture in found.illustrations[:2])


def test_what_cannot_be_calibrated_keeps_its_schedule_and_says_so(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", str(place / "split/val"), "--weights", str(place / "weights.safetensors")]
    assert main(["compress", *WORDS, *options, *QUICK, "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "The default schedule is kept: there are no images to calibrate on" in said
    assert read(tmp_path)["calibration"] is None


@pytest.fixture(scope="module")
def chosen(place: Path) -> Path:
    """The folder of a run that chose its ratio and wrote an ONNX file."""
    output = place / "chosen"
    options = ["--data", str(place / "split"), "--weights", str(place / "weights.safetensors")]
    options += ["--ratios", "0.6", "0.8", "--max-loss", "20", "--no-calibrate", "--export"]
    options += ["--form", "onnxruntime", "--time-batches", "1", "--workers", "0"]
    options += ["--bottleneck-images", "0", "--output", str(output)]
    assert main(["compress", *WORDS, *options]) == 0
    return output


def test_a_ratio_is_chosen_on_half_of_the_images_and_reported_on_the_rest(chosen: Path) -> None:
    metrics = read(chosen)
    curve = metrics["curve"]
    assert [point["ratio"] for point in curve] == [0.8, 0.6]
    assert all(point["loss"]["num_images"] == 20 for point in curve)
    assert metrics["networks"]["ltm"]["accuracy"]["num_images"] == 20
    (best,) = [point for point in curve if point["chosen"]]
    within = [point for point in curve if -100 * point["loss"]["difference"] <= 20]
    assert not within or best["timing"]["speedup"] == max(p["timing"]["speedup"] for p in within)
    assert metrics["ratio"] == best["ratio"]
    assert metrics["networks"]["ltm"]["share"] == pytest.approx(best["share"])
    assert "Ratios that were tried" in (chosen / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def flat(place: Path) -> Path:
    """A folder of images without class folders."""
    folder = place / "flat"
    folder.mkdir()
    for path in (place / "whole").rglob("*.png"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def unlabelled(place: Path, flat: Path) -> Path:
    """The folder of a run that chose its ratio on images without labels."""
    output = place / "unlabelled"
    options = ["--data", str(flat), "--weights", str(place / "weights.safetensors")]
    options += ["--ratios", "0.6", "0.8", "--max-loss", "20", "--calibration-trials", "2"]
    options += ["--compare", "tome", "--forms", "eager", "--time-batches", "1", "--workers", "0"]
    options += ["--bottleneck-images", "20", "--output", str(output)]
    assert main(["compress", *WORDS, *options]) == 0
    return output


def test_without_labels_loss_is_disagreement_with_the_original(
    unlabelled: Path, flat: Path
) -> None:
    metrics = read(unlabelled)
    assert metrics["labelled"] is False
    networks = {name: network["accuracy"] for name, network in metrics["networks"].items()}
    assert networks["base"]["top1"] == networks["base"]["agreement"] == 1
    assert all(known["top1"] == known["agreement"] for known in networks.values())
    parts = part_images(str(flat), split="val", images=None, calibration_images=256)
    _, rest = _halves(parts)
    kept, before, after = rest.evaluation, make_model(), ltm.load(unlabelled)
    shown = {Path(kept.name(index)).name for index in range(len(kept))}
    same = [a == b for a, b in zip(*(said(m, flat, shown) for m in (before, after)), strict=True)]
    assert networks["ltm"]["top1"] == pytest.approx(np.mean(same))
    for point in metrics["curve"]:
        share = point["num_changed"] / point["loss"]["num_images"]
        assert point["loss"]["difference"] == pytest.approx(-share)
    assert any(point["num_changed"] for point in metrics["curve"])
    assert len(metrics["networks"]["ltm"]["bottleneck"]) == ARGUMENTS["depth"]


def said(model: nn.Module, folder: Path, shown: set[str]) -> list[int]:
    transform: Any = create_transform((3, 32, 32), interpolation="bicubic", crop_pct=0.9,
                                      mean=(0.5,) * 3, std=(0.5,) * 3)  # fmt: skip
    with torch.no_grad():
        return [
            int(model(transform(Image.open(folder / name).convert("RGB"))[None]).argmax())
            for name in sorted(shown)
        ]


def test_documents_of_a_run_without_labels_speak_of_agreement(unlabelled: Path) -> None:
    told = "The images have no labels, so agreement with the original is measured, not accuracy"
    for document in ("report.html", "README.md"):
        text = (unlabelled / document).read_text(encoding="utf-8")
        assert told in text
        assert "top-1" not in text.lower()


def test_forms_are_timed_against_the_original_in_the_same_form(chosen: Path) -> None:
    timings = read(chosen)["networks"]["ltm"]["timings"]
    assert [timing["mode"] for timing in timings] == ["eager", "onnxruntime"]
    assert all(timing["speedup"] and timing["images_per_second"] for timing in timings)


def test_the_file_and_the_code_do_what_the_report_says(
    chosen: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed = read(chosen)["deployment"]
    assert (deployed["form"], deployed["file"]) == ("onnxruntime", "model.onnx")
    assert (deployed["num_images"], deployed["num_unlike"]) == (20, 0)
    for document in ("report.html", "README.md"):
        assert "onnxruntime.InferenceSession(" in (chosen / document).read_text(encoding="utf-8")
    photo = next((place / "split/val").rglob("*.png"))
    Image.open(photo).save(place / "photo.jpg", quality=100)
    monkeypatch.chdir(place)
    known: dict[str, Any] = {}
    exec(deployed["code"], known)
    spec = image_spec(model=ltm.load(chosen))
    eager: dict[str, Any] = {}
    exec(code_for("eager", str(chosen), spec), eager)
    assert known["scores"].shape == (1, 5)
    assert np.abs(known["scores"] - eager["scores"].numpy()).max() < 1e-3


@pytest.mark.parametrize(
    ("size", "crop_ratio"), [(224, 0.9), (32, 0.9), (64, 0.875), (48, 0.95), (32, 1.0)]
)
def test_the_code_prepares_a_photo_as_it_was_prepared_for_the_evaluation(
    size: int, crop_ratio: float
) -> None:
    spec = ImageSpec(size=(size, size), crop_ratio=crop_ratio)
    photo = example_pictures(1, 256)[0].image
    lines = code_for("onnxruntime", "here", spec).splitlines()
    known: dict[str, Any] = {"photo": photo, "ImageOps": ImageOps, "numpy": np}
    exec("\n".join(line for line in lines if line.startswith(("image =", "pixels ="))), known)
    expected = np.asarray(evaluation_transform(spec, normalize=True)(photo))
    assert known["pixels"].transpose(2, 0, 1) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("form", ["onnxruntime", "eager"])
def test_the_code_turns_photos_upright(
    form: str, chosen: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    code = code_for(form, str(chosen), image_spec(model=ltm.load(chosen)))
    orientation = Image.Exif()
    orientation[0x0112] = 6  # the camera was held upright
    upright = Image.open(next((place / "split/val").rglob("*.png"))).convert("RGB")
    lying = upright.transpose(Image.Transpose.ROTATE_90)

    def scores(photo: Image.Image, **options: Any) -> Any:
        photo.save(place / "photo.jpg", quality=100, subsampling=0, **options)
        known: dict[str, Any] = {}
        exec(code, known)
        return np.asarray(known["scores"])

    turned = scores(lying, exif=orientation)
    error, wrong = (np.abs(scores(p) - turned).max() for p in (upright, lying))
    assert error < wrong / 4


@pytest.fixture
def exact_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that follow the multiply-adds exactly."""

    def exact(
        candidates: list[Candidate], conditions: Conditions, modes: list[str], **_: object
    ) -> list[Timing]:
        found = []
        for candidate in candidates:
            share = 1.0 if candidate.method == "base" else report(candidate.model).share
            took = 0.2 + 0.8 * share
            known = {"milliseconds": 10 * took, "images_per_second": 100 / took}
            known |= {"speedup": 1 / took, "speedup_interval": (1 / took, 1 / took)}
            found += did_not_run(candidate.method, None, conditions, modes, "")
            found[-1] = dataclasses.replace(found[-1], error="", verdict="", **known)
        return found

    monkeypatch.setattr("ltm.evaluation.measurement.measure_latency", exact)


GOAL: dict[str, Any] = {"workers": 0, "images": 8, "device": "cpu", "bottleneck_images": 0}
GOAL |= {"pictures": "generated", "time_batches": (1,)}


@pytest.mark.usefixtures("exact_times")
def test_a_time_goal_is_approached_by_measuring() -> None:
    quick: dict[str, Any] = {**GOAL, "calibrate": False}
    data = "shapes:classes=5,size=32,images=40,val_images=40"
    for goal in ({"speedup": 1.2}, {"budget_ms": 8.7}):
        found = ltm.compress(make_model(), data, forms=("eager",), **goal, **quick)
        timing = found.comparison.timing_deployed
        assert timing is not None
        assert timing.milliseconds == pytest.approx(goal.get("budget_ms", 10 / 1.2), rel=0.03)
        assert "is met" in repr(found)
    with pytest.raises(ValueError, match=r"the original takes 10\.00 ms a batch here"):
        ltm.compress(make_model(), data, forms=("eager",), budget_ms=11, **quick)
    named = ltm.compress(
        make_model(), data, forms=("eager",), method="ltm:ratio=0.95", speedup=1.2, **quick
    )
    assert "is met" in repr(named)
    missed = ltm.compress(make_model(), data, forms=("eager",), speedup=4.5, **quick)
    assert "is missed by" in repr(missed)


@pytest.mark.usefixtures("exact_times")
def test_the_rounds_of_a_time_goal_share_the_trials() -> None:
    said: list[str] = []
    found = ltm.compress(
        make_model(), "shapes:classes=5,size=32,images=40,val_images=40", speedup=1.3,
        calibration_trials=60, calibration_images=32, forms=("eager",), say=said.append, **GOAL,
    )  # fmt: skip
    assert sum("the goal is" in line for line in said) > 1
    assert found.comparison.calibration is not None
    assert 40 < found.comparison.calibration["num_trials"] <= 60


BAD = {
    "missing folder": (["--data", "{place}/nowhere"], "no data at {place}/nowhere"),
    "no labels to train on": (
        ["--data", "{place}/split/val/0-plain-disc", "--finetune-epochs", "1"],
        "0-plain-disc has no labels to train on; --tune trains without labels",
    ),
    "corrupt weights": (["--weights", "{place}/corrupt.safetensors"], "cannot be read"),
    "missing weights": (["--weights", "{place}/none.safetensors"], "there is no such file"),
    "other classes": (["--data", "{place}/fewer"], "has 2 classes, but the model has 5"),
    "no image": (["--data", "{place}/broken"], "broken/1-b/x.png"),
    "read-only output": (["--output", "/proc/ltm-output"], "cannot be written to"),
    "unknown method": (["--method", "tomee"], "method tomee is not known"),
    "unknown peer": (["--compare", "tome,tofuu"], "method tofuu is not known"),
    "impossible ratio": (["--ratio", "1.5"], "ratio: got 1.5"),
    "no images": (["--images", "0"], "images is 0, but must be at least 1"),
    "fewer than no images": (["--images", "-2"], "images is -2, but must be at least 1"),
    "fewer than none set aside": (
        ["--calibration-images", "-1"],
        "calibration_images is -1, but must be at least 0",
    ),
    "fewer than none measured": (
        ["--bottleneck-images", "-1"],
        "bottleneck_images is -1, but must be at least 0",
    ),
    "patches cut off": (
        ["--image-size", "50"],
        "--image-size is 50: it must be a multiple of 4, the side of this network's patches",
    ),
    "no size": (["--image-size", "-5"], "image_size is -5, but must be at least 1"),
    "what cannot merge": (
        ["--model", "convnext_tiny", "--model-args", "drop_rate=0.0"],
        "ConvNeXt has no block that can merge tokens",
    ),
    "no pictures": (["--pictures", "{place}/nothing.png"], "there is no such image"),
    "vast pictures": (["--pictures", "{place}/vast.pgm"], "has 240000000 pixels, but most_pixels"),
    "no training split": (
        ["--finetune-epochs", "1", "--calibration-images", "40"],
        "{place}/whole has no training split",
    ),
    "two goals": (["--speedup", "2", "--max-loss", "1"], "--speedup: give one of them"),
    "no speed-up": (["--speedup", "0.9"], "speedup is 0.9: it must be above 1"),
    "a goal without times": (["--max-loss", "1"], "networks have to be timed"),
    "no ratio": (["--ratios", "1.2"], "ratios: got 1.2; each is above 0 and below 1"),
    "no loss": (["--max-loss", "nan"], "max_loss is nan: it is from 0 to 100 points"),
    "unknown form": (["--forms", "onnx"], "form onnx is not known: choose from eager, compiled"),
    "no GPU": (["--form", "cudagraph"], "form cudagraph needs an NVIDIA GPU"),
    "no images to tune on": (["--finetune-epochs", "1"], "but it is switched off"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_2(
    case: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "corrupt.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}garbage")
    (place / "vast.pgm").write_bytes(b"P4 16000 15000\n")
    for name in ("a", "b"):
        paint_one(place / "fewer" / name / "x.png")
    for index in range(5):
        paint_one(place / "broken" / f"{index}-{'ab'[index % 2]}" / "x.png")
    (place / "broken" / "1-b" / "x.png").write_text("no image")
    given, sentence = BAD[case]
    given = [text.format(place=place) for text in given]
    words = ["--data", str(place / "whole"), "--weights", str(place / "weights.safetensors")]
    words += [
        *QUICK,
        "--no-calibrate",
        "--calibration-images",
        "0",
        "--output",
        str(tmp_path / "new"),
    ]
    assert main(["compress", *WORDS, *words, *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ltm compress: ")
    assert sentence.format(place=place) in error
    assert error.count("\n") == 1
    assert "Traceback" not in error
    # Broken images are met while evaluating, after the model was saved.
    assert (tmp_path / "new").exists() == (case == "no image")


def test_what_fails_leaves_folders_that_were_there(place: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for output in ("old", "runs/of/today"):
        options = ["--data", str(place / "whole"), "--output", str(tmp_path / output)]
        assert main(["compress", *WORDS, *options, "--ratio", "1.5"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def paint_one(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 40), (200, 30, 30)).save(path)


def test_ctrl_c_while_timing_keeps_the_rest(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ltm.evaluation.measurement.measure_latency", stop)
    assert interrupted_run(place, tmp_path, "--time-batches", "1", "--forms", "eager") == 130
    metrics = read(tmp_path)
    assert metrics["interrupted"] == "timing"
    assert metrics["networks"]["ltm"]["accuracy"]["num_images"] == 40
    assert "Stopped during timing" in capsys.readouterr().out
    assert "This run was stopped during timing" in (tmp_path / "report.html").read_text("utf-8")
    assert ltm.load(tmp_path)


def test_ctrl_c_while_evaluating_keeps_the_images_seen(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ltm.evaluation import accuracy

    describe = accuracy._describe

    def describe_and_stop(*args: Any) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(accuracy, "_describe", describe)
        return describe(*args)

    monkeypatch.setattr(accuracy, "_describe", describe_and_stop)
    assert interrupted_run(place, tmp_path, "--no-time") == 130
    metrics = read(tmp_path)
    assert metrics["interrupted"] == "the evaluation"
    assert not metrics["complete"]
    assert metrics["networks"]["ltm"]["accuracy"]["num_images"] == 16
    assert ltm.load(tmp_path)


def interrupted_run(place: Path, output: Path, *options: str) -> Any:
    words = ["--data", str(place / "split"), "--weights", str(place / "weights.safetensors")]
    words += ["--no-calibrate", "--workers", "0", "--bottleneck-images", "0", "--batch-size", "16"]
    return main(["compress", *WORDS, *words, *options, "--output", str(output)])


def test_calibration_and_evaluation_share_no_image(place: Path) -> None:
    parts = part_images(str(place / "whole"), split="val", images=None, calibration_images=500)
    assert parts.calibration is not None
    ours = {parts.evaluation.name(index) for index in range(len(parts.evaluation))}
    theirs = {parts.calibration.name(index) for index in range(len(parts.calibration))}
    assert not ours & theirs
    assert (len(ours), len(theirs)) == (80, 40)
    fewer = part_images(str(place / "whole"), split="val", images=10, calibration_images=500)
    assert len(fewer.evaluation) == 10
    assert {fewer.evaluation.name(index) for index in range(10)} <= ours
    split = part_images(str(place / "split"), split="val", images=None, calibration_images=12)
    assert split.calibration is not None
    assert split.calibration.split == "train"
    assert len(split.calibration) == 12
    small = part_images(str(place / "split/val"), split="val", images=None, calibration_images=12)
    assert small.calibration is None
    assert "too few" in small.reason


def test_ctrl_c_while_choosing_keeps_the_ratio_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Calibration.shown

    def stopped(calibration: Calibration, budget: float, *, silent: bool) -> CalibrateResult:
        return dataclasses.replace(shown(calibration, budget, silent=silent), interrupted=True)

    monkeypatch.setattr(Calibration, "shown", stopped)
    result = ltm.compress(
        make_model(), "shapes:classes=5,size=32,images=40,val_images=40", ratios=(0.9, 0.8),
        calibration_images=32, calibration_trials=2, forms=("eager",), pictures="generated",
        workers=0, device="cpu",
    )  # fmt: skip
    assert result.interrupted == "the choice of a ratio"
    assert result.comparison.ratio == 0.9
    assert "was missed" not in repr(result)


def test_only_the_ratios_that_were_given_are_tried() -> None:
    result = ltm.compress(
        timm.create_model("efficientvit_b0", num_classes=5).eval(),
        "shapes:classes=5,size=64,images=16,val_images=16", method="tome",
        ratios=(0.95, 0.3), pictures="generated", bottleneck_images=0, forms=("eager",),
        time_rounds=1, workers=0, device="cpu",
    )  # fmt: skip
    assert [point.ratio for point in result.comparison.curve] == [0.95]
    assert "cannot go below" in result.comparison.left_out["tome at 0.3"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time_batches": ()}, r"time_batches is \(\), but must be sizes of at least 1"),
        ({"time_batches": (8, 0)}, r"time_batches is \(8, 0\), but must be sizes of at least 1"),
        ({"calibration_trials": 0}, "calibration_trials is 0, but must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0, but must be at least 1"),
        ({"finetune_epochs": -1}, "finetune_epochs is -1, but must be at least 0"),
        ({"workers": -1}, "workers is -1, but must be at least 0"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_opened(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CompressSettings(**settings)


def test_the_images_seen_first_are_of_all_classes(place: Path) -> None:
    parts = part_images(str(place / "whole"), split="val", images=None, calibration_images=0)
    dataset = mixed(parts.evaluation)
    assert sorted(dataset.labels.tolist()) == parts.evaluation.labels.tolist()
    assert len(set(dataset.labels[:20].tolist())) == 5


def test_the_command_line_repeats_the_run() -> None:
    settings = CompressSettings(time=False, compare=("tome", "tofu"))
    assert command_line("compress", ModelSource(), settings, data="my data", output=None) == (
        "ltm compress --data 'my data' --compare tome tofu --no-time"
    )


@pytest.mark.parametrize(
    ("losing_below", "tried"),
    [
        (0.6, [0.7, 0.55, 0.62, 0.59]),
        (0.0, [0.7, 0.55, 0.48, 0.44]),
        (1.0, [0.7, 0.85, 0.92, 0.96]),
    ],
)
def test_ratios_are_halved_towards_the_smallest_within_the_loss(
    losing_below: float, tried: list[float]
) -> None:
    search, found = Bisection(0.5), []
    while (ratio := search.ratio) is not None:
        found.append(ratio)
        search.learn(0.5 if ratio >= losing_below else 0.6)
    assert found == pytest.approx(tried, abs=0.011)

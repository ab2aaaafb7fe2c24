"""`ltm predict`: what is refused, and what is said about inputs without images."""

import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

import ltm
from ltm.cli import main
from ltm.data.shapes import example_pictures
from ltm.detection.saving import save_detector
from ltm.detection.ssdlite import SSDLiteConfig


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved network, a training run of a detector, an image and an empty folder."""
    folder = tmp_path_factory.mktemp("predict")
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=3).eval()
    ltm.merge_tokens_(model, ltm.ToMe(counts=(60,), sites=(0,)))
    ltm.save(model, folder / "run")
    config = SSDLiteConfig(backbone="mobilevit_xxs", num_classes=1, image_size=(64, 64))
    kinds = {"class_names": ["cat"], "category_ids": [1]}
    save_detector(config.build(), config, folder / "detector" / "model", **kinds)
    Image.new("RGB", (40, 40), (200, 30, 30)).save(folder / "red.png")
    (folder / "empty").mkdir()
    (folder / "vast.pgm").write_bytes(b"P4 16000 15000\n")
    (folder / "two.txt").write_text("cat\ndog\n")
    (folder / "three.txt").write_text("cat\ndog\neel\n")
    return folder


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--run run --class-names two.txt", "class_names: got 2 for a model of 3 classes"),
        ("--run run --crop-ratio 0", "crop_ratio is 0.0, but must be above 0 and at most 1"),
        ("--run run --crop-ratio 5", "crop_ratio is 5.0, but must be above 0 and at most 1"),
        ("--run run --onnx no.onnx", "give one of --onnx, --run and --model"),
        ("--onnx no.onnx --image-size 96", "--image-size: an ONNX file has its own"),
        ("--run detector --model test_vit", "--model: a saved detector has its own"),
        ("--run detector --onnx no.onnx", "--onnx: a saved detector has its own"),
        ("--run detector --class-names two.txt", "--class-names: a saved detector has its own"),
    ],
)
def test_bad_input_is_one_sentence_and_2(
    options: str,
    sentence: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    assert main(["predict", "red.png", *options.split()]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_classes_have_the_names_given(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--class-names", str(place / "three.txt"), "--run", str(place / "run")]
    assert main(["predict", str(place / "red.png"), *names]) == 0
    line = json.loads(capsys.readouterr().out)
    assert sorted(line["classes"]) == ["cat", "dog", "eel"]


def test_a_detector_is_found_in_its_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(place / "red.png"), "--run", str(place / "detector")]) == 0
    assert "boxes" in json.loads(capsys.readouterr().out)


def test_a_photo_is_turned_upright(place: Path, tmp_path: Path, capsys) -> None:
    upright, exif = example_pictures(1, 64)[0].image, Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    upright.save(tmp_path / "a.png")
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "b.png", exif=exif)
    assert main(["predict", str(tmp_path), "--run", str(place / "run")]) == 0
    one, other = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert one["probabilities"] == other["probabilities"]


@pytest.mark.parametrize("run", ["run", "detector"])
def test_an_image_with_too_many_pixels_is_said(run: str, place: Path, capsys) -> None:
    assert main(["predict", str(place / "vast.pgm"), "--run", str(place / run)]) == 2
    assert "has 240000000 pixels, but most_pixels is 134217728" in capsys.readouterr().out


def test_a_detector_refuses_an_image_with_too_many_pixels(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["detect", "predict", str(place / "vast.pgm"), "--run", str(place / "detector")]
    assert main([*call, "--output", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert "has 240000000 pixels, but most_pixels is 134217728" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_nothing_that_could_be_read_is_an_error(place: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "torn.png").write_bytes(b"no image")
    assert main(["predict", str(tmp_path / "torn.png"), "--run", str(place / "run")]) == 2
    said = capsys.readouterr()
    assert "torn.png" in said.out, "its line says why"
    assert "1 of 1 images could not be read" in said.err


def test_no_images_are_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, output = place / "empty", place / "none"
    call = ["predict", str(empty), "--run", str(place / "run"), "--output", str(output)]
    for options in (call[:4], call):
        assert main(options) == 2
        assert capsys.readouterr().err == f"ltm predict: there are no images in {empty}\n"
    assert not output.exists()

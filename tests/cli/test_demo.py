"""`ltm demo`: compresses the network of the package, times it, and says what to do next."""

import json
from pathlib import Path

import pytest

import ltm
from ltm.cli import demo, main


@pytest.mark.slow
def test_the_demo_does_the_main_job_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_BATCHES", (1,))
    monkeypatch.setattr(demo, "_ROUNDS", 1)
    assert main(["demo", "--images", "20", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    first = said.split("\n\n")[1]
    assert "x as fast at batch 1 in " in first
    assert "no loss in accuracy: " in first
    assert "PyTorch " in said
    assert "ONNX Runtime " in said
    assert "ltm compress --model" in said.split("Next, ")[1]
    metrics = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    compressed, original = metrics["networks"]["ltm"], metrics["networks"]["base"]
    assert compressed["share"] <= metrics["ratio"] == 0.5
    assert compressed["accuracy"]["top1"] >= original["accuracy"]["top1"] - 0.05
    at_random = float(said.split("at random leaves ")[1].split("%")[0])
    assert at_random <= 100 * compressed["accuracy"]["top1"] - 5
    assert ltm.load(tmp_path)


def test_no_images_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", "--images", "0", "--output", str(tmp_path)]) == 2
    assert "images is 0" in capsys.readouterr().err

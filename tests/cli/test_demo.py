"""`ltm demo`: trains, compresses with every method, reports; the network is kept."""

import json
from pathlib import Path

import pytest

import ltm
from ltm.cli import demo, main


@pytest.mark.slow
def test_the_demo_does_the_main_job_from_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(demo.NETWORK_ARGS, "depth", 3)
    options = ["--epochs", "1", "--train-images", "192", "--images", "40", "--no-time"]
    options += ["--ratio", "0.6", "--output", str(tmp_path)]
    assert main(["demo", *options]) == 0
    said = capsys.readouterr().out
    assert "Training a small vision transformer" in said
    assert all(name in said for name in ("original", "LTM", "ToMe", "ToFu", "LTMP"))
    assert f"Report: {tmp_path / 'report.html'}" in said
    metrics = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["networks"]["ltm"]["share"] <= metrics["ratio"]
    assert ltm.load(tmp_path)

    assert main(["demo", *options]) == 0
    assert "Taking the network of an earlier run" in capsys.readouterr().out
    again = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    for name, network in again["networks"].items():
        assert network["accuracy"]["top1"] == metrics["networks"][name]["accuracy"]["top1"]

"""`ltm detect` and `ltm segment`: CPU-sized runs of both tasks, from training to pictures."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ltm.cli import main
from ltm.data.shapes import ShapesDetection
from written import write_coco_folder

DATA = "shapes:size=64,images=8,val_images=3,classes=2"
SMALL = ["--data", DATA, "--image-size", "64", "64", "--per-block", "0.5", "--hflip", "0"]
QUICK = {
    "detect": ["--recipe", "shapes_ssdlite", "--batch-size", "8", "--epochs", "64"],
    "segment": [
        *("--recipe", "shapes_mask_rcnn", "--batch-size", "4", "--epochs", "28"),
        *("--regions-per-image", "16"),
    ],
}
RATE = ["--eval-every", "100", "--lr", "3e-3", "--lr-warmup-epochs", "5"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both detectors, overfitted to eight pictures."""
    folder = tmp_path_factory.mktemp("runs")
    for command, options in QUICK.items():
        call = [command, "train", *options, *SMALL, *RATE, "--val-split", "train"]
        assert main([*call, "--output", str(folder / command)]) == 0
    return {command: folder / command for command in QUICK}


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(("command", "scores"), [("detect", ["box"]), ("segment", ["box", "mask"])])
def test_a_detector_that_merges_learns(
    command: str, scores: list[str], runs: dict[str, Path]
) -> None:
    metrics = read(runs[command] / "metrics.json")
    for name in scores:
        assert metrics[name]["ap50"] > 0.5
    assert metrics["backbone_mac_share"] < 1
    for name in ("config.yaml", "log.csv", "curves.png", "results.json", "model/config.json"):
        assert (runs[command] / name).is_file()
    results = read(runs[command] / "results.json")
    assert {"image_id", "category_id", "bbox", "score"} <= set(results[0])
    assert ("segmentation" in results[0]) == (command == "segment")


@pytest.mark.slow
@pytest.mark.parametrize("command", QUICK)
def test_a_saved_detector_scores_what_it_scored(
    command: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--run", str(runs[command]), "--data", DATA, "--split", "train", "--workers", "0"]
    options += ["--pictures", "2", "--output", str(tmp_path)]
    assert main([command, "evaluate", *options]) == 0
    assert "AP50" in capsys.readouterr().out
    trained, evaluated = read(runs[command] / "metrics.json"), read(tmp_path / "metrics.json")
    assert evaluated["box"] == pytest.approx(trained["box"], abs=1e-6)
    assert evaluated["gmacs"] == pytest.approx(trained["gmacs"])
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 2
    assert read(tmp_path / "results.json")


@pytest.mark.slow
def test_it_reads_coco_folders_too(runs: dict[str, Path], tmp_path: Path) -> None:
    pictures = write_coco_folder(ShapesDetection("train", 8, 64, 2), tmp_path / "coco")
    options = ["--run", str(runs["segment"]), "--data", str(pictures), "--workers", "0"]
    assert main(["segment", "evaluate", *options, "--output", str(tmp_path / "out")]) == 0
    trained = read(runs["segment"] / "metrics.json")
    assert read(tmp_path / "out" / "metrics.json")["mask"] == pytest.approx(trained["mask"])


@pytest.mark.slow
@pytest.mark.parametrize("command", QUICK)
def test_predictions_are_drawn(command: str, runs: dict[str, Path], tmp_path: Path) -> None:
    folder = write_coco_folder(ShapesDetection("val", 2, 50, 2), tmp_path / "coco") / "images"
    call = [command, "predict", "--run", str(runs[command]), "--output", str(tmp_path / "out")]
    assert main([*call, DATA, str(folder), str(folder / "000000.png")]) == 0
    metrics = read(tmp_path / "out" / "metrics.json")
    assert len(metrics["images"]) == 3 + 2 + 1
    assert len(list((tmp_path / "out").glob("*.png"))) == 6
    assert {result["image_id"] for result in read(tmp_path / "out" / "results.json")} <= set(
        range(1, 7)
    )


@pytest.mark.slow
@pytest.mark.parametrize("action", ["predict", "evaluate"])
def test_results_are_replaced_only_if_asked_for(
    action: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.1.0 replaces predictions and scores of another run without a word."""
    data = [DATA] if action == "predict" else ["--data", DATA]
    call = ["detect", action, *data, "--run", str(runs["detect"]), "--output", str(tmp_path)]
    assert main(call) == 0
    before = (tmp_path / "metrics.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main(call) == 2
    assert "holds the results of another run" in capsys.readouterr().err
    assert (tmp_path / "metrics.json").stat().st_mtime_ns == before
    (tmp_path / "metrics.json").unlink()
    assert main(call) == 2
    assert "has a results.json, which would be replaced" in capsys.readouterr().err
    assert main([*call, "--overwrite"]) == 0


REFUSED = {
    ("train", "metrics.json"): "holds a run already",
    ("evaluate", "metrics.json"): "holds the results of another run",
    ("predict", "metrics.json"): "holds the results of another run",
    ("evaluate", "results.json"): "has a results.json, which would be replaced",
    ("predict", "results.json"): "has a results.json, which would be replaced",
}


@pytest.mark.parametrize("command", QUICK)
@pytest.mark.parametrize(("action", "name"), REFUSED)
def test_results_of_others_are_refused_before_any_work(
    command: str, action: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("mine")
    given = {"train": ["--data", DATA], "evaluate": ["--data", DATA], "predict": [DATA]}[action]
    run = [] if action == "train" else ["--run", "nowhere"]
    assert main([command, action, *run, *given, "--output", str(tmp_path)]) == 2
    assert REFUSED[action, name] in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    options = ["--recipe", "shapes_ssdlite", *SMALL, "--batch-size", "4", "--method", "none"]
    options[options.index("--per-block") : options.index("--per-block") + 2] = []
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["detect", "train", *options, "--epochs", "2", "--output", str(whole)]) == 0
    assert main(["detect", "train", *options, "--epochs", "2", "--output", str(parts)]) == 0
    for folder in sorted((parts / "checkpoints").iterdir())[1:]:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    again = ["detect", "train", *options, "--epochs", "2", "--output", str(parts)]
    assert main(again) == 2
    assert main([*again, "--resume", "auto"]) == 0
    assert read(parts / "metrics.json")["box"] == read(whole / "metrics.json")["box"]
    assert read(parts / "results.json") == read(whole / "results.json")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (["detect", "train", "--recipe", "yolo"], "recipe is yolo"),
        (["detect", "train", "--recipe", "shapes_mask_rcnn"], "recipe is shapes_mask_rcnn"),
        (["detect", "train", "--batch-size", "1"], "batch_size is 1, but must be at least 2"),
        (["detect", "train", "--backbone", "mobilevit_xxl"], "is not known to timm"),
        (["detect", "train", "--data", "nowhere"], "no data at nowhere"),
        (
            ["detect", "predict", "shapes", "--run", "nowhere", "--threshold", "7"],
            "threshold is 7.0, but must be at least 0 and at most 1",
        ),
        (["segment", "train", "--no-restore"], "restore is off"),
        (["segment", "train", "--strategy", "fsdp"], "strategy is fsdp"),
        (["detect", "predict", "--run", "nowhere", "shapes"], "there is no config.json"),
    ],
)
def test_bad_input_is_one_sentence_and_2(
    call: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*call, "--output", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_bad_annotation_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_coco_folder(ShapesDetection("train", 2, 48, 2, empty_ratio=0.0), tmp_path)
    coco = read(folder / "instances.json")
    del coco["annotations"][0]["category_id"]
    (folder / "instances.json").write_text(json.dumps(coco))
    call = ["detect", "train", "--data", str(folder), "--output", str(tmp_path / "run")]
    assert main(call) == 2
    assert "annotation 1: category_id is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_a_detector_of_the_other_task_is_refused(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs["segment"])
    assert main(["detect", "predict", "--run", run, "shapes", "--output", str(tmp_path)]) == 2
    assert "is for ltm segment, not ltm detect" in capsys.readouterr().err
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"detector": {"task": "mask_rcnn"}}))
    assert main(["detect", "train", "--config", str(config), "--output", str(tmp_path)]) == 2
    assert "is for ltm segment" in capsys.readouterr().err
    other = "shapes:classes=3,size=64"
    call = ["segment", "evaluate", "--run", run, "--data", other, "--output", str(tmp_path)]
    assert main(call) == 2
    assert "categories are not the 2 that" in capsys.readouterr().err

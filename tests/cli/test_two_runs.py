"""Two runs into one folder: the second is refused, and names the first."""

import json
from pathlib import Path
from pydoc import locate
from threading import Event, Thread
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

import ltm
from ltm.api import report
from ltm.cli import main
from ltm.evaluation import benchmark
from ltm.files import output_folder
from ltm.training.trainer import Trainer

SMALL = {"depth": 3, "embed_dim": 24, "num_heads": 2}
NETWORK = [
    *("--model", "test_vit", "--num-classes", "5", "--image-size", "48"),
    *("--model-args", *(f"{name}={value}" for name, value in SMALL.items())),
]
DATA = ["--data", "shapes:classes=5,size=48,images=40,val_images=40", "--workers", "0"]
VIT = ("img_size=32", "patch_size=8", "embed_dim=16", "depth=3", "num_heads=2")
TRAIN = [
    *("train", "--model", "vit_tiny_patch16_224", "--model-args", *VIT, "--image-size", "32"),
    *("--data", "shapes:classes=3,size=32,images=24,val_images=12", "--batch-size", "12"),
    *("--workers", "0", "--device", "cpu", "--statistics-images", "12", "--epochs", "1"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=5, img_size=48, **SMALL)
    save_file(model.state_dict(), folder / "weights.safetensors")
    return folder


def command(name: str, place: Path, *options: str) -> list[str]:
    weights = ["--weights", str(place / "weights.safetensors")]
    if name == "train":
        return [*TRAIN, *options]
    if name == "export":
        data = [*DATA, "--images", "4", "--batch-sizes", "1", "--formats", "program"]
        return ["export", *NETWORK, *weights, *data, *options]
    if name == "visualize":
        return ["visualize", *NETWORK, *weights, "--ratio", "0.9", *options]
    quick = {
        "compress": ["--ratio", "0.85", "--no-calibrate", "--no-time", "--bottleneck-images", "0"],
        "calibrate": ["--budget", "0.8", "--trials", "1", "--images", "40"],
        "evaluate": ["--images", "8", "--no-bottleneck"],
    }
    return [name, *NETWORK, *weights, *DATA, *quick[name], *options]


INSIDE = {
    "train": "ltm.training.trainer.Trainer.run_epoch",
    "compress": "ltm.compression.compress.freeze_",
    "calibrate": "ltm.calibration.calibration.open_model",
    "evaluate": "ltm.evaluation.evaluate.open_model",
    "visualize": "ltm.report.visualization.open_model",
    "export": "ltm.deployment.export.open_model",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE)
def test_a_second_run_is_refused_and_the_first_one_stays_whole(
    name: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With 0.1.0 both exit with 0; `compress` leaves the model of one and the report of the other.

    The second run begins while the first one works, in a thread of its own.
    """
    output, codes = tmp_path / "out", []
    path, attribute = INSIDE[name].rsplit(".", 1)
    owner = locate(path)
    original = getattr(owner, attribute)

    def second(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, attribute, original)
        call = command(name, place, "--output", str(output), "--overwrite")
        if name == "compress":
            call += ["--ratio", "0.95"]
        thread = Thread(target=lambda: codes.append(main(call)))
        thread.start()
        thread.join()
        return original(*args, **options)

    monkeypatch.setattr(owner, attribute, second)
    assert main(command(name, place, "--output", str(output))) == 0
    assert codes == [2]
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"ltm {name}: output {output} is in use by ltm {name} " in error
    assert "(process " in error
    assert (output / "metrics.json").is_file()
    assert not [path.name for path in output.iterdir() if path.name.startswith(".")]
    if name == "compress":
        metrics = json.loads((output / "metrics.json").read_text())
        host = timm.create_model("test_vit", num_classes=5, img_size=48, **SMALL)
        share = report(ltm.load(output, host)).share
        assert share == pytest.approx(metrics["ratio"], abs=0.05)


PICTURE = str(Path(__file__).resolve().parents[2] / "docs" / "images" / "merging.png")
SHAPES = ["--data", "shapes:size=64,images=4,val_images=2,classes=2"]
HELD = {
    "predict": ["predict", PICTURE, *NETWORK],
    "embed": ["embed", PICTURE, *NETWORK],
    "demo": ["demo", "--no-time"],
    "serve": ["serve"],
    "finetune": ["finetune", *TRAIN[1:], "--weights", "nowhere.safetensors"],
    "benchmark": ["benchmark"],
    "detect train": ["detect", "train", *SHAPES],
    "detect evaluate": ["detect", "evaluate", "--run", "nowhere", *SHAPES],
    "detect predict": ["detect", "predict", "--run", "nowhere", "shapes"],
    "segment train": ["segment", "train", *SHAPES],
    "segment evaluate": ["segment", "evaluate", "--run", "nowhere", *SHAPES],
    "segment predict": ["segment", "predict", "--run", "nowhere", "shapes"],
    "table": ["table", "scratch"],
}


@pytest.mark.parametrize("name", HELD)
def test_a_folder_that_is_held_is_refused_before_any_work(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    call = [*HELD[name], "--output", str(tmp_path)]
    with output_folder(tmp_path):
        thread = Thread(target=lambda: codes.append(main(call)))
        thread.start()
        thread.join()
    assert codes == [2]
    error = capsys.readouterr().err
    assert f"ltm {name.split(maxsplit=1)[0]}: output {tmp_path} is in use by " in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_in_python_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ltm.train(output=...)` holds its folder; 0.1.0 starts a second run into it."""
    options: dict[str, Any] = {"epochs": 1, "workers": 0, "batch_size": 12, "device": "cpu"}
    options |= {"statistics_images": 12, "image_size": 32}
    source = ltm.ModelSource(model="vit_tiny_patch16_224", model_args=VIT)
    data = "shapes:classes=3,size=32,images=24,val_images=12"
    original, refused = Trainer.run_epoch, []

    def second(self: Trainer, epoch: int) -> Any:
        def train() -> None:
            try:
                ltm.train(source, data, output=tmp_path, overwrite=True, **options)
            except FileExistsError as error:
                refused.append(str(error))

        thread = Thread(target=train)
        thread.start()
        thread.join()
        return original(self, epoch)

    monkeypatch.setattr(Trainer, "run_epoch", second)
    ltm.train(source, data, output=tmp_path, **options)
    assert len(refused) == 1
    assert "is in use by" in refused[0]


@pytest.mark.exhaustive
def test_overlapping_resumes_measure_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0.1.0 the second run measures what the first one is measuring: rows come twice."""
    small = ["--model-args", "depth=2", "embed_dim=24", "num_heads=2", "num_classes=4"]
    call = ["benchmark", "--models", "test_vit", "--image-size", "48", "--rounds", "2", *small]
    call += ["--warmup", "1", "--methods", "tome", "--batch-sizes", "1,2", "--modes", "eager"]
    call += ["--output", str(tmp_path), "--resume", "--ratio", "0.85", "--device", "cpu"]
    original, codes, begun, threads = benchmark.measure_latency, [], Event(), []

    def second(*args: Any, **options: Any) -> Any:
        if not threads:
            threads.append(Thread(target=lambda: codes.append(main(call))))
            threads[0].start()
            begun.wait(2)
        else:
            begun.set()
        return original(*args, **options)

    monkeypatch.setattr(benchmark, "measure_latency", second)
    codes.append(main(call))
    threads[0].join()
    assert codes == [0, 0]
    rows = json.loads((tmp_path / "metrics.json").read_text())["rows"]
    assert sorted((row["method"], row["batch_size"]) for row in rows) == [
        ("base", 1), ("base", 2), ("tome", 1), ("tome", 2)
    ]  # fmt: skip

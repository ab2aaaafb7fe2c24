"""`ltm evaluate` end to end on made-up images, against recomputation, and its manners."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import ltm
from ltm.cli import main
from ltm.compression.compress import _Compression
from ltm.data.transforms import evaluation_transform, image_spec
from ltm.evaluation.evaluate import _fit_
from ltm.progress import Progress

pytestmark = pytest.mark.slow

CLASSES = ("ant", "bee", "cow")
SMALL: dict[str, Any] = {"depth": 3, "embed_dim": 24, "num_heads": 2}
MODEL_ARGS = ["--model-args", *(f"{name}={value}" for name, value in SMALL.items())]


def small_vit() -> Any:
    return timm.create_model("test_vit", num_classes=3, img_size=96, **SMALL).eval()


@pytest.fixture(scope="module")
def host() -> Any:
    """A small network."""
    torch.manual_seed(0)
    return small_vit()


@pytest.fixture(scope="module")
def folder(host: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`data` with a folder a class, and `model.safetensors`."""
    root = tmp_path_factory.mktemp("evaluate")
    random = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (root / "data" / name).mkdir(parents=True)
        for index in range(5):
            pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            pixels[..., label] //= 4
            Image.fromarray(pixels).save(root / "data" / name / f"{index}.png")
    save_file(host.state_dict(), root / "model.safetensors")
    return root


def call(folder: Path, *options: str, data: str = "data") -> list[str]:
    return [
        "evaluate", "--data", str(folder / data), "--model", "test_vit", "--weights",
        str(folder / "model.safetensors"), "--workers", "0", "--batch-size", "4",
        "--image-size", "96", *MODEL_ARGS, *options,
    ]  # fmt: skip


def test_numbers_are_those_of_an_independent_computation(
    folder: Path, host: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "run"
    options = ["--methods", "tome,ltm:weights=uniform", "--ratio", "0.8", "--output", str(output)]
    assert main(call(folder, *options)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""  # no bar where nobody watches
    for text in ("top-1", "top-5", "GMACs", "agreement", "calibration error", "IB bound", "block"):
        assert text in captured.out
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["num_images"] == 15
    rows = metrics["models"]
    assert list(rows) == ["base", "tome", "ltm:weights=uniform"]

    transform = evaluation_transform(image_spec(model=host), normalize=True)
    paths = sorted((folder / "data").glob("*/*.png"))
    images = torch.stack([transform(Image.open(path)) for path in paths])
    labels = torch.tensor([CLASSES.index(path.parent.name) for path in paths])
    tome = small_vit()
    tome.load_state_dict(host.state_dict())
    ltm.merge_tokens_(tome, ltm.ToMe(ratio=0.8))
    with torch.no_grad():
        logits = {"base": host(images), "tome": tome(images)}
    for name, values in logits.items():
        row = rows[name]
        assert row["top1"] == pytest.approx(float((values.argmax(1) == labels).float().mean()))
        agreement = (values.argmax(1) == logits["base"].argmax(1)).float().mean()
        assert row["agreement"] == pytest.approx(float(agreement))
        assert row["top5"] == 1
    assert rows["base"]["divergence"] == pytest.approx(0, abs=1e-6)
    assert rows["tome"]["gmacs"] == pytest.approx(ltm.gmacs(tome))
    assert rows["tome"]["measured_gmacs"] == pytest.approx(ltm.gmacs(tome))
    assert rows["tome"]["gmacs"] <= 0.8 * rows["base"]["gmacs"]
    assert rows["base"]["parameters"] == sum(p.numel() for p in host.parameters())
    for row in rows.values():
        sites = row["bottleneck"]["sites"]
        assert [site["block"] for site in sites] == list(range(3))
        assert row["bottleneck"]["overall"] == sites[-1]
        assert all(site["loss"] <= site["bound"] - site["c0"] + 1e-6 for site in sites)


def test_a_run_is_measured_against_itself_without_merging(
    folder: Path, host: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_vit()
    model.load_state_dict(host.state_dict())
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    ltm.save(ltm.freeze_(model), tmp_path / "run")
    args = ["evaluate", "--data", str(folder / "data"), "--run", str(tmp_path / "run")]
    args += ["--model", "test_vit", "--num-classes", "3", "--image-size", "96", *MODEL_ARGS]
    args += ["--workers", "0", "--no-bottleneck", "--output", str(tmp_path / "out")]
    assert main(args) == 0
    rows = json.loads((tmp_path / "out" / "metrics.json").read_text())["models"]
    assert list(rows) == ["base", "ltm"]
    assert rows["ltm"]["measured_gmacs"] < 0.81 * rows["base"]["measured_gmacs"]
    assert rows["ltm"]["bottleneck"] == {"overall": None, "sites": []}
    assert "IB" not in capsys.readouterr().out, "rows of nothing but blanks"


def test_ltmp_meets_its_ratio_and_statistics_are_used(folder: Path, tmp_path: Path) -> None:
    options = [
        "--methods",
        "ltmp,ltm:sites=1",
        "--ratio",
        "0.9",
        "--images",
        "9",
        "--no-bottleneck",
    ]
    options += ["--statistics", str(folder / "data"), "--output", str(tmp_path)]
    assert main(call(folder, *options)) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    rows = metrics["models"]
    assert metrics["num_images"] == 9
    assert rows["ltmp"]["measured_gmacs"] / rows["base"]["gmacs"] == pytest.approx(0.9, abs=0.04)


def test_thresholds_are_set_on_all_images_that_were_chosen_for_it(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    for place in ("ltm.compression.compress", "ltm.evaluation.evaluate"):
        monkeypatch.setattr(f"{place}.fit_", lambda _, images, **__: seen.append(images.tolist()))
    images, config = torch.arange(130), ltm.LTMP(ratio=0.9)
    parts = {"models": {"base": host}, "images": SimpleNamespace(calibration=images)}
    run: Any = SimpleNamespace(**parts, calibration_batch=images)
    model = _Compression._converted(run, config)
    _fit_({"ltmp": model}, lambda: images[::2])
    assert seen == [list(range(0, 130, 3)), list(range(0, 130, 2))]


def no_image(folder: Path, tmp_path: Path) -> list[str]:
    shutil.copytree(folder / "data", tmp_path / "data")
    (tmp_path / "data" / "ant" / "9.png").write_bytes(b"no image")
    return ["--data", str(tmp_path / "data")]


def two_classes(folder: Path, tmp_path: Path) -> list[str]:
    shutil.copytree(folder / "data", tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "ant")
    return ["--data", str(tmp_path / "data")]


def corrupt_weights(folder: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "a.safetensors").write_bytes(b"corrupt")
    return ["--weights", str(tmp_path / "a.safetensors")]


def finished_run(folder: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "metrics.json").write_text("{}")
    return ["--output", str(tmp_path)]


def unclassed(folder: Path, tmp_path: Path) -> list[str]:
    shutil.copy(folder / "data" / "ant" / "0.png", tmp_path)
    return ["--data", str(tmp_path)]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--data", "nowhere"], "no data at nowhere"),
        (unclassed, "has no class folders; put the images"),
        (no_image, "9.png"),
        (two_classes, "has 2 classes, but the model has 3"),
        (corrupt_weights, "cannot be read"),
        (finished_run, "holds the results of another run: choose another folder, or use --overwr"),
        (["--output", "/proc/ltm"], "/proc/ltm cannot be written to"),
        (["--output", __file__], "a file: a folder is needed"),
        (["--model", "test_vot"], "model test_vot is not known to timm; did you mean test_vi"),
        (["--methods", "tomee"], "method tomee is not known"),
        (["--ratio", "0.1", "--methods", "tome"], "cannot go below"),
        (["--device", "abacus"], "device is abacus: auto, cpu, cuda or cuda:N is needed"),
        (["--images", "0"], "images is 0, but must be at least 1"),
        (["--images", "-3"], "images is -3, but must be at least 1"),
        (["--image-size", "8"], "--image-size is 8: it must be a multiple of 16"),
        (["--image-size", "0"], "image_size is 0, but must be at least 1"),
        (["--model-args", "depth=2"], "do not fit test_vit: "),
    ],
)
def test_bad_input_is_one_sentence_and_2(
    options: Any, sentence: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options if isinstance(options, list) else options(folder, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(call(folder, *options)) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.startswith("ltm evaluate: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_overwrite_replaces_another_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("{}")
    options = ["--no-bottleneck", "--images", "3", "--output", str(tmp_path), "--overwrite"]
    assert main(call(folder, *options)) == 0
    assert json.loads((tmp_path / "metrics.json").read_text())["num_images"] == 3


def test_a_bar_stops_after_an_interrupt_and_says_so() -> None:
    import signal

    before = signal.getsignal(signal.SIGINT)

    seen = []
    loop = Progress("counting")
    for number in loop(range(10)):
        seen.append(number)
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)
    assert seen == [0, 1, 2, 3]
    assert loop.interrupted
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(RuntimeError, match="workers died"):
        list(Progress("counting")(failing()))


def failing() -> Any:
    yield 1
    raise RuntimeError("workers died")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_processes_give_what_one_gives(folder: Path, tmp_path: Path) -> None:
    options = ["--methods", "tome", "--ratio", "0.8"]
    assert main(call(folder, *options, "--output", str(tmp_path / "one"))) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--no-python", sys.executable, "-c", "from ltm.cli import main; main()"]
    args = [*torchrun, *call(folder, *options, "--output", str(tmp_path / "two"))]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("top-1") == 1
    one, two = (
        json.loads((tmp_path / name / "metrics.json").read_text())["models"]
        for name in ("one", "two")
    )
    for name, row in one.items():
        for metric in ("top1", "loss", "agreement", "divergence", "calibration_error"):
            assert two[name][metric] == pytest.approx(row[metric], abs=1e-6)
        for site, other in zip(
            row["bottleneck"]["sites"], two[name]["bottleneck"]["sites"], strict=True
        ):
            assert other == pytest.approx(site, abs=1e-5)


@pytest.mark.real
@pytest.mark.slow
def test_real_weights_on_real_images(real_data: Path, tmp_path: Path) -> None:
    """Every twentieth image; on all 2,000 the base has 74.15."""
    args = ["evaluate", "--data", str(real_data / "imagenet-val.zip")]
    args += ["--model", "vit_tiny_patch16_224", "--images", "100", "--workers", "0"]
    args += ["--weights", str(real_data / "vit_tiny_patch16_224.fp16.safetensors")]
    args += ["--methods", "tome", "--no-bottleneck", "--output", str(tmp_path)]
    assert main(args) == 0
    rows = json.loads((tmp_path / "metrics.json").read_text())["models"]
    assert 0.62 <= rows["base"]["top1"] <= 0.86
    assert rows["tome"]["agreement"] > 0.8

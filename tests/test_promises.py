"""What 0.1.0 broke, by names that 0.1.0 has too: on its code each of these fails for its reason.

`docs/reliability.md` has the table, and how to run this on 0.1.0.
"""

import contextlib
import errno
import gc
import json
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import ltm
from ltm.cli import main
from ltm.training.checkpoint import Checkpoints

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2}
ARGUMENTS = ["--model-args", *(f"{name}={value}" for name, value in SMALL.items())]
DATA = ["--data", "shapes:classes=3,size=32,images=24,val_images=12", "--workers", "0"]
TRAIN = [
    *("train", "--model", "vit_tiny_patch16_224", *ARGUMENTS, "--image-size", "32", *DATA),
    *("--batch-size", "12", "--device", "cpu", "--statistics-images", "12", "--epochs"),
]
WEIGHT = "blocks.1.attn.qkv.weight"


def network() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, **SMALL).eval()


def images(number: int = 6) -> torch.Tensor:
    return torch.rand(number, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def on(name: str, folder: Path, value: float = 0.0) -> list[str]:
    """A command on the small network, one of whose weights is `value`."""
    model = network()
    model.get_parameter(WEIGHT).data[0, 0] = value
    save_file(model.state_dict(), folder / "weights.safetensors")
    weights = ["--weights", str(folder / "weights.safetensors"), "--num-classes", "3"]
    return [name, "--model", "vit_tiny_patch16_224", *ARGUMENTS, *weights]


def compress(folder: Path) -> list[str]:
    quick = ["--no-calibrate", "--no-time", "--bottleneck-images", "0"]
    return [*on("compress", folder), *DATA, *quick, "--output", str(folder / "out"), "--ratio"]


@contextlib.contextmanager
def at_first_forward(act: Callable[[], object]) -> Iterator[None]:
    """Do something when a network first runs on a device."""
    seen: list[int] = []

    def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not seen and not any(getattr(x, "is_meta", False) for x in inputs):
            seen.append(1)
            act()

    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
    assert seen


_FULL: list[str] = []
"""There is no space for files whose names hold one of these."""


def _no_space(event: str, arguments: tuple[Any, ...]) -> None:
    if not _FULL or event != "open":
        return
    path, _, flags = arguments
    if (flags or 0) & (os.O_WRONLY | os.O_RDWR) and any(name in str(path) for name in _FULL):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.fixture
def no_space_for() -> Iterator[list[str]]:
    if not hasattr(_no_space, "hooked"):
        sys.addaudithook(_no_space)
        _no_space.hooked = True  # type: ignore[attr-defined]
    yield _FULL
    _FULL.clear()


@pytest.fixture
def patience() -> Iterator[None]:
    """What takes more than half a minute hangs."""

    def ring(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# --- 1. Two runs into one folder ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compress", "train"])
def test_a_second_run_into_a_folder_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = {
        "compress": [*compress(tmp_path), "0.9"],
        "train": [*TRAIN, "1", "--output", str(tmp_path / "out")],
    }
    codes: list[int] = []

    def second() -> None:
        thread = Thread(target=lambda: codes.append(main([*calls[name], "--overwrite"])))
        thread.start()
        thread.join()

    with at_first_forward(second):
        assert main(calls[name]) == 0
    assert codes == [2]
    assert f"is in use by ltm {name}" in capsys.readouterr().err


@pytest.mark.slow
def test_results_are_of_one_run(tmp_path: Path, no_space_for: list[str]) -> None:
    """0.1.0 leaves the new model beside the old metrics where the disk is full in between."""
    assert main([*compress(tmp_path), "0.9"]) == 0
    out = tmp_path / "out"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    no_space_for.append("metrics.json")
    with contextlib.suppress(OSError):
        assert main([*compress(tmp_path), "0.7", "--overwrite"]) != 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


# --- 2. NaN and infinity --------------------------------------------------------------------------


def test_one_bad_pixel_does_not_spoil_the_statistics() -> None:
    """0.1.0 gives NaN for every image from then on."""
    model, bad = network(), images()
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8), 32)
    bad[4, 0, 3, 3] = torch.nan
    with contextlib.suppress(ValueError):
        ltm.collect_statistics_(model, [(bad, torch.arange(6) % 3)])
    with torch.no_grad():
        assert model(images()).isfinite().all()
    with pytest.raises(ValueError, match="image 4 of 6"):
        ltm.collect_statistics_(model, [(bad, torch.arange(6) % 3)])


def test_bad_weights_are_not_saved_nor_loaded(tmp_path: Path) -> None:
    model = network()
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8), 32)
    ltm.save(model, tmp_path / "saved")
    config = tmp_path / "saved" / "config.json"
    config.write_text(
        json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "checksums"})
    )
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    weights[WEIGHT][0, 0] = torch.nan
    save_file(weights, tmp_path / "saved" / "model.safetensors")
    with pytest.raises(ValueError, match=f"{WEIGHT} has 1 values that are NaN"):
        ltm.load(tmp_path / "saved", network())
    model.get_parameter(WEIGHT).data[0, 0] = torch.inf
    with pytest.raises(ValueError, match=f"{WEIGHT} has 1 values that are NaN or inf"):
        ltm.save(model, tmp_path / "new")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["export", "calibrate"])
def test_bad_weights_are_not_used(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.1.0 exports them, and calibrates by divergences that are NaN."""
    options = {
        "export": ["--images", "4", "--batch-sizes", "1", "--formats", "program"],
        "calibrate": ["--budget", "0.8", "--trials", "1", "--images", "32"],
    }
    data = [DATA[0], DATA[1].replace("val_images=12", "val_images=32"), *DATA[2:]]
    call = [*on(name, tmp_path, torch.nan), *data, *options[name]]
    assert main([*call, "--output", str(tmp_path / "out")]) == 2
    assert f"{WEIGHT} has 1 values that are NaN" in capsys.readouterr().err


def test_settings_are_bounded() -> None:
    """0.1.0 takes them, and every prediction is NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(ValueError, match=r"attended: got 100|size_power: got 100000"):
            ltm.LTM(size_power=1e5, attended=100)


# --- 4. Limits ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("patience")
def test_a_folder_named_by_a_long_number_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.1.0 counts up to it."""
    (tmp_path / "data" / "00012345678901").mkdir(parents=True)
    Image.new("1", (4, 4)).save(tmp_path / "data" / "00012345678901" / "0.png")
    data = ["--data", str(tmp_path / "data")]
    assert main([*TRAIN, "1", *data, "--output", str(tmp_path / "out")]) == 2
    assert "but most_classes is " in capsys.readouterr().err


# --- 6. Errors in one sentence --------------------------------------------------------------------


def _two_checkpoints(folder: Path) -> Path:
    for epoch in (1, 2):
        written = Checkpoints(folder).save(
            epoch=epoch,
            tensors={"weights": {"a": torch.ones(3)}},
            state={"updates": epoch},
            score=0.5,
            history=[{"epoch": at + 1} for at in range(epoch)],
        )
    return written


@pytest.mark.parametrize("files", [[], {"weights.safetensors": 7}, None])
def test_a_broken_manifest_falls_back_to_the_epoch_before(tmp_path: Path, files: Any) -> None:
    """0.1.0 ends in AttributeError or TypeError."""
    path = _two_checkpoints(tmp_path) / "manifest.json"
    content = json.loads(path.read_text()) | {"files": files}
    content.pop("crc32", None)
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="epoch-0002"):
        found = Checkpoints(tmp_path).latest()
    assert found is not None
    assert found.epoch == 1


def test_a_refused_state_is_one_sentence(tmp_path: Path) -> None:
    """0.1.0 hands on torch's page, which advises to load it without its check."""
    _two_checkpoints(tmp_path)
    found = Checkpoints(tmp_path).latest()
    assert found is not None
    torch.save({"updates": Path("/")}, found.folder / "state.pt")
    with pytest.raises(Exception, match=r"state\.pt") as caught:
        found.state()
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["events.out", "config.yaml", "curves.png"])
def test_a_full_disk_is_one_sentence(
    file: str, tmp_path: Path, no_space_for: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    no_space_for.append(file)
    assert main([*TRAIN, "1", "--output", str(tmp_path / "out")]) == 2
    assert "no space left" in capsys.readouterr().err.lower()


@pytest.mark.slow
def test_an_empty_config_does_not_block_a_resume(tmp_path: Path) -> None:
    """0.1.0 refuses, although the checkpoints are whole."""
    assert main([*TRAIN, "1", "--output", str(tmp_path)]) == 0
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "metrics.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main([*TRAIN, "1", "--output", str(tmp_path), "--resume", "auto"]) == 0


def test_an_empty_batch_is_an_empty_result() -> None:
    """0.1.0's LTMP fails in torch."""
    model = network()
    ltm.merge_tokens_(model, ltm.LTMP(ratio=0.8), 32)
    with torch.no_grad():
        assert model(torch.empty(0, 3, 32, 32)).shape == (0, 3)


# --- 7. Ctrl-C ------------------------------------------------------------------------------------


def _press_in_a_callback() -> None:
    """Press Ctrl-C while the garbage collector calls back: Python swallows what is raised there."""

    class Thing:
        pass

    thing = Thing()
    weak = weakref.ref(thing, lambda _: (os.kill(os.getpid(), signal.SIGINT), None)[1])
    del thing
    gc.collect()
    assert weak() is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_is_not_swallowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0.1.0 goes on, and exits with 0."""
    try:
        with at_first_forward(_press_in_a_callback):
            code = main([*TRAIN, "3", "--output", str(tmp_path)])
    except KeyboardInterrupt:
        pytest.fail("a traceback")
    assert code == 130
    assert not (tmp_path / "metrics.json").exists()


# --- 8. Others ------------------------------------------------------------------------------------


def test_there_is_a_class_name_for_every_class(tmp_path: Path) -> None:
    """0.1.0 saves them, and predictions of the third class end in IndexError."""
    model = network()
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8), 32)
    with pytest.raises(ValueError, match="got 2 names, and the model has 3 classes"):
        ltm.save(model, tmp_path / "new", class_names=["cat", "dog"])


def test_saving_replaces_only_what_was_saved(tmp_path: Path) -> None:
    """0.1.0 writes over the user's files."""
    (tmp_path / "config.json").write_text("mine")
    model = network()
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8), 32)
    with contextlib.suppress(FileExistsError):
        ltm.save(model, tmp_path)
    assert (tmp_path / "config.json").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]

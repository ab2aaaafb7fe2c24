"""What 0.1.0 broke, by names that 0.1.0 has too: on its code each of these fails for its reason.

`docs/reliability.md` has the table, and how to run this on 0.1.0.
"""

import contextlib
import errno
import gc
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import warnings
import weakref
import zipfile
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
import within
from ltm.api import mergers
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

    with within.seconds(30):
        yield


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


# --- 3. Several processes -------------------------------------------------------------------------

PLAIN = ["--method", "tome", "--warm-epochs", "0", "--lr", "1e-9", "--keep-every", "1"]
PLAIN += ["--batch-size"]
"""Weights that hardly move: what is measured of them differs by what is measured alone."""


def history(folder: Path) -> list[dict[str, Any]]:
    found = Checkpoints(folder / "checkpoints").latest()
    assert found is not None
    return found.history


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes with batches of six, started as torchrun does."""
    output = tmp_path_factory.mktemp("together") / "out"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0"}
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    call = [sys.executable, "-m", "ltm", *TRAIN, "3", *PLAIN, "6", "--output", str(output)]
    started = [
        subprocess.Popen(call, env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    return output


@pytest.mark.slow
def test_two_processes_measure_the_bottleneck_of_all_images(together: Path, tmp_path: Path) -> None:
    """0.1.0 measures those of the first process."""
    assert main([*TRAIN, "3", *PLAIN, "12", "--output", str(tmp_path)]) == 0
    for two, one in zip(history(together), history(tmp_path), strict=True):
        assert two["val_loss"] == pytest.approx(one["val_loss"], abs=1e-4)
        assert two["ib_loss"] == pytest.approx(one["ib_loss"], abs=1e-3)
        assert two["ib_bound"] == pytest.approx(one["ib_bound"], abs=1e-3)


@pytest.mark.slow
def test_fewer_processes_go_on_with_the_schedule(together: Path, tmp_path: Path) -> None:
    """0.1.0 goes on at the number of updates, which half as many processes take twice as often."""
    shutil.copytree(together, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "epoch-0003")
    (tmp_path / "resumed" / "metrics.json").unlink()
    call = [*TRAIN, "3", *PLAIN, "6", "--output"]
    assert main([*call, str(tmp_path / "resumed"), "--resume", "auto"]) == 0
    assert main([*call, str(tmp_path / "whole")]) == 0
    resumed, whole = history(tmp_path / "resumed"), history(tmp_path / "whole")
    assert resumed[-1]["lr"] == pytest.approx(whole[-1]["lr"], rel=1e-3)


# --- 4. Limits ------------------------------------------------------------------------------------


@pytest.fixture
def little_memory() -> Iterator[None]:
    """What takes a gigabyte more than there is in use ends in MemoryError."""
    with within.one_more_gigabyte():
        yield


def _shard(path: Path, label: bytes, num_bytes: int = 0) -> Path:
    """A tar with one picture and its label; where `num_bytes` are claimed, they are a hole."""
    buffer = io.BytesIO()
    Image.new("L", (4, 4)).save(buffer, "PNG")
    with tarfile.open(path, "w") as tar:
        for name, content in (("a.cls", label), ("a.png", buffer.getvalue())):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    if num_bytes:
        with path.open("r+b") as file:
            file.seek(1024)
            member.size = num_bytes
            file.write(member.tobuf())
        os.truncate(path, num_bytes + 4096)
    return path


def _bomb(path: Path) -> Path:
    packed = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with packed as archive, archive.open("0002/0.png", "w") as file:
        for _ in range(1500):
            file.write(bytes(2**20))
    return path


def _vast(path: Path) -> Path:
    (path / "0002").mkdir(parents=True)
    Image.new("1", (13_000, 13_000)).save(path / "0002" / "0.png")
    return path


LARGE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "label": (lambda to: _shard(to / "x.tar", b"100000000"), "names class 100000000, but most_cl"),
    "tar": (lambda to: _shard(to / "x.tar", b"0", 100 * 10**9), "has 100000000000 bytes, but most"),
    "zip": (lambda to: _bomb(to / "x.zip"), "would inflate to 1572864000, "),
    "png": (lambda to: _vast(to / "x"), "has 169000000 pixels, but most_pixels is "),
}


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory", "patience")
@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much memory is in use")
@pytest.mark.parametrize("name", LARGE)
def test_small_files_that_claim_to_be_large_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.1.0 reads them: MemoryError, or in the end exit 0."""
    make, said = LARGE[name]
    call = [*on("evaluate", tmp_path), "--data", str(make(tmp_path)), "--workers", "0"]
    assert main([*call, "--methods", "tome", "--output", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


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
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of 0.1.0
@pytest.mark.parametrize("file", ["events.out", "config.yaml", "curves.png"])
def test_a_full_disk_is_one_sentence(
    file: str, tmp_path: Path, no_space_for: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    no_space_for.append(file)
    assert main([*TRAIN, "1", "--output", str(tmp_path / "out")]) == 2
    assert "no space left" in capsys.readouterr().err.lower()


@pytest.mark.exhaustive
def test_a_disk_that_is_full_at_the_weights_is_one_sentence(tmp_path: Path) -> None:
    """0.1.0 ends in a traceback of safetensors. The disk is a real one, of 32 KB."""
    on_disk = within.a_disk(tmp_path / "out", "32k")
    call = [sys.executable, "-m", "ltm", *compress(tmp_path), "0.9"]
    done = subprocess.run([*on_disk, *call], check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("ltm compress: no space left for ")
    assert "safetensors" in done.stderr
    assert done.stderr.count("\n") == 1


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


@pytest.mark.exhaustive
def test_ctrl_c_ends_serve_without_a_traceback(tmp_path: Path) -> None:
    """0.1.0 exits with 0, or aborts."""
    pytest.importorskip("gradio", reason="the extra ltm[web] is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    log = tmp_path / "log.txt"
    with log.open("wb") as stream:
        call = [sys.executable, "-m", "ltm", "serve", "--port", port]
        process = subprocess.Popen(call, stderr=stream)
    try:
        end = time.monotonic() + 120
        while "Serving on" not in log.read_text(encoding="utf-8"):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
    assert "Traceback" not in log.read_text(encoding="utf-8")


# --- 8. Others ------------------------------------------------------------------------------------


def test_a_token_that_is_not_a_number_does_not_spoil_the_matching() -> None:
    """0.1.0 merges all tokens that leave such an image into its first one."""
    model, seen = network(), []
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.7), 32)
    _, merger = next(iter(mergers(model)))
    with merger.register_forward_pre_hook(lambda _, given: seen.append(given)), torch.no_grad():
        model(images(1))
        tokens, hints = seen[0]
        tokens = tokens.clone()
        tokens[:, merger.site.num_prefix + 4] = torch.nan
        (weights,) = merger(tokens, hints).merge.weights()
    num_joined = weights.count_nonzero(dim=0)
    assert num_joined[weights[4].argmax()] == 1
    assert num_joined.max() < 5


@pytest.mark.slow
def test_predictions_of_a_detector_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.1.0 replaces them without a word."""
    data = "shapes:size=64,images=4,val_images=2,classes=2"
    train = ["detect", "train", "--recipe", "shapes_ssdlite", "--batch-size", "4", "--epochs", "1"]
    train += ["--data", data, "--image-size", "64", "64", "--per-block", "0.5"]
    assert main([*train, "--output", str(tmp_path / "run")]) == 0
    call = ["detect", "predict", "--run", str(tmp_path / "run"), data]
    call += ["--output", str(tmp_path / "out")]
    assert main(call) == 0
    assert main(call) == 2
    assert "holds the results of another run" in capsys.readouterr().err


@pytest.mark.slow
def test_overlapping_resumes_measure_nothing_twice(tmp_path: Path) -> None:
    """0.1.0 measures what another run is measuring."""
    call = ["benchmark", "--models", "vit_tiny_patch16_224", *ARGUMENTS, "--methods", "tome"]
    call += ["--ratio", "0.9", "--batch-sizes", "1", "--rounds", "2", "--warmup", "1", "--resume"]
    call += ["--modes", "eager", "--device", "cpu", "--output", str(tmp_path)]
    codes: list[int] = []
    second = Thread(target=lambda: codes.append(main(call)))
    with at_first_forward(second.start):
        codes.append(main(call))
    second.join()
    assert codes == [0, 0]
    rows = json.loads((tmp_path / "metrics.json").read_text())["rows"]
    assert sorted(row["method"] for row in rows) == ["base", "tome"]


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

"""Ctrl-C: one press ends a command after the step at hand, a second one at once."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import timm
from PIL import Image
from safetensors.torch import save_file
from torch.nn.modules.module import register_module_forward_pre_hook

from ltm import interruption
from ltm.cli import main
from ltm.evaluation import measurement
from ltm.interruption import in_steps, stepwise, stop_if_asked, whole_command
from ltm.training.trainer import Trainer
from ltm.web.server import Server

VIT = ("img_size=32", "patch_size=8", "embed_dim=16", "depth=3", "num_heads=2")
NETWORK = [
    *("--model", "vit_tiny_patch16_224", "--model-args", *VIT, "--num-classes", "3"),
    *("--weights", "weights.safetensors"),
]
DATA = ["--data", "shapes:classes=3,size=32,images=36,val_images=40", "--workers", "0"]
TRAIN = [
    *("train", "--model", "vit_tiny_patch16_224", "--model-args", *VIT, "--image-size", "32"),
    *(*DATA, "--batch-size", "12", "--device", "cpu", "--statistics-images", "24"),
]
DETECTION = [
    *("--data", "shapes:size=64,images=4,val_images=2,classes=2", "--image-size", "64", "64"),
    *("--per-block", "0.5", "--batch-size", "2", "--epochs", "2", "--device", "cpu"),
]


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Thing:
    """Something that can be referred to weakly."""


def press_in_a_callback() -> None:
    """Press Ctrl-C while Python calls back for a dead object, where exceptions are swallowed."""
    thing = Thing()
    known = weakref.ref(thing, lambda _: press())
    del thing
    assert known() is None


@pytest.mark.slow
def test_training_stops_after_the_step_where_a_callback_was_pressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.1.0 trains on: the callback of a weak dictionary swallows the exception."""
    step, steps = Trainer._step, []

    def pressed(self: Trainer, *args: Any) -> Any:
        steps.append(args)
        if len(steps) == 5:  # in the second epoch
            press_in_a_callback()
        return step(self, *args)

    monkeypatch.setattr(Trainer, "_step", pressed)
    assert main([*TRAIN, "--epochs", "9", "--output", str(tmp_path)]) == 130
    assert len(steps) == 5
    said = capsys.readouterr()
    assert "epoch 1 is kept; continue with --resume auto" in said.out
    assert "Traceback" not in said.err
    assert [path.name for path in tmp_path.glob("checkpoints/epoch-*")] == ["epoch-0001"]


def test_what_a_callback_swallows_is_raised_again() -> None:
    """Outside of loops, too; 0.1.0 goes on."""

    def wait() -> None:
        with whole_command():
            press_in_a_callback()
            time.sleep(5)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert time.monotonic() - began < 2


def test_a_step_ends_before_it_stops() -> None:
    done: list[int] = []

    def loop() -> None:
        with in_steps():
            for number in stepwise(range(9)):
                if number == 3:
                    press()
                done.append(number)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        loop()
    assert done == [0, 1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is before
    stop_if_asked()  # it was asked once


def test_an_error_after_the_press_is_its_consequence() -> None:
    """Loader workers and other processes get the signal, too, and end."""

    def fail() -> None:
        with in_steps():
            press()
            raise RuntimeError("DataLoader worker exited unexpectedly")

    with pytest.raises(KeyboardInterrupt):
        fail()


def test_the_second_press_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with whole_command(), suppress(KeyboardInterrupt), in_steps():
        press()
        assert codes == []
        with suppress(KeyboardInterrupt):  # `_exit` would not come back
            press()
        assert codes == [130]


def test_torchrun_hands_on_what_the_terminal_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with whole_command(), suppress(KeyboardInterrupt), in_steps():
        press()
        press()
        assert codes == []
        monkeypatch.setattr(interruption, "_SAME_PRESS_SECONDS", 0)
        with suppress(KeyboardInterrupt):
            press()
        assert codes == [130]


def test_forked_workers_leave_it_to_their_parent() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("no fork")
    with whole_command():
        child = os.fork()
        if child == 0:
            try:
                press()
            except KeyboardInterrupt:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


LONG_STEP = """
import sys, time
from ltm.cli import main
from ltm.training.trainer import Trainer

def step(*_):
    print("in a step", flush=True)
    time.sleep(100)

Trainer._step = step
sys.argv = ["ltm", *sys.argv[1:]]
sys.exit(main())
"""


@pytest.mark.exhaustive
def test_two_presses_in_a_terminal_end_a_command_within_its_step(tmp_path: Path) -> None:
    """A terminal tells the loader processes, too."""
    call = [sys.executable, "-c", LONG_STEP, *TRAIN, "--workers", "1", "--epochs", "3"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    call += ["--output", str(tmp_path)]
    with subprocess.Popen(call, start_new_session=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert "in a step\n" in iter(process.stdout.readline, "")
            os.killpg(process.pid, signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=2)  # the step goes on
            pressed = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(timeout=30) == 130
            assert time.monotonic() - pressed < 2
            assert "Traceback" not in process.stderr.read()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "interrupted"), [(signal.SIGINT, True), (signal.SIGTERM, False)]
)
def test_a_page_is_served_until_then(number: int, interrupted: bool) -> None:
    """0.1.0 lets gradio wait, which exits with 0 after Ctrl-C, or aborts."""
    server = Server(address="", folder=Path(), handlers=None, page=None)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), number))
    timer.start()
    with whole_command():
        assert server.wait() is interrupted


@pytest.fixture
def pressed_at_first_forward() -> Iterator[list[float]]:
    """Ctrl-C is pressed when a network on a device runs for the first time; holds that time."""
    seen: list[float] = []

    def hook(_module: Any, inputs: tuple[Any, ...]) -> None:
        on_meta = any(getattr(x, "is_meta", False) for x in inputs)
        if not seen and not on_meta:
            seen.append(time.monotonic())
            press()

    handle = register_module_forward_pre_hook(hook)
    yield seen
    handle.remove()


COMMANDS: dict[str, list[str]] = {
    "train": [*TRAIN, "--epochs", "3"],
    "evaluate": ["evaluate", *NETWORK, *DATA, "--methods", "ltm", "--ratio", "0.9"],
    "calibrate": ["calibrate", *NETWORK, *DATA, "--budget", "0.9", "--images", "40"],
    "compress": ["compress", *NETWORK, *DATA, "--ratio", "0.9", "--no-calibrate"],
    "visualize": ["visualize", *NETWORK, "--ratio", "0.9"],
    "export": ["export", *NETWORK, *DATA, "--images", "4"],
    "predict": ["predict", "picture.png", *NETWORK],
    "finetune": ["finetune", *TRAIN[1:], "--weights", "weights.safetensors", "--epochs", "3"],
    "detect": ["detect", "train", "--recipe", "shapes_ssdlite", *DETECTION],
    "segment": ["segment", "train", "--recipe", "shapes_mask_rcnn", *DETECTION],
    "embed": ["embed", "picture.png", *NETWORK],
    "demo": ["demo", "--images", "4", "--no-time"],
    "table": ["table", "scratch", "--scale", "smoke", "--device", "cpu"],
    "benchmark": ["benchmark", "--models", NETWORK[1], "--model-args", *VIT, "--ratio", "0.9"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_stops_within_two_seconds_and_says_so(
    name: str,
    pressed_at_first_forward: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With 0.1.0 some end in a traceback, and some with 0.

    Steps are short here, so the two seconds that a command has after its step hold from the press.
    `serve` waits instead of taking steps: tests/test_promises.py ends it.
    """
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (32, 32)).save("picture.png")
    arguments = {name: int(value) for name, value in (word.split("=") for word in VIT)}
    network = timm.create_model("vit_tiny_patch16_224", num_classes=3, **arguments)
    save_file(network.state_dict(), "weights.safetensors")
    assert main([*COMMANDS[name], "--output", "out"]) == 130
    assert time.monotonic() - pressed_at_first_forward[0] < 2
    said = capsys.readouterr()
    assert "ltm: stopped by Ctrl-C" in said.err
    assert "Traceback" not in said.err
    assert not Path("out", ".lock").exists()


@pytest.mark.slow
def test_nothing_more_is_measured_after_the_press(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`compress` and `demo` showed 64 images to every network once more, to count their tokens."""
    evaluate = measurement.evaluate

    def pressed(models: Any, batches: Any, **options: Any) -> Any:
        press()
        return evaluate(models, batches, **options)

    monkeypatch.setattr(measurement, "evaluate", pressed)
    monkeypatch.setattr(measurement, "tokens_by_block", lambda *_: pytest.fail("it goes on"))
    monkeypatch.chdir(tmp_path)
    arguments = {name: int(value) for name, value in (word.split("=") for word in VIT)}
    network = timm.create_model("vit_tiny_patch16_224", num_classes=3, **arguments)
    save_file(network.state_dict(), "weights.safetensors")
    assert main([*COMMANDS["compress"], "--no-time", "--output", "out"]) == 130
    assert "Stopped during the evaluation; out holds what was done" in capsys.readouterr().out

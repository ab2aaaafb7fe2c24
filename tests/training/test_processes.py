"""Runs in processes of their own: killed and resumed, and two that share the work."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ltm.training.checkpoint import Checkpoint, Checkpoints
from ltm.training.classification import Classification
from ltm.training.fabric import make_fabric
from ltm.training.run import train
from ltm.training.settings import RunSettings, TrainSettings
from ltm.training.trainer import Trainer

PROCESS = str(Path(__file__).with_name("process.py"))

Tiny = Callable[..., TrainSettings]
TinyFile = Callable[..., Path]


def last(folder: Path, name: str = "checkpoints") -> Checkpoint:
    found = Checkpoints(folder / name).latest()
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "devices"), [("cuda:1", [1]), ("cuda", 1)])
def test_a_run_takes_the_gpu_that_is_named(
    name: str, devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("ltm.training.fabric.Fabric", lambda **known: asked.update(known))
    make_fabric(RunSettings(device=name))
    assert (asked["accelerator"], asked["devices"]) == ("cuda", devices)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (RunSettings(device="gpu"), "device is gpu: auto, cpu, cuda, cuda:N or mps is needed"),
        (RunSettings(device="cuda:x"), "device is cuda:x: auto"),
        (RunSettings(device="cuda:1", devices=2), "but there are 2 processes: use cuda"),
    ],
)
def test_devices_that_cannot_work_are_refused(
    settings: RunSettings, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ValueError, match=message):
        make_fabric(settings)


def _trainer(settings: TrainSettings) -> Trainer:
    task = Classification(settings)
    task.open_data()
    return Trainer(make_fabric(settings.run), task, task.build(print))


@pytest.mark.parametrize(("before", "after"), [(24, 12), (6, 12)])
def test_the_schedule_goes_by_images_whoever_resumes(
    tiny: Tiny, tmp_path: Path, before: int, after: int
) -> None:
    """Half as many processes are batches of half the size, and twice as many updates an epoch.

    0.1.0 went on at the number of updates: the learning rate after the third epoch was that of
    an earlier or a later one.
    """
    groups: dict[str, Any] = {"merge": {"method": "none"}, "optim": {"epochs": 4, "lr": 1e-3}}
    first = _trainer(tiny(**groups, data={"batch_size": before}))
    for epoch in range(2):
        first.run_epoch(epoch)
    checkpoints = Checkpoints(tmp_path)
    first.save(checkpoints, 2, None, [])
    resumed = _trainer(tiny(**groups, data={"batch_size": after}))
    said = resumed.restore_(last(tmp_path.parent, tmp_path.name))
    assert said.startswith(f"the total batch is {after} and was {before}")
    whole = _trainer(tiny(**groups, data={"batch_size": after}))
    for epoch in range(2):
        whole.run_epoch(epoch)
    assert resumed.run_epoch(2).lr == whole.run_epoch(2).lr
    assert resumed.updates == whole.updates


@pytest.mark.slow
def test_killed_and_resumed_is_as_never_interrupted(
    tiny: Tiny, tiny_file: TinyFile, tmp_path: Path
) -> None:
    """Bit for bit, with everything random: noise, dropout, augmentation, mixup, averages."""
    groups: dict[str, Any] = {
        "model": {"drop_path": 0.1},
        "merge": {"warm_epochs": 1, "statistics": "epoch"},
        "augment": {"mixup": 0.4, "erase": 0.3, "auto_augment": "rand-m5"},
        "optim": {"epochs": 3, "ema": 0.9, "lr_warmup_epochs": 0.5, "accumulate": 2},
    }
    command = [sys.executable, PROCESS, str(tiny_file(**groups)), str(tmp_path / "run")]
    killed = subprocess.run([*command, "--die", "2", "1"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert last(tmp_path / "run").epoch == 2
    train(settings=tiny(**groups), output=tmp_path / "run", resume="auto")
    train(settings=tiny(**groups), output=tmp_path / "whole")
    resumed, whole = last(tmp_path / "run"), last(tmp_path / "whole")
    assert resumed.epoch == whole.epoch == 3
    for name in ("weights", "ema"):
        ours, theirs = resumed.weights(name), whole.weights(name)
        assert ours.keys() == theirs.keys()
        assert [key for key in ours if not ours[key].equal(theirs[key])] == []
    drop = ("seconds", "per_second")
    for mine, other in zip(resumed.history, whole.history, strict=True):
        assert {k: v for k, v in mine.items() if not k.endswith(drop)} == {
            k: v for k, v in other.items() if not k.endswith(drop)
        }


def run_together(settings: Path, output: Path, count: int = 2) -> None:
    """Start processes the way torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, PROCESS, str(settings), str(output)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    assert [process.wait(timeout=300) for process in started] == [0] * count


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_two_processes_are_one_with_the_doubled_batch(
    tiny: Tiny, tiny_file: TinyFile, tmp_path: Path, strategy: str
) -> None:
    groups: dict[str, Any] = {
        "merge": {"warm_epochs": 1, "noise": 0.0},
        "augment": {"scale": [1, 1], "ratio": [1, 1], "hflip": 0},
        "optim": {"epochs": 3, "clip": 1.0},
    }
    settings = tiny_file(**groups, run={"device": "cpu", "strategy": strategy})
    run_together(settings, tmp_path / "two")
    train(settings=tiny(**groups, data={"batch_size": 24}), output=tmp_path / "one")
    two, one = last(tmp_path / "two"), last(tmp_path / "one")
    for mine, other in zip(two.history, one.history, strict=True):
        for name in ("train_loss", "val_loss"):
            assert mine[name] == pytest.approx(other[name], abs=1e-4)
        for name in ("ib_loss", "ib_bound"):  # 0.1.0 measured the first process's images alone
            assert mine[name] == pytest.approx(other[name], abs=1e-3)
        assert mine["train_top1"] == pytest.approx(other["train_top1"], abs=1e-6)
    ours, theirs = two.weights(), one.weights()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        tolerance = 1e-4 if "informative" in name else 1e-3
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=name)
    statistics = [name for name in theirs if name.endswith("centroids")]
    assert statistics
    assert all(theirs[name].any() for name in statistics)

"""Two machines, played by two torchrun agents on this one: the documented command, and a death."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ltm.data.loading import build_loader
from ltm.data.shards import open_shards
from ltm.training.checkpoint import Checkpoints
from many import encoded, write_shard

psutil = pytest.importorskip("psutil")


def write_split(folder: Path, split: str, shards: int, images: int) -> list[Path]:
    """Tar shards of labelled images."""
    paths = []
    for shard in range(shards):
        contents: dict[str, bytes] = {}
        for number in range(images):
            key = f"{shard:02d}{number:03d}"
            contents[f"{key}.png"] = encoded(100 * shard + number)
            contents[f"{key}.cls"] = str(number % 3).encode()
        paths.append(write_shard(folder / f"{split}-{shard:02d}.tar", contents))
    return paths


@pytest.mark.parametrize(("processes", "batch"), [(2, 4), (4, 3), (3, 5)])
def test_every_process_has_as_many_steps_and_no_image_comes_twice(
    processes: int, batch: int, tmp_path: Path
) -> None:
    """What does not fill a batch of all processes is left out, another part in each epoch."""
    files = open_shards(write_split(tmp_path, "train", 3, 11)).files
    numbers = list(range(len(files)))
    dropped = []
    for epoch in range(2):
        seen, steps = [], set()
        for rank in range(processes):
            place: dict[str, Any] = {"rank": rank, "world_size": processes, "collate": list}
            loader = build_loader(numbers, batch_size=batch, training=True, **place)  # type: ignore[arg-type]
            loader.set_epoch(epoch)
            found = list(loader)
            steps.add(len(found))
            seen += [number for numbers_of in found for number in numbers_of]
        assert steps == {33 // processes // batch}
        assert len(seen) == len(set(seen))
        assert 33 - len(seen) < processes * batch + processes
        dropped.append(set(numbers) - set(seen))
    assert dropped[0] != dropped[1]


def start_node(port: int, settings: Path, output: Path) -> subprocess.Popen[bytes]:
    """The command of docs/training.md, with one process a machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    launcher += ["--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--no-python"]
    command = [sys.executable, "-m", "ltm", "train", "--config", str(settings)]
    return subprocess.Popen([*launcher, *command, "--output", str(output), "--resume", "auto"])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def kill(node: subprocess.Popen[bytes]) -> None:
    """A machine that is switched off: the agent, and all that it started."""
    family = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
    for process in family:
        process.kill()
    node.wait()


@pytest.mark.exhaustive
def test_a_node_that_dies_is_resumed(tiny_file: Callable[..., Path], tmp_path: Path) -> None:
    write_split(tmp_path, "train", 3, 16)
    write_split(tmp_path, "val", 1, 12)
    source = str(tmp_path / "{split}-*.tar")
    groups: dict[str, Any] = {
        "data": {"source": source, "batch_size": 6, "workers": 1, "image_size": 32},
        "optim": {"epochs": 8, "lr": 1e-3},
    }
    settings = tiny_file(**groups)
    port = free_port()
    whole = [start_node(port, settings, tmp_path / "whole") for _ in range(2)]
    assert [node.wait(timeout=300) for node in whole] == [0, 0]
    port, output = free_port(), tmp_path / "killed"
    first, second = (start_node(port, settings, output) for _ in range(2))
    while first.poll() is None and len(Checkpoints(output / "checkpoints")) == 0:
        time.sleep(0.02)
    kill(second)
    try:
        assert first.wait(timeout=60) != 0, "no machine trains on alone"
    except subprocess.TimeoutExpired:
        kill(first)  # it waits for the other to come back
    assert not (output / "metrics.json").exists()
    reached = Checkpoints(output / "checkpoints").latest()
    assert reached is not None
    assert 0 < reached.epoch < 8
    port = free_port()
    again = [start_node(port, settings, output) for _ in range(2)]
    assert [node.wait(timeout=300) for node in again] == [0, 0]
    ours, theirs = (Checkpoints(tmp_path / n / "checkpoints").latest() for n in ("killed", "whole"))
    assert ours is not None
    assert theirs is not None
    assert ours.epoch == theirs.epoch == 8
    mine, other = ours.weights(), theirs.weights()
    assert [name for name in other if not mine[name].equal(other[name])] == []

"""Runs that are killed go on as if nothing had happened, to the last bit.

`LTM_SOAK_KILLS` says how often one is killed (`make soak`): by turns at a random moment, and inside
the writing of a checkpoint.
"""

import csv
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from ltm.training.checkpoint import Checkpoints
from ltm.training.run import train
from ltm.training.settings import TrainSettings

KILLS = int(os.environ.get("LTM_SOAK_KILLS", "2"))
_TIMES = ("train_seconds", "statistics_seconds", "val_seconds", "images_per_second")


def run(settings: TrainSettings, folder: Path, die_at: int | None = None) -> None:
    """What a process does; it kills itself at the n-th step of writing checkpoints, if asked to."""
    torch.set_num_threads(1)
    if die_at is not None:
        _die_while_writing(die_at)
    train(settings=settings, output=folder, resume="auto")


def _die_while_writing(step: int) -> None:
    left, writing = [step], [False]

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if writing[0]:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapped

    def save(*arguments: Any, **options: Any) -> Path:
        writing[0] = True
        try:
            return saved(*arguments, **options)
        finally:
            writing[0] = False

    saved = Checkpoints.save
    Checkpoints.save = save  # type: ignore[method-assign]
    os.fsync = deadly(os.fsync)
    Path.replace = deadly(Path.replace)  # type: ignore[method-assign]
    shutil.rmtree = deadly(shutil.rmtree)  # type: ignore[assignment]


def left(folder: Path) -> dict[str, Any]:
    """All that a run leaves, except how long it took."""
    last = Checkpoints(folder / "checkpoints").latest()
    assert last is not None
    rows = list(csv.DictReader(StringIO((folder / "log.csv").read_text())))
    metrics = json.loads((folder / "metrics.json").read_text())
    return {
        "epoch": last.epoch,
        "state": last.state(),
        "weights": last.weights(),
        "ema": last.weights("ema"),
        "model": (folder / "model" / "model.safetensors").read_bytes(),
        "log": [{n: v for n, v in row.items() if n not in _TIMES} for row in rows],
        "metrics": {n: v for n, v in metrics.items() if "second" not in n},
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").iterdir()),
    }


def assert_same(found: Any, expected: Any, place: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, place
        assert torch.equal(found, expected), place
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for name, value in expected.items():
            assert_same(found[name], value, f"{place} {name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for at, value in enumerate(expected):
            assert_same(found[at], value, f"{place} {at}")
    else:
        assert found == expected, place


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:skipped checkpoint")
def test_a_killed_run_ends_as_if_it_had_not_been(
    tiny: Callable[..., TrainSettings], tmp_path: Path
) -> None:
    settings = tiny(
        optim={"epochs": 4, "ema": 0.9},
        augment={"mixup": 0.5, "repeats": 2},
        merge={"warm_epochs": 1},
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ltm.training.run"])

    def started(folder: Path, die_at: int | None = None) -> Any:
        process = context.Process(target=run, args=(settings, folder, die_at))
        process.start()
        return process

    started(tmp_path / "first").join()  # the server is warm now
    clock = time.perf_counter()
    whole = started(tmp_path / "whole")
    whole.join()
    seconds = time.perf_counter() - clock
    assert whole.exitcode == 0
    expected = left(tmp_path / "whole")
    assert_same(left(tmp_path / "first"), expected)
    random, kills, tries = Random(0), 0, 0
    resumed_from: list[int] = []
    while kills < KILLS:
        tries += 1
        assert tries < 20 + 3 * KILLS, "runs end before they are killed"
        folder = tmp_path / f"killed-{tries}"
        if kills % 2:
            process = started(folder, random.randint(1, 60))
        else:
            process = started(folder)
            time.sleep(random.uniform(0, seconds))
            process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            continue
        kills += 1
        resumed_from.append(len(Checkpoints(folder / "checkpoints")))
        run(settings, folder)
        assert_same(left(folder), expected, f"kill {kills}")
        shutil.rmtree(folder)
    print(f"{kills} kills; checkpoints that were there: {sorted(resumed_from)}")

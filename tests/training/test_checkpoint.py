"""Checkpoints are whole or not there."""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ltm.training.checkpoint import Checkpoints, DamagedCheckpointWarning, OutOfSpaceError


def save(checkpoints: Checkpoints, epoch: int, score: float | None = 0.5) -> Path:
    return checkpoints.save(
        epoch=epoch,
        tensors={"weights": {"a": torch.full((4,), float(epoch))}, "ema": {"a": torch.zeros(4)}},
        state={"optimizer": {"step": torch.tensor(epoch)}, "updates": epoch},
        score=score,
        history=[{"epoch": e} for e in range(1, epoch + 1)],
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new")
    save(checkpoints, 3)
    found = checkpoints.latest()
    assert found is not None
    assert (found.epoch, found.score) == (3, 0.5)
    assert found.weights()["a"].tolist() == [3.0] * 4
    assert found.has("ema")
    assert found.state()["updates"] == 3
    assert [row["epoch"] for row in found.history] == [1, 2, 3]
    assert not list(checkpoints.folder.glob(".unfinished*"))


def test_best_last_and_previous_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_every=4)
    for epoch, score in enumerate([0.1, 0.9, 0.3, 0.4, None, 0.2, 0.2], start=1):
        save(checkpoints, epoch, score)
    best = checkpoints.best()
    assert best is not None
    assert best.epoch == 2
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["epoch-0002", "epoch-0004", "epoch-0006", "epoch-0007"]


@pytest.mark.parametrize("name", ["weights.safetensors", "state.pt", "manifest.json"])
@pytest.mark.parametrize("hurt", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, name: str, hurt: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    file = save(checkpoints, 2) / name
    data = file.read_bytes()
    if hurt == "truncate":
        file.write_bytes(data[: len(data) // 2])
    elif hurt == "flip":
        middle = len(data) // 2
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :])
    else:
        file.unlink()
    with pytest.warns(DamagedCheckpointWarning, match="skipped checkpoint .*epoch-0002"):
        found = checkpoints.latest()
    assert found is not None
    assert found.epoch == 1


def test_the_best_checkpoint_is_not_a_damaged_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for epoch, score in ((1, 0.5), (2, 0.9), (3, 0.7)):
        file = save(checkpoints, epoch, score) / "weights.safetensors"
        if epoch == 2:
            damaged = file
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 255]))
    with pytest.warns(DamagedCheckpointWarning, match="skipped checkpoint .*epoch-0002"):
        best = checkpoints.best()
    assert best is not None
    assert best.epoch == 3


def test_a_half_written_checkpoint_is_not_seen(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    (tmp_path / ".unfinished-0002").mkdir()
    (tmp_path / ".unfinished-0002" / "weights.safetensors").write_bytes(b"half")
    found = checkpoints.latest()
    assert found is not None
    assert found.epoch == 1
    save(checkpoints, 2)
    found = checkpoints.latest()
    assert found is not None
    assert found.epoch == 2


def test_no_space_left_keeps_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OutOfSpaceError, match=r"no space left .* epoch-0001 is the last good"):
            save(checkpoints, 2)
    found = checkpoints.latest()
    assert found is not None
    assert found.epoch == 1
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-0001"]


def test_the_state_holds_nothing_that_runs_code(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return (os.getcwd, ())

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(
        epoch=1, tensors={"weights": {}}, state={"x": Harmful()}, score=None, history=[]
    )
    found = checkpoints.latest()
    assert found is not None
    with pytest.raises(ValueError, match="holds more than tensors and plain values") as caught:
        found.state()
    # 0.1.0 gave torch's page, which advises to load it with weights_only=False.
    assert "weights_only" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {}},
        {"files": {"../../state.pt": {"bytes": 1, "crc32": 2}}},
        {"files": {"weights.safetensors": 7, "state.pt": 7}},
        {"files": {"weights.safetensors": {}, "state.pt": {}}},
        {"epoch": "2"},
        {"epoch": 1},
        {"score": "high"},
        {"history": None},
        {"history": [1, 2]},
        {"history": [{"epoch": 1}]},
        {"history": [{"epoch": 1}, {"epoch": 2, "train_loss": "low"}]},
        {"history": [{"epoch": 1}, {"epoch": 2, "no_column": 1}]},
        None,
    ],
    ids=str,
)
def test_a_broken_manifest_falls_back_to_the_epoch_before(tmp_path: Path, change: Any) -> None:
    """0.1.0 ended in KeyError, TypeError or AttributeError, here or where the rows are used."""

    @dataclass
    class Row:
        epoch: int
        train_loss: float = 0.0

    checkpoints = Checkpoints(tmp_path, row_type=Row)
    save(checkpoints, 1)
    path = save(checkpoints, 2) / "manifest.json"
    content = {**json.loads(path.read_text()), **(change or {})}
    content.pop("crc32", None)  # as 0.1.0 wrote it
    path.write_text(json.dumps(change and content))
    with pytest.warns(DamagedCheckpointWarning, match="checkpoint .*epoch-0002: "):
        found = checkpoints.latest()
    assert found is not None
    assert found.epoch == 1
    assert checkpoints.best() is not None


def test_a_manifest_that_was_changed_is_seen(tmp_path: Path) -> None:
    """0.1.0 took any score, and chose the best checkpoint by it."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, score=0.9)
    path = save(checkpoints, 2, score=0.1) / "manifest.json"
    path.write_text(path.read_text().replace('"score": 0.1', '"score": 0.95'))
    best = checkpoints.best()
    assert best is not None
    assert best.epoch == 1


def test_epochs_are_counted_beyond_four_digits(tmp_path: Path) -> None:
    """0.1.0 took epoch 9999 for the last one."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 9999)
    save(checkpoints, 10000)
    found = checkpoints.latest()
    assert found is not None
    assert found.epoch == 10000

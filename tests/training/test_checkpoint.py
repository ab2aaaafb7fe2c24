"""Checkpoints are whole or not there."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ltm.training.checkpoint import Checkpoints, DamagedCheckpointWarning, OutOfSpaceError, damage


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


def test_a_half_written_checkpoint_is_not_seen(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    (tmp_path / ".unfinished-0002").mkdir()
    (tmp_path / ".unfinished-0002" / "weights.safetensors").write_bytes(b"half")
    found = checkpoints.latest()
    assert found is not None
    assert found.epoch == 1
    save(checkpoints, 2)
    assert damage(tmp_path / "epoch-0002") is None


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
    with pytest.raises(Exception, match=r"[Ww]eights"):
        found.state()

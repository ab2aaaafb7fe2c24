"""How long work tells of itself: a bar on a terminal, lines elsewhere."""

import time

import pytest
import timm
import torch

from ltm import progress
from ltm.evaluation.latency import BASE
from ltm.evaluation.measurement import Measurements


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands at its first entry."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_line_every_half_minute_says_how_long_it_takes(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.progress_bar("calibration", 200) as advance:
        for _ in range(100):
            clock[0] += 1.0
            advance("divergence 0.01")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "calibration: 30 of 200, 0:02:50 left, divergence 0.01",
        "calibration: 60 of 200, 0:02:20 left, divergence 0.01",
        "calibration: 90 of 200, 0:01:50 left, divergence 0.01",
    ]


def test_a_total_may_be_unknown(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar("images", None) as advance:
        clock[0] = 31.0
        advance("350 images/s", count=10_850)
    assert capsys.readouterr().err == "images: 10850, 350 images/s\n"


def test_what_is_timed_is_told_in_lines(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    model = timm.create_model("test_vit").eval()
    measured = Measurements({BASE: model}, quiet=False)
    turn = model.forward

    def slow(images: torch.Tensor) -> torch.Tensor:
        clock[0] += 40.0
        return turn(images)

    model.forward = slow
    measured.measure_time("test_vit", [1], lambda n: torch.zeros(n, 3, 160, 160), rounds=3)
    assert capsys.readouterr().err.splitlines() == [
        "timing batches of 1: 1 of 3, 0:01:20 left",
        "timing batches of 1: 2 of 3, 0:00:40 left",
        "timing batches of 1: 3 of 3, 0:00:00 left",
    ]
    assert list(progress.in_lines("timing", range(3), silent=True)) == [0, 1, 2]


def test_short_and_silent_work_says_nothing(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(progress.Progress("accuracy")(range(5))) == [0, 1, 2, 3, 4]
    with progress.progress_bar("accuracy", 5, silent=True) as advance:
        clock[0] = 100.0
        advance()
    assert capsys.readouterr() == ("", "")

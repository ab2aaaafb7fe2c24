"""How long work tells of itself: a bar on a terminal, lines elsewhere."""

import time

import pytest

from ltm import progress


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


def test_short_and_silent_work_says_nothing(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(progress.Progress("accuracy")(range(5))) == [0, 1, 2, 3, 4]
    with progress.progress_bar("accuracy", 5, silent=True) as advance:
        clock[0] = 100.0
        advance()
    assert capsys.readouterr() == ("", "")

"""Processes that share a file: who waits for whom."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event, Thread

import pytest

from ltm.evaluation.latency import TimingLock

Stage = Callable[[TimingLock], AbstractContextManager[None]]


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (TimingLock.preparing, TimingLock.preparing, False),
        (TimingLock.preparing, TimingLock.timing, True),
        (TimingLock.timing, TimingLock.preparing, True),
        (TimingLock.timing, TimingLock.timing, True),
    ],
)
def test_nobody_prepares_while_another_is_timed(
    first: Stage, second: Stage, waits: bool, tmp_path: Path
) -> None:
    path, entered = tmp_path / "turns", Event()

    def enter() -> None:
        with second(TimingLock(path)):
            entered.set()

    other = Thread(target=enter)
    with first(TimingLock(path)):
        other.start()
        assert entered.wait(0.2 if waits else 10) is not waits
    other.join(10)
    assert entered.is_set()


def test_without_a_file_nobody_waits() -> None:
    with TimingLock().timing(), TimingLock().timing(), TimingLock().preparing():
        pass

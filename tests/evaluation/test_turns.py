"""Processes that share a file: who waits for whom."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event, Thread

import pytest

from ltm.evaluation.turns import Turns

Stage = Callable[[Turns], AbstractContextManager[None]]


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (Turns.preparing, Turns.preparing, False),
        (Turns.preparing, Turns.timing, True),
        (Turns.timing, Turns.preparing, True),
        (Turns.timing, Turns.timing, True),
    ],
)
def test_nobody_prepares_while_another_is_timed(
    first: Stage, second: Stage, waits: bool, tmp_path: Path
) -> None:
    path, entered = tmp_path / "turns", Event()

    def enter() -> None:
        with second(Turns(path)):
            entered.set()

    other = Thread(target=enter)
    with first(Turns(path)):
        other.start()
        assert entered.wait(0.2 if waits else 10) is not waits
    other.join(10)
    assert entered.is_set()


def test_without_a_file_nobody_waits() -> None:
    with Turns().timing(), Turns().timing(), Turns().preparing():
        pass

"""A progress bar, silent where nobody watches; the first Ctrl-C keeps what is done."""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Progress:
    """Shows how far a loop is; call it on what is looped over.

    Ctrl-C ends the loop after the item at hand and sets `interrupted`; a second one is an error.
    """

    def __init__(self, description: str, *, silent: bool = False) -> None:
        self.description, self.silent = description, silent
        self._stop = threading.Event()

    @property
    def interrupted(self) -> bool:
        return self._stop.is_set()

    def __call__(self, items: Iterable[T]) -> Iterator[T]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress as Bar,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        hidden = self.silent or not console.is_terminal
        with (
            Bar(*columns, TimeRemainingColumn(), console=console, disable=hidden) as bar,
            interruptible(self._stop),
        ):
            total = len(items) if hasattr(items, "__len__") else None  # pyright: ignore[reportArgumentType]
            task = bar.add_task(self.description, total=total)
            for item in self._until_interrupted(items):
                yield item
                bar.advance(task)
                if self.interrupted:
                    return

    def _until_interrupted(self, items: Iterable[T]) -> Iterator[T]:
        try:
            yield from items
        except RuntimeError:
            # Ctrl-C also reaches a loader's workers, which end at once.
            if not self.interrupted:
                raise


@contextmanager
def interruptible(interrupted: threading.Event | None = None) -> Iterator[threading.Event]:
    """Let the first Ctrl-C set an event instead of breaking off; the second breaks off."""
    interrupted = interrupted or threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(_number: int, _frame: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)

"""A progress bar, or lines where output is no terminal; the first Ctrl-C keeps what is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, TypeVar

from ltm.interruption import in_steps, take_press

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


class Advance(Protocol):
    """Counts items."""

    def __call__(self, text: str = "", *, count: int = 1, total: int | None = None) -> None:
        """Count some; a text that is not empty replaces the one beside the bar.

        So does a total that was not known, or only estimated.
        """
        ...


@contextmanager
def progress_bar(
    title: str,
    total: int | None,
    *,
    silent: bool = False,
    console: Console | None = None,
    transient: bool = False,
) -> Iterator[Advance]:
    """A bar on a terminal, a line every half minute elsewhere; it needs `rich`.

    Args:
        title: What stands before the bar.
        total: How many items there are, if that is known.
        silent: Show nothing.
        console: Where to show it; standard error by default.
        transient: Remove the bar when it is done.
    """
    if silent or find_spec("rich") is None:
        yield _say_nothing
        return

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress as Bar,
        TextColumn,
        TimeRemainingColumn,
    )

    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _LogLines(title, total)
        return

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Bar(*columns, console=console, transient=transient) as bar:
        task = bar.add_task(title, total=total, text="")

        def advance(text: str = "", *, count: int = 1, total: int | None = None) -> None:
            fields = {"text": text} if text else {}
            bar.update(task, advance=count, total=total, **fields)  # pyright: ignore[reportArgumentType]

        yield advance


def _say_nothing(text: str = "", *, count: int = 1, total: int | None = None) -> None:
    pass


_SECONDS_BETWEEN_LINES = 30.0


class _LogLines:
    """How far it is and how long it still takes, as lines of a log on standard error."""

    def __init__(self, title: str, total: int | None) -> None:
        self._title, self._total, self._done, self._text = title, total, 0, ""
        self._began = self._told = time.monotonic()

    def __call__(self, text: str = "", *, count: int = 1, total: int | None = None) -> None:
        self._done += count
        self._total, self._text = total or self._total, text or self._text
        now = time.monotonic()
        if now - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = now
            print(self._line(now - self._began), file=sys.stderr, flush=True)

    def _line(self, seconds: float) -> str:
        parts = [f"{self._title}: {self._done}"]
        if self._total is not None:
            left = (self._total - self._done) * seconds / max(1, self._done)
            parts = [f"{parts[0]} of {self._total}", f"{duration(left)} left"]
        return ", ".join([*parts, *([self._text] if self._text else [])])


def in_lines(title: str, items: Sequence[T], *, silent: bool = False) -> Iterator[T]:
    """Go through items, and tell how far it is in lines.

    A bar on a terminal redraws itself all the time, which would disturb what is timed.
    """
    advance = _say_nothing if silent else _LogLines(title, len(items))
    for item in items:
        yield item
        advance()


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}"


class Progress:
    """Shows how far a loop is; call it on what is looped over.

    Ctrl-C ends the loop after the item at hand and sets `interrupted`.
    """

    def __init__(self, description: str, *, silent: bool = False) -> None:
        self.description, self.silent = description, silent
        self.interrupted = False

    def __call__(self, items: Iterable[T]) -> Iterator[T]:
        total = len(items) if hasattr(items, "__len__") else None  # pyright: ignore[reportArgumentType]
        with progress_bar(self.description, total, silent=self.silent) as advance, in_steps():
            for item in self._until_interrupted(items):
                yield item
                advance("")
                if self._stops():
                    return
            self._stops()

    def _until_interrupted(self, items: Iterable[T]) -> Iterator[T]:
        try:
            yield from items
        except RuntimeError:
            # Ctrl-C also reaches a loader's workers, which end at once.
            if not self._stops():
                raise

    def _stops(self) -> bool:
        self.interrupted = self.interrupted or take_press()
        return self.interrupted

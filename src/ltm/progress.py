"""A progress bar, silent where nobody watches; the first Ctrl-C keeps what is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    """A bar on a terminal, and nothing elsewhere, so that logs stay clean; it needs `rich`.

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
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    hidden = not console.is_terminal
    with Bar(*columns, console=console, disable=hidden, transient=transient) as bar:
        task = bar.add_task(title, total=total, text="")

        def advance(text: str = "", *, count: int = 1, total: int | None = None) -> None:
            fields = {"text": text} if text else {}
            bar.update(task, advance=count, total=total, **fields)  # pyright: ignore[reportArgumentType]

        yield advance


def _say_nothing(text: str = "", *, count: int = 1, total: int | None = None) -> None:
    pass


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

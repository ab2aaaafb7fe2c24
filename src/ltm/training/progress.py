"""The bar of an epoch, on terminals only; logs stay clean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar(Protocol):
    """What a loop tells about its steps."""

    def step(self, num_images: int, text: str | None = None) -> None:
        """Count a step; `text` replaces what is shown beside the bar."""
        ...


class _Silent:
    def step(self, num_images: int, text: str | None = None) -> None:
        pass


class _Shown:
    def __init__(self, progress: Progress, task: int) -> None:
        self._progress, self._task, self._images = progress, task, 0

    def step(self, num_images: int, text: str | None = None) -> None:
        self._images += num_images
        task = self._progress.tasks[0]
        elapsed = task.elapsed or 0.0
        speed = f"{self._images / elapsed:.0f} images/s" if elapsed > 0 else ""
        fields = {"speed": speed} if text is None else {"speed": speed, "text": text}
        self._progress.update(task.id, advance=1, **fields)  # pyright: ignore[reportArgumentType]


@contextmanager
def bar(console: Console, title: str, num_steps: int, *, shown: bool = True) -> Iterator[Bar]:
    """A progress bar that vanishes when it is done; nothing where there is no terminal."""
    if not shown or not console.is_terminal:
        yield _Silent()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}  {task.fields[text]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=num_steps, speed="", text="")
        yield _Shown(progress, task)

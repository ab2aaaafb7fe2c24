"""Ctrl-C: the first press stops at the end of a step, the second ends the process at once.

Python raises KeyboardInterrupt wherever it happens to be. A callback of the garbage collector may
be there, which swallows it. So loops that train or measure are `in_steps`: inside, a press is only
remembered, and the loop looks for it between two steps. Elsewhere it is raised at once, and raised
again where it was swallowed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

INTERRUPTED = 130
"""What a shell sees of a command that Ctrl-C stopped."""

_SAME_PRESS_SECONDS = 1.0
"""torchrun hands on the Ctrl-C that a terminal has sent to all processes already."""


class _Keyboard:
    """What is known of Ctrl-C in this process."""

    process = 0
    """The process whose presses count; forked workers leave them to it."""
    commands = 0
    """How many commands run: one, or none in a notebook."""
    loops = 0
    """How many loops `in_steps` are under way, one inside the other."""
    waiting = False
    """Whether a press waits for the end of a step."""
    again = False
    """Whether the next signal repeats a press that was swallowed."""
    pressed_at: float | None = None


def stop_if_asked() -> None:
    """Raise KeyboardInterrupt where Ctrl-C was pressed during the step before; once."""
    if take_press():
        raise KeyboardInterrupt


def stepwise(items: Iterable[T]) -> Iterator[T]:
    """Go through items; after each, stop if Ctrl-C was pressed."""
    for item in items:
        yield item
        stop_if_asked()


def take_press() -> bool:
    """Whether Ctrl-C was pressed during the step before; who asks has to stop."""
    waits, _Keyboard.waiting = _Keyboard.waiting, False
    return waits


@contextmanager
def in_steps() -> Iterator[None]:
    """Let Ctrl-C wait for `stop_if_asked`, `take_press` or the end of this block.

    An error meanwhile is taken for its consequence: it reaches loader workers and other processes
    too, which end.
    """
    with _listening() as listens:
        if not listens:
            yield
            return
        _Keyboard.loops += 1
        try:
            yield
        except Exception as error:
            if take_press():
                raise KeyboardInterrupt from error
            raise
        finally:
            _Keyboard.loops -= 1
        if _Keyboard.loops == 0:
            stop_if_asked()


@contextmanager
def whole_command() -> Iterator[None]:
    """Have a whole command stop at the first Ctrl-C, and end at the second."""
    with _listening() as listens:
        if not listens:
            yield
            return
        before, sys.unraisablehook = sys.unraisablehook, _raise_again
        _Keyboard.commands += 1
        try:
            yield
        finally:
            _Keyboard.commands -= 1
            sys.unraisablehook = before


@contextmanager
def _listening() -> Iterator[bool]:
    """Take Ctrl-C over; not in other threads, nor where a shell lets it be ignored."""
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is signal.SIG_IGN:
        yield False
        return
    if before is _press and _Keyboard.process == os.getpid():
        yield True
        return
    _Keyboard.process, _Keyboard.pressed_at = os.getpid(), None
    _Keyboard.waiting = _Keyboard.again = False
    _Keyboard.loops = _Keyboard.commands = 0
    signal.signal(signal.SIGINT, _press)
    try:
        yield True
    finally:
        signal.signal(signal.SIGINT, before)


def _press(_number: int, _frame: object) -> None:
    if os.getpid() != _Keyboard.process:
        return
    if _is_second():
        if _Keyboard.commands:
            end()
        raise KeyboardInterrupt
    if _Keyboard.loops:
        _Keyboard.waiting = True
    else:
        raise KeyboardInterrupt


def _is_second() -> bool:
    now, before = time.monotonic(), _Keyboard.pressed_at
    again, _Keyboard.again = _Keyboard.again, False
    if again:
        return False
    _Keyboard.pressed_at = now
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return before is not None and not (several and now - before < _SAME_PRESS_SECONDS)


def end() -> NoReturn:
    """End the process at once: threads and workers may take long, or abort, when they are ended.

    Files are written aside, so none is half there.
    """
    with suppress(Exception):
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), b"\x1b[?25h")  # a progress bar hides the cursor
        for child in multiprocessing.active_children():
            child.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(INTERRUPTED)


def _raise_again(swallowed: Any) -> None:
    """Press Ctrl-C again where a callback has swallowed it; a hook of Python."""
    if swallowed.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(swallowed)
        return

    def press() -> None:
        _Keyboard.again = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    later = threading.Timer(0.05, press)
    later.daemon = True
    later.start()

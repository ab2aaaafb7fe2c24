"""Ctrl-C: the first press stops at the end of a step, the second ends the process at once.

Python raises KeyboardInterrupt wherever it happens to be, even in a callback of the garbage
collector, which swallows it. So loops that train or measure are `in_steps`: inside, a press is only
remembered, and the loop looks for it between two steps. Elsewhere it is raised at once, and raised
again if it was swallowed.
"""

from __future__ import annotations

import atexit
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
"""A terminal sends Ctrl-C to all processes, and torchrun sends it again: that is one press."""


class _Keyboard:
    """The state of Ctrl-C in this process."""

    process = 0
    """The process whose presses count; forked workers leave them to it."""
    commands = 0
    """How many commands run: one, or none in a notebook."""
    loops = 0
    """How many `in_steps` blocks are open, one inside the other."""
    waiting = False
    """Whether a press waits for the end of a step."""
    again = False
    """Whether the next signal repeats a press that was swallowed."""
    pressed_at: float | None = None


def stop_if_asked() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed during the last step."""
    if take_press():
        raise KeyboardInterrupt


def stepwise(items: Iterable[T]) -> Iterator[T]:
    """Go through items; after each, stop if Ctrl-C was pressed."""
    for item in items:
        yield item
        stop_if_asked()


def take_press() -> bool:
    """Whether Ctrl-C was pressed during the last step. The caller has to stop: it is told once."""
    waits, _Keyboard.waiting = _Keyboard.waiting, False
    return waits


@contextmanager
def in_steps() -> Iterator[None]:
    """Let Ctrl-C wait for `stop_if_asked`, `take_press` or the end of this block.

    Ctrl-C also ends loader workers and other processes. So after a press, an error in the block
    counts as its consequence.
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
    """Stop the command inside at the first Ctrl-C, and end the process at the second."""
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
    """Handle Ctrl-C here; yields whether that works: not in other threads, nor if it is ignored."""
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
    """End the process at once, without waiting for threads and workers, which may hang or abort.

    Files are written elsewhere and then moved, so none is left half-written.
    """
    with suppress(Exception):
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), b"\x1b[?25h")  # a progress bar hides the cursor
        for child in multiprocessing.active_children():
            child.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(INTERRUPTED)


def leave(code: int) -> int:
    """Return the exit code of a command that is done, unless daemon threads are left: end here.

    Python kills those when it ends, and one that is inside PyTorch then aborts the process.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        atexit._run_exitfuncs()  # noqa: SLF001 - there is no public way, and multiprocessing does so
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _raise_again(swallowed: Any) -> None:
    """Press Ctrl-C again after a callback has swallowed it; this is `sys.unraisablehook`."""
    if swallowed.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(swallowed)
        return

    def press() -> None:
        _Keyboard.again = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    later = threading.Timer(0.05, press)
    later.daemon = True
    later.start()

"""Work side by side in CUDA graphs of batches that do not fill a GPU."""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

_R = TypeVar("_R")
FEW_IMAGES = 16
"""Smaller batches leave most of a GPU idle, and finish earlier with smaller programs."""
MOST_IMAGES = 64
"""Larger batches fill a GPU."""


def mark(x: Tensor) -> torch.cuda.Event | None:
    """This place in a CUDA graph, for a `branch` that may begin here; None for many images.

    It is also None without a graph, where a second stream costs more CPU time than it saves.
    """
    if torch.compiler.is_compiling() or not (x.is_cuda and x.shape[0] < MOST_IMAGES):
        return None
    if not torch.cuda.is_current_stream_capturing():
        return None
    place = torch.cuda.Event()
    place.record(torch.cuda.current_stream(x.device))
    return place


@contextmanager
def branch(since: torch.cuda.Event | None) -> Generator[Callable[[], None]]:
    """Run what is inside in parallel to what follows the mark, until the yielded join.

    What is inside may only read what was there at the mark, and has to be kept until the join.
    Without a mark it runs in order.
    """
    if since is None:
        yield lambda: None
        return
    here, there = torch.cuda.current_stream(), _second_stream(torch.cuda.current_device())
    there.wait_event(since)
    with torch.cuda.stream(there):
        # Memory from this stream is safe after the join: the next branch begins after it.
        yield lambda: here.wait_stream(there)


def alongside(since: torch.cuda.Event | None, run: Callable[[], _R]) -> _R:
    """Run a function in parallel to what came after the mark; its result is there afterwards."""
    if since is None:
        return run()
    with branch(since) as join:
        found = run()
    join()
    return found


@cache
def _second_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

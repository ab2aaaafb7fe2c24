"""What is to be done with many images, in pieces that any process can do."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from ltm.data.reading import Chunk, Readings
from ltm.data.sources import STDIN, ImageRef, Part, find_parts
from ltm.deployment.predictor import BatchPredictor
from ltm.deployment.tables import Tables
from ltm.processes import ALONE, Process
from ltm.progress import Advance


@dataclass(frozen=True, kw_only=True)
class EmbedResult:
    """What a run has written."""

    folder: Path
    images: int
    """Rows that this run wrote."""
    unreadable: int
    files: int
    skipped: int
    """Files that an earlier run had written."""
    seconds: float
    interrupted: bool = False

    @property
    def images_per_second(self) -> float:
        """Speed of the whole run, the network's loading left out."""
        return self.images / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        earlier = f", {self.skipped} were there" if self.skipped else ""
        unread = f", {self.unreadable} unreadable" if self.unreadable else ""
        return (
            f"{self.images} images{unread} in {self.seconds:.1f} s, {self.images_per_second:.0f} "
            f"images/s: {self.files} files in {self.folder}{earlier}"
        )


@dataclass(frozen=True)
class Job:
    """All that a process has to know; it can be sent to another."""

    predictor: BatchPredictor
    inputs: tuple[str, ...]
    folder: Path
    settings: Any

    def about(self) -> dict[str, Any]:
        """What the files say of the run; the same for every process."""
        loaded = self.predictor.loaded
        return {
            "model": loaded.information.model,
            "weights": loaded.identity,
            "outputs": list(loaded.outputs),
            "top": self.predictor.top,
            "dtype": self.settings.dtype,
            "preprocessing": dataclasses.asdict(loaded.information.spec),
            "merging": loaded.information.token_merging,
        }

    def parts(self) -> Iterator[Part]:
        """The parts of the inputs, in order."""
        return find_parts(self.inputs, rows=self.settings.shard_rows, split=self.settings.split)


class Chunks:
    """The chunks that are not done yet, found while they are asked for."""

    def __init__(self, job: Job, tables: Tables, process: Process = ALONE) -> None:
        self._job, self._tables, self.process = job, tables, process
        self.skipped = self.seen = self.images = 0

    def __iter__(self) -> Iterator[Chunk]:
        size, process = self._job.settings.batch_size, self.process
        mine = islice(enumerate(self._job.parts()), process.rank, None, process.world_size)
        for number, part in mine:
            if self._tables.has(number, part):
                self.skipped += 1
                continue
            images = tuple(part.images()) or (_nothing(part),)
            self.seen += 1
            self.images += len(images)
            for first in range(0, len(images), size):
                yield Chunk(images[first : first + size], number, first, len(images))


def _nothing(part: Part) -> ImageRef:
    return ImageRef(part.key, part.key, error="there are no images in this shard")


def stacked(read: Readings, size: tuple[int, int]) -> dict[str, Any]:
    """A batch of columns; images that could not be read are black."""
    chunk, number = read.chunk, len(read.images)
    black = torch.zeros(3, *size, dtype=torch.uint8)
    images = (black if image is None else image for image in read.images)
    # Colours last, as files have them; a loader's process stacks them in shared memory.
    pixels = default_collate([image.permute(1, 2, 0) for image in images])
    return {
        "part": np.full(number, chunk.part),
        "place": np.arange(chunk.first, chunk.first + number),
        "part_rows": np.full(number, chunk.part_rows),
        "id": [image.id for image in chunk.images],
        "path": [image.path for image in chunk.images],
        "image": pixels,
        "error": read.errors,
    }


class Meter:
    """Shows images, images a second and the time left."""

    def __init__(self, advance: Advance, job: Job, chunks: Chunks) -> None:
        self._advance, self._chunks = advance, chunks
        self._began, self._images = time.perf_counter(), 0
        self._parts: int | None = None
        """How many parts there are, once they are counted."""
        if sys.stderr.isatty() and STDIN not in job.inputs:
            threading.Thread(target=self._count, args=(job,), daemon=True).start()

    def _count(self, job: Job) -> None:
        self._parts = sum(1 for _ in job.parts())

    def __call__(self, count: int) -> None:
        """Show that so many images are done; parts that were not looked into are as large."""
        self._images += count
        speed = self._images / max(time.perf_counter() - self._began, 1e-9)
        chunks, total = self._chunks, None
        if self._parts is not None and chunks.seen:
            left = (self._parts - chunks.skipped) // chunks.process.world_size
            total = max(chunks.images, chunks.images * left // chunks.seen)
        self._advance(f"{speed:,.0f} images/s", count=count, total=total)

"""`ltm.embed` on Ray Data: images are read by tasks, the network runs in actors, Ray schedules.

    parts -> _Read (tasks) -> _Predict (actors) -> Tables
    (the driver)                                   (the driver)

This process finds the parts and writes the files, so only it needs the output folder. It looks into
no part: the tasks do, each when its turn comes. If a worker dies, Ray repeats its work.
"""

from __future__ import annotations

import logging
import math
import pickle
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import ray
import ray.data
from ray import cloudpickle

from ltm.data.reading import Chunk, ChunkReader, Preparation, sentence
from ltm.data.sources import Part
from ltm.data.transforms import ImageSpec
from ltm.deployment.embedding import (
    Chunks,
    EmbedResult,
    Job,
    chunks_of,
    images_of,
    remove_unfinished,
    stacked,
)
from ltm.deployment.predictor import BatchPredictor
from ltm.deployment.tables import Tables
from ltm.interruption import in_steps, take_press
from ltm.models import Say
from ltm.progress import Advance, progress_bar


class Actors(NamedTuple):
    """How many processes hold the network, and the GPUs that each of them asks for."""

    number: int
    gpus: int


def place_actors(
    predictor: BatchPredictor, devices: int | None, resources: Mapping[str, float]
) -> Actors:
    """Decide by what the cluster has; the driver's machine may be one without a GPU."""
    device = predictor.device
    if device.startswith("cuda:"):
        raise ValueError(
            f"device is {device}, but Ray deals the GPUs out: give cuda, and --devices for the "
            "number of actors"
        )
    known = ("auto", "cpu", "cuda", *(("tensorrt",) if predictor.is_file else ()))
    if device not in known:
        raise ValueError(f"device is {device}: on Ray it is one of {', '.join(known)}")
    if device == "cpu" or (device == "auto" and predictor.is_file):
        return Actors(devices or 1, 0)
    gpus = int(resources.get("GPU", 0))
    if not gpus and device != "auto":
        raise ValueError(f"device is {device}, but no node of the Ray cluster has a GPU")
    return Actors(devices or max(gpus, 1), 1 if gpus else 0)


class _Read:
    """A part becomes as many rows as it has images; of several tasks, each reads some chunks."""

    def __init__(self, spec: ImageSpec, size: int) -> None:
        self._reader, self._spec, self._size = ChunkReader(Preparation(spec)), spec, size

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for stored, first, step in zip(*(batch[n] for n in _TASK), strict=True):
            number, part = pickle.loads(stored)  # noqa: S301 - made by `_tasks`
            for chunk in islice(chunks_of(images_of(part), number, self._size), first, None, step):
                yield self._columns(chunk)

    def _columns(self, chunk: Chunk) -> dict[str, Any]:
        columns = stacked(self._reader[chunk], self._spec.size)
        columns["image"] = columns["image"].numpy()
        columns["error"] = np.array([error or "" for error in columns["error"]])
        return {name: np.asarray(column) for name, column in columns.items()}


_TASK = ("part", "first", "step")


def _tasks(parts: Sequence[tuple[int, Part]], readers: int) -> list[dict[str, Any]]:
    """The tasks that read; several share a part where there are fewer parts than readers."""
    step = math.ceil(readers / max(len(parts), 1))
    stored = ((cloudpickle.dumps(part), first) for part in parts for first in range(step))
    return [dict(zip(_TASK, (part, first, step), strict=True)) for part, first in stored]


class _Predict:
    """The predictor as an actor: it loads its network once."""

    def __init__(self, predictor: BatchPredictor) -> None:
        self._predictor = predictor

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        found = self._predictor(batch)
        # Ray's columns of text have no None.
        found["error"] = np.array([error or "" for error in found["error"]])
        if "classes" in found:
            found["classes"] = found["classes"].astype(str)
        return found


def run_on_ray(job: Job, say: Say) -> EmbedResult:
    """Run a job on the cluster that the settings name."""
    with _connected(job.settings.ray):
        return _run(job, say)


def join_cluster(address: str) -> None:
    """Connect to a cluster; an address at which nobody answers is an error."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # here Ray itself would try for many minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, ValueError) as error:
        raise ValueError(
            f"ray is {address}, which cannot be joined ({sentence(error)}): give local, auto on a "
            "node of a running cluster, or ray://HOST:10001"
        ) from error


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Join a cluster, or start one here, unless this process is in one."""
    mine = not ray.is_initialized()
    if mine:
        join_cluster(address)
    try:
        yield
    finally:
        if mine:
            ray.shutdown()


def _run(job: Job, say: Say) -> EmbedResult:
    resources = ray.cluster_resources()
    actors = place_actors(job.predictor, job.settings.devices, resources)
    readers = 2 * int(resources.get("CPU", 1))
    where = "with a GPU each" if actors.gpus else "on CPUs"
    say(f"{job.predictor!r} on Ray, {actors.number} actors {where}")
    tables = Tables(job.folder, job.about())
    remove_unfinished(tables)
    chunks = Chunks(job, tables)
    parts = list(chunks.parts())
    began, stopped = time.perf_counter(), False
    with closing(tables), progress_bar("images", None) as advance, in_steps():
        meter = _Meter(advance, len(parts))
        for batch in _answers(job, _tasks(parts, readers), actors):
            batch["error"] = [error or None for error in batch["error"]]
            meter(tables.add(batch), batch)
            if take_press():
                stopped = True
                break
    return EmbedResult(
        folder=job.folder,
        images=tables.rows,
        unreadable=tables.unreadable,
        files=tables.files,
        skipped=chunks.skipped,
        seconds=time.perf_counter() - began,
        interrupted=stopped,
    )


def _answers(job: Job, tasks: list[dict[str, Any]], actors: Actors) -> Iterator[dict[str, Any]]:
    """The answers for all parts, in any order, while other parts wait to be looked into."""
    if not tasks:
        return
    ray.data.DataContext.get_current().enable_progress_bars = False  # we show our own
    size = job.settings.batch_size
    read: Any = _Read(job.known.loaded.information.spec, size)
    answers = (
        ray.data.from_items(tasks, override_num_blocks=len(tasks))
        .map_batches(read, batch_size=1)
        .map_batches(
            _Predict,
            fn_constructor_args=(job.predictor,),
            batch_size=size,
            compute=ray.data.ActorPoolStrategy(size=actors.number),
            num_gpus=actors.gpus,
            # Those with a GPU leave the cores to the tasks that read; the others read themselves.
            num_cpus=0 if actors.gpus else 1,
        )
    )
    batches: Any = answers.iter_batches(batch_size=None)
    yield from batches


class _Meter:
    """Shows images, images a second and the time left, as if all parts were equally large."""

    def __init__(self, advance: Advance, parts: int) -> None:
        self._advance, self._parts = advance, parts
        self._began, self._images = time.perf_counter(), 0
        self._rows: dict[int, int] = {}

    def __call__(self, count: int, batch: Mapping[str, Any]) -> None:
        self._images += count
        self._rows.update(zip(batch["part"].tolist(), batch["part_rows"].tolist(), strict=True))
        speed = self._images / max(time.perf_counter() - self._began, 1e-9)
        total = sum(self._rows.values()) * self._parts // len(self._rows)
        self._advance(f"{speed:,.0f} images/s", count=count, total=total)

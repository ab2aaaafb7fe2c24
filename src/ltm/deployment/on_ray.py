"""`ltm.embed` on Ray Data: images are read by tasks, the network runs in actors, Ray schedules.

This process finds the chunks and writes the files, so only it needs the output folder. If a worker
dies, Ray repeats its work.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import ray.data

from ltm.data.reading import ChunkReader, Preparation
from ltm.data.transforms import ImageSpec
from ltm.deployment.embedding import Chunks, EmbedResult, Job, stacked
from ltm.deployment.predictor import BatchPredictor
from ltm.deployment.tables import Tables
from ltm.interruption import in_steps, take_press
from ltm.models import Say
from ltm.progress import progress_bar


class _ReadChunks:
    """A chunk becomes as many rows as it has images."""

    def __init__(self, spec: ImageSpec) -> None:
        self._reader, self._spec = ChunkReader(Preparation(spec)), spec

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for chunk in batch["chunk"]:
            read = self._reader[pickle.loads(chunk)]  # noqa: S301 - made by `run_on_ray`
            columns = stacked(read, self._spec.size)
            columns["image"] = columns["image"].numpy()
            columns["error"] = np.array([error or "" for error in columns["error"]])
            yield {name: np.asarray(column) for name, column in columns.items()}


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
    settings, loaded = job.settings, job.predictor.loaded
    tables = Tables(job.folder, job.about())
    chunks = Chunks(job, tables)
    items = [{"chunk": pickle.dumps(chunk)} for chunk in chunks]
    mine = not ray.is_initialized()
    if mine:
        ray.init(address=settings.ray, log_to_driver=False, logging_level=logging.ERROR)
    began, stopped = time.perf_counter(), False
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0)) if loaded.device.type == "cuda" else 0
        actors = settings.devices or max(gpus, 1)
        say(f"{job.predictor!r} on Ray, {actors} actors")
        ray.data.DataContext.get_current().enable_progress_bars = False  # we show our own
        read: Any = _ReadChunks(loaded.information.spec)
        answers = (
            ray.data.from_items(items, override_num_blocks=max(len(items), 1))
            .map_batches(read, batch_size=1)
            .map_batches(
                _Predict,
                fn_constructor_args=(job.predictor,),
                batch_size=settings.batch_size,
                concurrency=actors,
                num_gpus=1 if gpus else 0,
            )
        )
        with progress_bar("images", chunks.images) as advance, in_steps():
            batch: Any
            for batch in answers.iter_batches(batch_size=None) if items else ():
                batch["error"] = [error or None for error in batch["error"]]
                new, took = tables.add(batch), time.perf_counter() - began
                advance(f"{tables.rows / took:,.0f} images/s", count=new)
                if take_press():
                    stopped = True
                    break
    finally:
        if mine:
            ray.shutdown()
    return EmbedResult(
        folder=job.folder,
        images=tables.rows,
        unreadable=tables.unreadable,
        files=tables.files,
        skipped=chunks.skipped,
        seconds=time.perf_counter() - began,
        interrupted=stopped,
    )

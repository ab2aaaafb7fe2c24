"""`ltm.embed`, and Parquet files of `ltm.predict`: any number of images through a network.

    inputs -> parts -> chunks -> ChunkReader -> BatchPredictor -> Tables
                       (data.sources) (loader processes) (the device)  (this process)

The same three classes run in this process, in several processes that torch's launcher starts (each
takes every n-th part), and on Ray Data (`on_ray`), which schedules them itself.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from ltm.data.reading import Chunk, Preparation, Readings, ahead, read_chunks
from ltm.data.sources import STDIN, ImageRef, Part, check_inputs, find_parts
from ltm.deployment.predictor import BatchPredictor
from ltm.deployment.settings import EmbedSettings, ManySettings
from ltm.deployment.tables import FOLDER, PATTERN, Tables
from ltm.extras import require
from ltm.files import METRICS, output_folder, write_metrics
from ltm.interruption import in_steps, take_press
from ltm.models import Network, Say, changed, silent
from ltm.processes import (
    ALONE,
    OtherProcessError,
    Process,
    failing_together,
    gather_objects,
    is_first,
    joined,
)
from ltm.progress import Advance, progress_bar

_LEFT_BY_A_KILL = f".{PATTERN}-*"


@dataclass(frozen=True, kw_only=True)
class EmbedResult:
    """What an `embed` has written."""

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
        """Speed of the whole run, without loading the network."""
        return self.images / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        earlier = f", {self.skipped} written before" if self.skipped else ""
        unread = f", {self.unreadable} unreadable" if self.unreadable else ""
        return (
            f"{self.images} images{unread} in {self.seconds:.1f} s, {self.images_per_second:.0f} "
            f"images/s: {self.files} files in {self.folder}{earlier}"
        )


def embed(
    model: Network,
    images: str | Path | Iterable[str | Path],
    output: str | Path,
    settings: EmbedSettings = EmbedSettings(),
    *,
    overwrite: bool = False,
    say: Say = silent,
    **changes: Any,
) -> EmbedResult:
    """Write the embeddings of images, and their likeliest classes, as Parquet files.

    Args:
        model: a network, a saved folder, a timm name, or a `ModelSource`.
        images: folders, .zip archives, tar shards, Parquet files, `hf:NAME`, lists of paths.
        output: folder for part-00000.parquet and so on, and metrics.json at the end.
        settings: what is written, how images are prepared, and who does the work.
        overwrite: replace the files of another run.
        say: called with each line of progress.
        changes: fields of the settings to change, such as `batch_size=256`.
    """
    settings = changed(settings, changes)
    outputs = ("embedding", "top5") if settings.top else ("embedding",)
    predictor = make_predictor(model, outputs, settings, top=settings.top or 1)
    return write_tables(predictor, images, output, settings, overwrite=overwrite, say=say)


def make_predictor(
    model: Network, outputs: Sequence[Any], settings: Any, *, top: int
) -> BatchPredictor:
    """The predictor that settings ask for."""
    return BatchPredictor(
        model,
        outputs,
        device=settings.device,
        dtype=settings.dtype,
        batch_size=settings.batch_size,
        compile=settings.compile,
        top=top,
        inputs=settings,
    )


def write_tables(
    predictor: BatchPredictor,
    images: str | Path | Iterable[str | Path],
    output: str | Path,
    settings: ManySettings,
    *,
    overwrite: bool = False,
    say: Say = silent,
) -> EmbedResult:
    """Write what a predictor says about images as Parquet files, part by part."""
    inputs = check_inputs(images)
    if STDIN in inputs and (settings.ray or settings.resume or (settings.devices or 1) > 1):
        raise ValueError(
            "inputs: standard input is read once, in one process; give a list of paths"
        )
    folder = Path(output)
    with output_folder(
        folder,
        overwrite=overwrite or settings.resume,
        other_ways="use --resume or --overwrite",
        written=(FOLDER,),
    ):
        # The machine of a Ray driver may have no GPU; it only needs to know the network.
        known = predictor if settings.ray is None else predictor.on("cpu")
        known.load(say)
        if is_first() and overwrite and not settings.resume:
            (folder / METRICS).unlink(missing_ok=True)
            _remove(folder / FOLDER, PATTERN)
        job = Job(predictor, known, inputs, folder, settings)
        result = _runner(settings)(job, say)
        if is_first() and not result.interrupted:
            if not result.images and not result.skipped:
                raise ValueError(f"there are no images in {', '.join(inputs[:3])}")
            counts = dataclasses.asdict(result)
            counts |= {"folder": None, "images_per_second": round(result.images_per_second, 1)}
            write_metrics(folder, {n: v for n, v in counts.items() if v is not None})
    return result


def remove_unfinished(tables: Tables) -> None:
    """Remove what a run that was killed left behind."""
    _remove(tables.folder, _LEFT_BY_A_KILL)


def _remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()


# --- What is to be done, in pieces that any process can do ---------------------------------------


@dataclass(frozen=True)
class Job:
    """All that a process needs to know; it can be sent to another process."""

    predictor: BatchPredictor
    """Does the work."""
    known: BatchPredictor
    """The same network, loaded in this process; a copy on the CPU if Ray does the work."""
    inputs: tuple[str, ...]
    folder: Path
    settings: Any

    def about(self) -> dict[str, Any]:
        """What files say about the run; every process says the same."""
        loaded = self.known.loaded
        return {
            "model": loaded.information.model,
            "weights": loaded.identity,
            "outputs": list(loaded.outputs),
            "top": self.known.top,
            "dtype": self.settings.dtype,
            "preprocessing": dataclasses.asdict(loaded.information.spec),
            "merging": loaded.information.token_merging,
        }

    def parts(self) -> Iterator[Part]:
        """The parts of the inputs, in order."""
        return find_parts(self.inputs, rows=self.settings.shard_rows, split=self.settings.split)


class Chunks:
    """The chunks that are not done yet, found when they are asked for."""

    def __init__(self, job: Job, tables: Tables, process: Process = ALONE) -> None:
        self._job, self._tables, self.process = job, tables, process
        self.skipped = self.seen = self.images = 0

    def __iter__(self) -> Iterator[Chunk]:
        for number, images in ahead((number, images_of(part)) for number, part in self.parts()):
            self.seen += 1
            self.images += len(images)
            yield from chunks_of(images, number, self._job.settings.batch_size)

    def parts(self) -> Iterator[tuple[int, Part]]:
        """The parts that are not done yet, by number; nobody has looked into them."""
        process = self.process
        mine = islice(enumerate(self._job.parts()), process.rank, None, process.world_size)
        for number, part in mine:
            if self._tables.has(number, part):
                self.skipped += 1
            else:
                yield number, part


def images_of(part: Part) -> tuple[ImageRef, ...]:
    """The images of a part, or an error in their place."""
    return tuple(part.images()) or (_nothing(part),)


def chunks_of(images: tuple[ImageRef, ...], part: int, size: int) -> Iterator[Chunk]:
    """The images of a part, so many at a time."""
    for first in range(0, len(images), size):
        yield Chunk(images[first : first + size], part, first, len(images))


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
        """Show that so many images are done. The total assumes that all parts are equally large."""
        self._images += count
        speed = self._images / max(time.perf_counter() - self._began, 1e-9)
        chunks, total = self._chunks, None
        if self._parts is not None and chunks.seen:
            left = (self._parts - chunks.skipped) // chunks.process.world_size
            total = max(chunks.images, chunks.images * left // chunks.seen)
        self._advance(f"{speed:,.0f} images/s", count=count, total=total)


# --- In this process ------------------------------------------------------------------------------


def run_here(job: Job, say: Say, process: Process = ALONE) -> EmbedResult:
    """Read, predict and write in this process; as one of several, every n-th part."""
    predictor = job.predictor
    with failing_together():  # nobody writes before the files are removed
        loaded = predictor.loaded
        say(f"{predictor!r} on {loaded.device}")
        tables = Tables(job.folder, job.about())
        if is_first():
            remove_unfinished(tables)
    chunks = Chunks(job, tables, process)
    batches = read_chunks(
        chunks,
        Preparation(loaded.information.spec),
        workers=job.settings.workers,
        threads=getattr(job.settings, "threads", 1),
        collate=partial(stacked, size=loaded.information.spec.size),
        pin_memory=loaded.device.type == "cuda",
    )
    began, stopped = time.perf_counter(), False
    bar = progress_bar("images", None, silent=not is_first())
    with failing_together(), closing(tables), bar as advance, in_steps():
        meter = Meter(advance, job, chunks)

        def until_pressed() -> Iterator[Any]:
            nonlocal stopped
            for batch in batches:
                yield batch
                if take_press():
                    stopped = True
                    return

        for answers in one_ahead(predictor, until_pressed()):
            meter(tables.add(answers))
    seconds = time.perf_counter() - began
    counts = [tables.rows, tables.unreadable, tables.files, chunks.skipped, stopped]
    rows, unreadable, files, skipped, interrupted = map(
        sum, zip(*gather_objects(counts), strict=True)
    )
    return EmbedResult(
        folder=job.folder,
        images=rows,
        unreadable=unreadable,
        files=files,
        skipped=skipped,
        seconds=seconds,
        interrupted=bool(interrupted),
    )


def one_ahead(
    predictor: BatchPredictor, batches: Iterable[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Answers in order. The device gets the next batch before the answers of one are read."""
    waiting = None
    for batch in batches:
        submitted = predictor.submit(batch)
        if waiting is not None:
            yield waiting.result()
        waiting = submitted
    if waiting is not None:
        yield waiting.result()


# --- Several processes ---------------------------------------------------------------------------


def _runner(settings: ManySettings) -> Callable[[Job, Say], EmbedResult]:
    if settings.ray is not None:
        return _run_on_ray
    return _run_joined if settings.devices in (None, 1) else _run_processes


def _run_joined(job: Job, say: Say) -> EmbedResult:
    """Run alone, or as one of the processes that torchrun has started."""
    with joined(torch.device("cpu")) as process:
        return run_here(job, say if is_first() else silent, process)


def _run_processes(job: Job, say: Say) -> EmbedResult:
    """Start processes by torch's launcher; if one dies, all restart after the finished parts.

    An error that would come again is told at once.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    say(f"{job.settings.devices} processes")
    job.predictor.unload()
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.settings.devices,
        run_id="ltm",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=3,
        monitor_interval=0.5,
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # Ctrl-C is ours
    )
    try:
        found = elastic_launch(launch, _run_one)(job)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        raise RuntimeError(f"a process failed repeatedly: {failure.message}") from error
    errors = [result for result in found.values() if isinstance(result, Exception)]
    for error in sorted(errors, key=lambda error: isinstance(error, OtherProcessError)):
        raise error
    return found[0]


def _run_one(job: Job) -> EmbedResult | Exception:
    try:
        return _run_joined(job, silent)
    except (ValueError, OSError) as error:
        return error


def _run_on_ray(job: Job, say: Say) -> EmbedResult:
    require("ray")
    from ltm.deployment.on_ray import run_on_ray  # noqa: PLC0415 - an optional extra

    return run_on_ray(job, say)

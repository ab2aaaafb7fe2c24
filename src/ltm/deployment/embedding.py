"""`ltm.embed`, and Parquet files of `ltm.predict`: any number of images through a network.

    inputs -> parts -> chunks -> ChunkReader -> BatchPredictor -> Tables
                       (data.sources) (loader processes) (the device)  (this process)

The same three run everywhere: in this process, in several that torch's launcher starts, each of
which takes every n-th part, and on Ray Data (`on_ray`), which schedules them by itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ltm.data.reading import Preparation, read_chunks
from ltm.data.sources import STDIN, check_inputs
from ltm.deployment.jobs import Chunks, EmbedResult, Job, Meter, stacked
from ltm.deployment.predictor import BatchPredictor
from ltm.deployment.settings import EmbedSettings, ManySettings
from ltm.deployment.tables import FOLDER, PATTERN, Tables
from ltm.extras import require
from ltm.files import output_folder, write_metrics
from ltm.interruption import in_steps, take_press
from ltm.models import Network, Say, changed, silent
from ltm.processes import ALONE, Process, gather_objects, is_first, joined
from ltm.progress import progress_bar

_LEFT_BY_A_KILL = f".{PATTERN}-*"


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
    predictor = make_predictor(model, outputs, settings, top=settings.top or 1, say=say)
    return write_tables(predictor, images, output, settings, overwrite=overwrite, say=say)


def make_predictor(
    model: Network, outputs: Sequence[Any], settings: Any, *, top: int, say: Say = silent
) -> BatchPredictor:
    """The predictor that settings ask for, its network loaded, so that errors come now."""
    predictor = BatchPredictor(
        model,
        outputs,
        device=settings.device,
        dtype=settings.dtype,
        batch_size=settings.batch_size,
        compile=settings.compile,
        top=top,
        inputs=settings,
    )
    predictor.load(say)
    return predictor


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
    inputs = tuple(str(name) for name in ([images] if isinstance(images, str | Path) else images))
    if not inputs:
        raise ValueError("inputs: give images, folders, archives, shards or lists of paths")
    check_inputs(inputs)
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
        if is_first() and overwrite and not settings.resume:
            _remove(folder / FOLDER, PATTERN)
        job = Job(predictor, inputs, folder, settings)
        result = _RUNNERS[_runner(settings)](job, say)
        if is_first() and not result.interrupted:
            if not result.images and not result.skipped:
                raise ValueError(f"there are no images in {', '.join(inputs[:3])}")
            counts = dataclasses.asdict(result)
            counts |= {"folder": None, "images_per_second": round(result.images_per_second, 1)}
            write_metrics(folder, {n: v for n, v in counts.items() if v is not None})
    return result


def _remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()


def run_here(job: Job, say: Say, process: Process = ALONE) -> EmbedResult:
    """Read, predict and write in this process; as one of several, every n-th part."""
    predictor = job.predictor
    loaded = predictor.loaded
    say(f"{predictor!r} on {loaded.device}")
    tables = Tables(job.folder, job.about())
    if process.speaks:
        _remove(tables.folder, _LEFT_BY_A_KILL)
    gather_objects(None)  # nobody writes before that
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
    silent = not process.speaks
    with progress_bar("images", None, silent=silent) as advance, in_steps():
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
    """Answers in order; the device has the next batch before one's answers are taken."""
    waiting = None
    for batch in batches:
        submitted = predictor.submit(batch)
        if waiting is not None:
            yield waiting.result()
        waiting = submitted
    if waiting is not None:
        yield waiting.result()


# --- Several processes ---------------------------------------------------------------------------


def _runner(settings: ManySettings) -> str:
    if settings.ray is not None:
        return "ray"
    return "here" if settings.devices in (None, 1) else "processes"


def _run_joined(job: Job, say: Say) -> EmbedResult:
    """Run alone, or as one of the processes that torchrun has started."""
    with joined(torch.device("cpu")) as process:
        return run_here(job, say if process.speaks else silent, process)


def _run_processes(job: Job, say: Say) -> EmbedResult:
    """Have torch's launcher start processes here; where one dies, all go on from finished parts."""
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
    )
    try:
        return elastic_launch(launch, _run_one)(job)[0]
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        raise RuntimeError(f"a process failed, again and again: {failure.message}") from error


def _run_one(job: Job) -> EmbedResult:
    return _run_joined(job, silent)


def _run_on_ray(job: Job, say: Say) -> EmbedResult:
    require("ray", extra="ray")
    from ltm.deployment.on_ray import run_on_ray  # noqa: PLC0415 - an optional extra

    return run_on_ray(job, say)


_RUNNERS = {"here": _run_joined, "processes": _run_processes, "ray": _run_on_ray}

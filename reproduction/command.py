"""The command `ltm table`: run the paper's tables and figures, go on later, write them."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ltm.core.validation import require_least
from ltm.files import output_folder

if TYPE_CHECKING:
    from reproduction.rows import Store
    from reproduction.running.context import Context
    from reproduction.running.queue import Summary
    from reproduction.scales.base import Scale
    from reproduction.tables.base import Experiment, Table

    Declared = list[tuple[Experiment, Table]]


def table(
    name: Annotated[str, tyro.conf.Positional],
    *,
    scale: Literal["paper", "small", "smoke"] = "smoke",
    data: str | None = None,
    imagenet: str | None = None,
    coco: str | None = None,
    weights: str | None = None,
    transfer: str | None = None,
    seeds: int | None = None,
    networks: tuple[str, ...] = (),
    output: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    devices: int = 1,
    processes: int = 1,
    workers: int = 0,
    minutes: float | None = None,
    draw_only: bool = False,
    draft: bool = False,
    readme: Path | None = None,
) -> None:
    """Run the experiment behind a table or figure of the paper, and write it.

    Every row is run once, whichever tables ask for it, and kept: a call goes on where an earlier
    one stopped, tries again what failed, and may share its output with other processes. The folder
    gets rows.jsonl (raw values, a row a line), work/ (networks and checkpoints, which can be made
    again), and a folder per table with table.csv, table.md and plots.

    Example:
        ltm table list
        ltm table all --scale smoke --output runs/smoke
        ltm table finetune --scale small --imagenet imagenet --data tiny-imagenet.zip
        ltm table all --scale small --imagenet imagenet --data tiny-imagenet.zip --processes 7
        ltm table scratch --scale paper --data /data/imagenet --devices 4 --workers 8
        ltm table beside --scale small --output results/paper --readme results/README.md

    Args:
        name: a table's name, all of them, list (what there is), or beside (the paper beside ours,
            from saved rows).
        scale: the paper's settings, small ones for one GPU, or a proof that all of it runs.
        data: ImageNet (paper) or Tiny-ImageNet (small): a folder or .zip with train and val.
        imagenet: ImageNet images at scale small, a few thousand will do: train and val.
        coco: COCO with annotations; by default generated scenes at scale small.
        weights: ViT-Ti's ImageNet weights at scale small; by default timm's own.
        transfer: images of other classes, to transfer to.
        seeds: how many seeds, if not as many as the scale has.
        networks: run rows of these networks alone, by the names in the tables; by default all.
        output: folder of rows and tables; by default runs/tables-SCALE.
        device: where networks run.
        devices: processes that train together, one per GPU.
        processes: rows that run side by side on one device; what is timed runs alone, afterwards.
        workers: loader processes.
        minutes: begin no further row after so many minutes; the same command goes on later.
        draw_only: write tables from the rows that are there, and run nothing.
        draft: run from files that differ from their commit, or beside rows of another one; scale
            smoke always may.
        readme: page to put the paper beside ours into (beside only).
    """
    from reproduction.tables import EXPERIMENTS, find_experiments

    if name == "list":
        for experiment in EXPERIMENTS.values():
            print(f"{experiment.name:<14}{experiment.item:<16}{experiment.title}")
        return
    experiments = find_experiments("all" if name == "beside" else name)
    _check_numbers(devices, processes, seeds, minutes)
    from reproduction.provenance import require_one_source
    from reproduction.rows import Store
    from reproduction.scales import check, make_scale, remembered
    from reproduction.scales.base import Sources

    output = output or Path("runs") / f"tables-{scale}"
    with output_folder(output, shared=True):
        store = Store(output)
        sources = Sources(
            data=data, imagenet=imagenet, coco=coco, weights=weights, transfer=transfer
        )
        runs = not (draw_only or name == "beside")
        if runs:
            check(scale, sources)
        sources = remembered(store, scale, sources, runs=runs)
        chosen = _with_seeds(make_scale(scale, sources), seeds)
        if runs and scale != "smoke" and not draft:
            require_one_source(store.sources(), output)
        declared = [(experiment, experiment.declare(chosen)) for experiment in experiments]
        if name == "beside":
            _write_beside(declared, store, scale, readme)
            return
        summary = None
        if not draw_only:
            deadline = math.inf if minutes is None else time.time() + 60 * minutes
            context = _context(store, device, devices=devices, workers=workers, deadline=deadline)
            from reproduction.running.parallel import run_side_by_side
            from reproduction.running.queue import run_jobs

            jobs = chosen.in_turn([job for _, made in declared for job in made.jobs()], networks)
            if processes == 1:
                summary = run_jobs(jobs, context)
            else:
                summary = run_side_by_side(jobs, context, processes)
        _write(declared, store, scale, summary)


def _check_numbers(devices: int, processes: int, seeds: int | None, minutes: float | None) -> None:
    for option, number in {"devices": devices, "processes": processes, "seeds": seeds}.items():
        require_least(option, number)
    if devices > 1 and processes > 1:
        raise ValueError("devices and processes: give one of them; a row takes all devices")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes is {minutes}, but must be positive")


def _with_seeds(scale: Scale, number: int | None) -> Scale:
    from dataclasses import replace

    if number is None:
        return scale
    return replace(scale, seeds=tuple(range(number)))


def _context(store: Store, device: str, *, devices: int, workers: int, deadline: float) -> Context:
    from rich.console import Console

    import reproduction.running  # noqa: F401 - registers how jobs are run
    from ltm.processes import local_device
    from reproduction.running.context import Context

    return Context(
        store=store,
        device=local_device(device),
        workers=workers,
        devices=devices,
        console=Console(highlight=False, markup=False, soft_wrap=True),
        deadline=deadline,
    )


def _write(declared: Declared, store: Store, scale: str, summary: Summary | None) -> None:
    """Write all tables, whatever came of the run; then say what came of it."""
    from ltm.files import write_text
    from reproduction.estimates import Reader
    from reproduction.table_files import write_table

    reader = Reader(store)
    for experiment, made in declared:
        if reader.has_any(made):
            print(write_table(experiment, made, reader, scale) / "table.md")
        else:
            print(f"{experiment.name}: no row has been run yet")
    if summary is None:
        return
    counts = {"ran": len(summary.ran), "already": len(summary.already)}
    metrics = {
        **counts,
        "left": summary.left,
        "failed": summary.failed,
        "interrupted": summary.interrupted,
    }
    write_text(store.output / "metrics.json", json.dumps(metrics, indent=2) + "\n")
    print(f"{counts['ran']} rows run, {counts['already']} there already", end="")
    print(f", {len(summary.failed)} failed" if summary.failed else "")
    if summary.left:
        print(f"out of time: {summary.left} rows are left; the same command goes on from there")
    if summary.interrupted:
        print("stopped: the tables hold what is done; the same command goes on from there")
        raise KeyboardInterrupt
    if summary.failed:
        raise SystemExit(1)


def _write_beside(declared: Declared, store: Store, scale: str, readme: Path | None) -> None:
    from ltm.files import write_text
    from reproduction.comparison import beside, write_section

    section = beside(declared, store, scale)
    page = store.output / "beside.md" if readme is None else readme
    if readme is None:
        write_text(page, section)
    else:
        write_section(page, section)
    print(page)

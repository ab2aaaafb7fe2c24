"""Measure trained networks: time in interleaved rounds, information bottleneck, merge weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from ltm.api import freeze_, is_merging
from ltm.evaluation.bottleneck import measure_bottleneck
from ltm.evaluation.latency import DTYPES, interleaved
from ltm.evaluation.modes import MODES, Runner, use_fast_paths_
from ltm.files import write_bytes
from ltm.report.pictures import (
    Scenes,
    figure_bytes,
    merging_blocks,
    prepare,
    target_tokens,
    weights_figure,
)
from ltm.report.tracing import trace
from ltm.training.network import spec_of
from reproduction.jobs import Bottleneck, Heatmap, Race
from reproduction.running.context import Context, perform
from reproduction.running.networks import (
    evaluation_images,
    held_out,
    local_settings,
    saved_network,
    some_images,
)
from reproduction.running.training import network_at

_PICTURE = "weights.png"


@perform.register
def race(job: Race, context: Context) -> dict[str, Any]:
    """Raw values: seconds per batch of every entrant, round by round; or why it did not run.

    Networks run as they would be deployed.
    """
    dtype = DTYPES[job.dtype]
    runners: dict[str, tuple[Runner, Any]] = {}
    errors: dict[str, str] = {}
    for name, entrant in job.entrants:
        model = saved_network(entrant, context)
        images = some_images(local_settings(entrant, context), model, job.batch_size)
        images = images.to(context.device, dtype)
        try:
            if is_merging(model):
                freeze_(model)
            use_fast_paths_(model)
            run = _runner(model.to(dtype), job.mode, images)
            run(images)
            runners[name] = run, getattr(run, "images", images)
        except (RuntimeError, ValueError) as error:
            errors[name] = " ".join(str(error).split())[:200]
    calls = {
        name: (lambda run=run, batch=batch: run(batch)) for name, (run, batch) in runners.items()
    }
    times = interleaved(calls, context.device, rounds=job.rounds) if calls else {}
    return {"batch_size": job.batch_size, "seconds": times, "errors": errors}


def _runner(model: nn.Module, mode: str, images: Any) -> Runner:
    return MODES[mode](model, images)


@perform.register
def bottleneck(job: Bottleneck, context: Context) -> dict[str, Any]:
    """Raw values: per block the two informations, whose difference is the loss, and the bound."""
    settings = local_settings(job.of, context)
    num_classes = evaluation_images(settings).num_classes
    if job.epoch is None:
        model = saved_network(job.of, context)
    else:
        run = context.work(job.of) / "run"
        model = network_at(settings, run, num_classes, job.epoch).to(context.device)
    size = spec_of(settings, model).size
    batches = held_out(settings, model, context)
    rows = measure_bottleneck({"it": model}, batches, num_classes, image_size=size)
    return {"blocks": [_plain(dataclasses.asdict(row)) for row in rows]}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "model"}


@perform.register
def heatmap(job: Heatmap, context: Context) -> dict[str, Any]:
    """Raw values: the weights of each image's target token, by network."""
    models = {name: saved_network(entrant, context) for name, entrant in job.entrants}
    first = job.entrants[-1][1]
    settings = local_settings(first, context)
    spec = spec_of(settings, models[job.entrants[-1][0]])
    images: Any = evaluation_images(settings)
    few = images.take(job.num_images)
    pictures, labels = zip(*(few[index] for index in range(len(few))), strict=True)
    scenes = prepare(pictures, [str(images.class_names[label]) for label in labels], spec)
    inputs = scenes.inputs.to(context.device)
    traces = {name: trace(model, inputs) for name, model in models.items()}
    block = merging_blocks(traces)[0]
    picture = figure_bytes(weights_figure(scenes, traces, block), dpi=120)
    write_bytes(context.work(job) / _PICTURE, picture)
    return {"block": block, "picture": _PICTURE, "weights": _weights(scenes, traces, block)}


def _weights(scenes: Scenes, traces: Any, block: int) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    for row in target_tokens(scenes, traces, block):
        found.setdefault(row["method"], []).append(row["target_weights"])
    return found

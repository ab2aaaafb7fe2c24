"""Draw merge weights as in the paper's figure, and keep the weights that were drawn."""

from __future__ import annotations

from typing import Any

from ltm.report.groups import merging_blocks
from ltm.report.heatmaps import default_targets, maps_at, rescale, weights_figure
from ltm.report.pictures import Scenes, figure_bytes, prepare
from ltm.report.tracing import trace
from ltm.training.models import spec_of
from reproduction.jobs import Heatmap
from reproduction.place import Place, perform
from reproduction.store import write_bytes
from reproduction.work.networks import evaluation_images, placed, saved_network

PICTURE = "weights.png"


@perform.register
def heatmap(job: Heatmap, place: Place) -> dict[str, Any]:
    """Raw values: the weights of each image's target token, by network."""
    models = {name: saved_network(entrant, place) for name, entrant in job.entrants}
    first = job.entrants[-1][1]
    settings = placed(first, place)
    spec = spec_of(settings, models[job.entrants[-1][0]])
    images: Any = evaluation_images(settings)
    few = images.take(job.num_images)
    pictures, labels = zip(*(few[index] for index in range(len(few))), strict=True)
    scenes = prepare(pictures, [str(images.class_names[label]) for label in labels], spec)
    inputs = scenes.inputs.to(place.device)
    traces = {name: trace(model, inputs) for name, model in models.items()}
    block = merging_blocks(traces)[0]
    picture = figure_bytes(weights_figure(scenes, traces, block), dpi=120)
    write_bytes(place.store.row_folder(job) / PICTURE, picture)
    return {"block": block, "picture": PICTURE, "weights": _weights(scenes, traces, block)}


def _weights(scenes: Scenes, traces: Any, block: int) -> dict[str, list[list[float]]]:
    maps = maps_at(traces, block, len(scenes))
    reference = list(maps.values())[-1]
    found: dict[str, list[list[float]]] = {name: [] for name in maps}
    for index, target in enumerate(default_targets(scenes, reference)):
        for name, site in maps.items():
            weights = site.of_target(index, rescale(target, reference.grid, site.grid))
            found[name].append(sorted(weights[weights > 0].tolist(), reverse=True))
    return found

"""Measure the information bottleneck of a network on its held-out images."""

from __future__ import annotations

import dataclasses
from typing import Any

from ltm.evaluation.bottleneck import measure_bottleneck
from ltm.training.models import spec_of
from reproduction.jobs import Bottleneck
from reproduction.place import Place, perform
from reproduction.work.classify import network_at
from reproduction.work.networks import (
    evaluation_images,
    held_out,
    placed,
    saved_network,
)


@perform.register
def bottleneck(job: Bottleneck, place: Place) -> dict[str, Any]:
    """Raw values: per block the two informations, whose difference is the loss, and the bound."""
    settings = placed(job.of, place)
    num_classes = evaluation_images(settings).num_classes
    if job.epoch is None:
        model = saved_network(job.of, place)
    else:
        run = place.work(job.of) / "run"
        model = network_at(settings, run, num_classes, job.epoch).to(place.device)
    size = spec_of(settings, model).size
    batches = held_out(settings, model, place)
    rows = measure_bottleneck({"it": model}, batches, num_classes, image_size=size)
    return {"blocks": [_plain(dataclasses.asdict(row)) for row in rows]}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "model"}

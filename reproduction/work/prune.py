"""Prune a classifier by a peer's rules, train it on, and see how right it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ltm.data.loading import training_loader
from ltm.evaluation.cost import num_parameters
from ltm.training.models import spec_of
from ltm.training.run import train
from reproduction.jobs import Pruned
from reproduction.place import Place, perform
from reproduction.pruning import PEERS
from reproduction.work.classify import accuracy_values, history, last_weights_
from reproduction.work.networks import fresh_network, macs_of, placed, splits_of


@perform.register
def prune(job: Pruned, place: Place) -> dict[str, Any]:
    """Raw values of a pruned classifier: as of any other, and its MACs before.

    Pruning needs the network in this process, so it trains on one device.
    """
    settings = placed(job, place)
    settings = replace(settings, run=replace(settings.run, devices=1))
    splits = splits_of(settings)
    model = fresh_network(settings, splits.train.num_classes).to(place.device)
    spec = spec_of(settings, model)
    before = macs_of(model, spec.size)
    batches = training_loader(
        splits.train,
        spec,
        settings.data,
        settings.augment,
        seed=settings.run.seed,
        device=place.device,
    )
    torch.manual_seed(settings.run.seed)
    PEERS[job.peer](
        model,
        batches,
        job.share,
        image_size=spec.size,
        steps=job.steps,
        lr=settings.optim.lr / 10,
    )
    after = macs_of(model, spec.size)
    run = place.work(job) / "run"
    train(settings, run, overwrite=True, model=model, splits=splits, console=place.console)
    model = last_weights_(model, run).to(place.device).eval()
    return {
        "seed": settings.run.seed,
        "history": history(run),
        "parameters": num_parameters(model),
        "macs": after,
        "macs_before": before,
        **accuracy_values(model, settings, place),
    }

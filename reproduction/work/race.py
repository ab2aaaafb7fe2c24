"""Time networks in interleaved rounds, and keep every round."""

from __future__ import annotations

from typing import Any

from torch import nn

from ltm.api import freeze_, is_merging
from ltm.evaluation.latency import DTYPES
from ltm.evaluation.runners import MODES, Runner, at_its_best_
from ltm.evaluation.timing import interleaved
from reproduction.jobs import Race
from reproduction.place import Place, perform
from reproduction.work.networks import placed, saved_network, some_images


@perform.register
def race(job: Race, place: Place) -> dict[str, Any]:
    """Raw values: seconds per batch of every entrant, round by round; or why it did not run.

    Networks run as they would be deployed.
    """
    dtype = DTYPES[job.dtype]
    runners: dict[str, tuple[Runner, Any]] = {}
    errors: dict[str, str] = {}
    for name, entrant in job.entrants:
        model = saved_network(entrant, place)
        images = some_images(placed(entrant, place), model, job.batch_size)
        images = images.to(place.device, dtype)
        try:
            if is_merging(model):
                freeze_(model)
            at_its_best_(model)
            run = _runner(model.to(dtype), job.mode, images)
            run(images)
            runners[name] = run, getattr(run, "images", images)
        except (RuntimeError, ValueError) as error:
            errors[name] = " ".join(str(error).split())[:200]
    calls = {
        name: (lambda run=run, batch=batch: run(batch)) for name, (run, batch) in runners.items()
    }
    times = interleaved(calls, place.device, rounds=job.rounds) if calls else {}
    return {"batch_size": job.batch_size, "seconds": times, "errors": errors}


def _runner(model: nn.Module, mode: str, images: Any) -> Runner:
    return MODES[mode](model, images)

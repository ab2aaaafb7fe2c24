"""Train a detector and keep its average precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ltm.detection.run import train_detector
from reproduction.jobs import Detector
from reproduction.place import Place, perform


@perform.register
def detect(job: Detector, place: Place) -> dict[str, Any]:
    """Raw values: COCO's scores, cost, and seconds per epoch.

    Scores are those of the last epoch, the only one that is evaluated: none is chosen by them.
    """
    kind: Any = place.device.type
    settings = replace(
        job.settings,
        data=replace(job.settings.data, workers=place.workers),
        run=replace(job.settings.run, device=kind, devices=place.devices),
        eval_every=job.settings.optim.epochs,
    )
    folder = place.work(job) / "run"
    found = train_detector(settings, folder, resume="auto", console=place.console)
    names = ("box", "mask", "num_images", "num_detections", "parameters", "backbone_mac_share")
    return {
        "seed": settings.run.seed,
        **{name: found.metrics[name] for name in names},
        "macs": round(1e9 * found.metrics["gmacs"]),
        "seconds_per_epoch": found.metrics["seconds_per_epoch"],
    }

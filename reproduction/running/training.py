"""Train or convert classifiers, prune them, train detectors; keep networks and raw values."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ltm.api import conversion_of, is_merging
from ltm.core.cost import num_parameters
from ltm.data.loading import training_loader
from ltm.detection.task import train_detector
from ltm.evaluation.accuracy import evaluate
from ltm.files import write_text
from ltm.interruption import INTERRUPTED
from ltm.training.checkpoint import Checkpoint, Checkpoints
from ltm.training.network import build, count_parameters, spec_of
from ltm.training.run import train
from ltm.training.settings import TrainSettings, to_yaml
from ltm.training.trainable import choose_trainable_, without_lora
from reproduction.jobs import Classifier, Detector, Pruned
from reproduction.pruning import PEERS
from reproduction.running.context import Context, perform
from reproduction.running.networks import (
    evaluation_images,
    fresh_network,
    held_out,
    keep_network,
    local_settings,
    macs_of,
    splits_of,
)

_EPOCH = ("epoch", "merging", "train_loss", "val_loss", "val_top1", "train_seconds", "ib_loss")
"""What is kept of every epoch."""


@perform.register
def classify(job: Classifier, context: Context) -> dict[str, Any]:
    """Raw values of a classifier: cost, training by epoch, and every held-out image."""
    settings = local_settings(job, context)
    num_classes = evaluation_images(settings).num_classes
    values: dict[str, Any] = {"seed": settings.run.seed, "history": []}
    if job.trains:
        run = context.work(job) / "run"
        kept = train_there(settings, run, context)
        model, trained = last_network(settings, run, num_classes, kept)
        values |= {"history": history(run), "trained_parameters": trained}
        values |= _measured_share(run, settings)
    else:
        model = fresh_network(settings, num_classes).eval()
    keep_network(model, context.store.network_folder(job))
    model = model.to(context.device)
    return values | _cost_values(model, settings) | _accuracy_values(model, settings, context)


def _cost_values(model: nn.Module, settings: TrainSettings) -> dict[str, Any]:
    """Parameters, multiply-adds, also before merging; the blocks that merge, tokens after each."""
    before, sites = None, []
    if is_merging(model):
        conversion = conversion_of(model)
        before = conversion.macs_before
        sites = [(site.block, site.num_out) for site in conversion.sites if site.merges]
    return {
        "sites": sites,
        "parameters": num_parameters(model),
        "macs": macs_of(model, spec_of(settings, model).size),
        "macs_before": before,
    }


def _accuracy_values(model: nn.Module, settings: TrainSettings, context: Context) -> dict[str, Any]:
    """What a network said about the held-out images, image by image."""
    half = torch.bfloat16 if settings.run.precision == "bf16" else None
    outputs = evaluate(
        {"it": model},
        held_out(settings, model, context),
        autocast=half if context.device.type == "cuda" else None,
    )["it"]
    return {
        "num_images": len(outputs.correct),
        "correct": int(outputs.correct.sum()),
        "correct_bits": pack_bits(outputs.correct),
        "loss": float(outputs.loss.double().mean()),
    }


def pack_bits(flags: Tensor) -> str:
    """One bit per image, in order, as hexadecimal digits."""
    digits = "".join("1" if flag else "0" for flag in flags.tolist())
    width = -(-len(digits) // 4)
    return f"{int(digits.ljust(4 * width, '0'), 2):0{width}x}"


def train_there(settings: TrainSettings, folder: Path, context: Context) -> nn.Module | None:
    """Train in a folder, going on where an interrupted run stopped.

    Returns the network that the run kept. Several devices train in processes of their own, by
    `ltm train`, and leave no network here.
    """
    if context.devices == 1:
        images = splits_of(settings)
        say = context.console.print
        return train(data=images, settings=settings, output=folder, resume="auto", say=say).model
    config = folder.with_suffix(".yaml")
    write_text(config, to_yaml(settings))
    command = [sys.executable, "-m", "ltm", "train", "--config", str(config)]
    command += ["--output", str(folder), "--resume", "auto"]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)  # noqa: S603
    if done.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise RuntimeError(f"training in {context.devices} processes failed: {lines[-1]}")
    return None


def last_network(
    settings: TrainSettings, run: Path, num_classes: int, kept: nn.Module | None
) -> tuple[nn.Module, int]:
    """The network after the last epoch, and how many parameters trained.

    The epoch is never chosen on the images that are reported on. LTMP's thresholds are set after
    its last epoch; what its run kept is that one. Adapters are folded into what a run keeps, so
    that network is made anew.
    """
    if kept is not None and not settings.tune.lora_rank:
        last = kept if settings.merge.method == "ltmp" else _last_weights_(kept, run)
        return last.eval(), count_parameters(kept)[0]
    torch.manual_seed(settings.run.seed)
    built = build(settings, num_classes)
    choose_trainable_(built.model, settings.tune, built.new_head)
    trained = count_parameters(built.model)[0]
    if settings.merge.method == "ltmp":
        saved = replace(settings, model=replace(settings.model, weights=str(run / "model")))
        return build(saved, num_classes).model.eval(), trained
    return without_lora(_last_weights_(built.model, run)).eval(), trained


def _last_weights_(model: nn.Module, run: Path) -> nn.Module:
    """Give a network the weights of the last epoch of its run."""
    last = Checkpoints(run / "checkpoints").latest()
    assert last is not None, "training leaves a checkpoint"
    return _at(model, last)


def network_at(settings: TrainSettings, run: Path, num_classes: int, epoch: int) -> nn.Module:
    """The network after some epoch of its training whose checkpoint was kept."""
    folder = run / "checkpoints" / f"epoch-{epoch:04d}"
    if not folder.is_dir():
        raise FileNotFoundError(f"the checkpoint of epoch {epoch} was not kept")
    found = Checkpoint(folder=folder, epoch=epoch, score=None, history=[])
    return _at(build(settings, num_classes).model, found).eval()


def _at(model: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    model.load_state_dict(checkpoint.weights("ema" if checkpoint.has("ema") else "weights"))
    return model


def history(run: Path) -> list[dict[str, Any]]:
    """The epochs of a run."""
    last = Checkpoints(run / "checkpoints").latest()
    assert last is not None
    return [{name: row[name] for name in _EPOCH} for row in last.history]


def _measured_share(run: Path, settings: TrainSettings) -> dict[str, Any]:
    """LTMP's share of the MACs: a mean over held-out images, since tokens differ per image."""
    if settings.merge.method != "ltmp":
        return {}
    return {"mac_share": json.loads((run / "metrics.json").read_text())["mac_share"]}


@perform.register
def detect(job: Detector, context: Context) -> dict[str, Any]:
    """Raw values: COCO's scores, cost, and seconds per epoch.

    Scores are those of the last epoch, the only one that is evaluated: none is chosen by them.
    """
    kind: Any = context.device.type
    settings = replace(
        job.settings,
        data=replace(job.settings.data, workers=context.workers),
        run=replace(job.settings.run, device=kind, devices=context.devices),
        eval_every=job.settings.optim.epochs,
    )
    folder = context.work(job) / "run"
    found = train_detector(settings, output=folder, resume="auto", say=context.console.print)
    names = ("box", "mask", "num_images", "num_detections", "parameters", "backbone_mac_share")
    return {
        "seed": settings.run.seed,
        **{name: found.metrics[name] for name in names},
        "macs": round(1e9 * found.metrics["gmacs"]),
        "seconds_per_epoch": found.metrics["seconds_per_epoch"],
    }


@perform.register
def prune(job: Pruned, context: Context) -> dict[str, Any]:
    """Raw values of a pruned classifier: as of any other, and its MACs before.

    Pruning needs the network in this process, so it trains on one device.
    """
    settings = local_settings(job, context)
    settings = replace(settings, run=replace(settings.run, devices=1))
    splits = splits_of(settings)
    model = fresh_network(settings, splits.train.num_classes).to(context.device)
    spec = spec_of(settings, model)
    before = macs_of(model, spec.size)
    batches = training_loader(
        splits.train,
        spec,
        settings.data,
        settings.augment,
        seed=settings.run.seed,
        device=context.device,
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
    run = context.work(job) / "run"
    train(model, splits, settings, output=run, overwrite=True, say=context.console.print)
    model = _last_weights_(model, run).to(context.device).eval()
    return {
        "seed": settings.run.seed,
        "history": history(run),
        "parameters": num_parameters(model),
        "macs": after,
        "macs_before": before,
        **_accuracy_values(model, settings, context),
    }

"""Tuning for a time: distillation of a converted network, on unlabelled images."""

from __future__ import annotations

import copy
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ltm.api import conversion_of
from ltm.data.datasets import Splits
from ltm.data.images import ImageDataset
from ltm.data.loading import training_loader
from ltm.models import Say, silent
from ltm.training.distillation import Distillation, set_aside
from ltm.training.network import spec_of
from ltm.training.objective import Objective
from ltm.training.recipes import FINETUNE, distilling
from ltm.training.run import TrainResult, run_task
from ltm.training.settings import Length, TrainSettings, with_options
from ltm.training.trainable import choose_trainable_, train_mode_

_EPOCHS = 10
"""A time is divided into so many epochs; each ends with an evaluation."""
_TIMED = 4
"""Batches that are timed, after a first one that is not."""


def tune_(
    model: nn.Module,
    images: ImageDataset,
    length: Length | str,
    *,
    trainable: str = "norms",
    output: str | Path | None = None,
    say: Say = silent,
    **changes: Any,
) -> TrainResult:
    """Train a converted network towards its own outputs without merging.

    It is `ltm.finetune` with the recipe `distil_<trainable>`: images need no labels, and one in
    five is set aside to decide. If training brings the outputs on those no closer to the
    original's, the untrained network is the result. The network is trained in place; with LoRA the
    result's `model` is a copy of it. The result's `metrics` say what was done.

    Args:
        model: a network that merges tokens.
        images: images to tune on.
        length: a time or epochs, such as "60s", "5m" or "3 epochs".
        trainable: what trains: mergers, norms, biases, lora or all.
        output: folder of the run; without one, nothing is written.
        say: called with each line of progress.
        changes: changes of the settings, as `ltm.finetune` takes them.
    """
    length = Length.read(length) if isinstance(length, str) else length
    config, data = conversion_of(model).config, set_aside(images)
    settings = with_options(
        FINETUNE[distilling(trainable)], {"method": config.name, "ratio": config.ratio, **changes}
    )
    train = data.train
    if length.epochs is not None:
        settings = with_options(settings, {"epochs": length.epochs})
    else:
        number = _images_in(length.seconds or 0.0, model, train, settings)
        each = max(settings.data.batch_size, number // _EPOCHS)
        if each < len(train):
            settings = with_options(settings, {"epoch_images": each})
        else:  # an epoch shows every image several times
            train = train.select(list(range(len(train))) * (each // len(train)))
        settings = with_options(settings, {"epochs": _EPOCHS})
    task = Distillation(settings, model=model, splits=Splits(train, data.val))
    result = run_task(task, output, overwrite=True, say=say)
    metrics = {**result.metrics, "num_images": len(data.train), "length": str(length)}
    return dataclasses.replace(result, metrics=metrics)


def _images_in(
    seconds: float, model: nn.Module, images: ImageDataset, settings: TrainSettings
) -> int:
    """How many images can be trained on in a time: a copy of the network is timed."""
    device = next(model.parameters()).device
    network = copy.deepcopy(model)
    choose_trainable_(network, settings.tune)
    objective = Objective(network, settings.objective)
    train_mode_(network)
    size = settings.data.batch_size
    wanted = (_TIMED + 1) * size
    few = images.select([place % len(images) for place in range(wanted)])
    spec = spec_of(settings, network)
    batches = training_loader(few, spec, settings.data, settings.augment, device=device)
    start, number = time.perf_counter(), 0
    for place, (pixels, labels) in enumerate(batches):
        objective(network, pixels, labels).total.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if place == 0:  # it starts the loader's processes and allocates memory
            start = time.perf_counter()
        else:
            number += len(pixels)
    each = (time.perf_counter() - start) / max(number, 1)
    return max(size, round(seconds / max(each, 1e-6)))

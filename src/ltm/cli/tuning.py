"""Fine-tuning within another command: mask modules train, everything else stays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from ltm.data.images import ImageDataset
    from ltm.evaluation.images import Partition


def require_training_images(parts: Partition, data: str) -> ImageDataset:
    """The images on which the best epoch is chosen; a ValueError where nothing can train."""
    if parts.calibration is None:
        raise ValueError(
            f"finetune_epochs: the best epoch is chosen on calibration images, but {parts.reason}"
        )
    if parts.calibration.split == "all":
        raise ValueError(
            f"finetune_epochs: {data} has no training split; give a folder that holds train and val"
        )
    return parts.calibration


def tune_mergers_(
    model: nn.Module,
    data: str,
    held_out: ImageDataset,
    *,
    epochs: int,
    batch_size: int,
    workers: int,
    seed: int,
    folder: Path,
) -> None:
    """Train the mask modules of a converted model on the training split of `data`.

    The best epoch is chosen on `held_out`, which is not what is evaluated afterwards.
    """
    from ltm.api import conversion_of
    from ltm.cli.commands import say
    from ltm.data.config import AugmentConfig
    from ltm.data.datasets import Splits, open_dataset
    from ltm.training.run import train
    from ltm.training.settings import (
        MergeSettings,
        OptimSettings,
        RunSettings,
        TrainingData,
        TrainSettings,
        TuneSettings,
    )

    config = conversion_of(model).config
    method: Any = config.name
    device = str(next(model.parameters()).device)
    settings = TrainSettings(
        merge=MergeSettings(method=method, ratio=config.ratio),
        data=TrainingData(source=data, batch_size=batch_size, workers=workers),
        augment=AugmentConfig.light(),
        optim=OptimSettings(epochs=epochs, lr=5e-3, weight_decay=0.0, min_lr=1e-4),
        tune=TuneSettings(trainable="mergers"),
        run=RunSettings(seed=seed, device=device),
    )
    splits = Splits(train=open_dataset(data, split="train"), val=held_out)
    try:
        train(model, splits, settings, output=folder, overwrite=True, say=say)
    except SystemExit:
        raise KeyboardInterrupt from None  # It was stopped there, so it is stopped here.

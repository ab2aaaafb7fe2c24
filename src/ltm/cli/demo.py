"""`ltm demo`: what `make demo` runs. The main job from nothing, without a download."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltm.cli.commands import command_line, say
from ltm.compression.settings import CompressSettings
from ltm.files import check_folder
from ltm.models import method_config

if TYPE_CHECKING:
    from torch import nn

NETWORK = "vit_tiny_patch16_224"
NETWORK_ARGS = {
    "img_size": 64,
    "patch_size": 8,
    "embed_dim": 96,
    "depth": 6,
    "num_heads": 3,
    "num_classes": 10,
}
"""A ViT that is small enough to learn within a minute."""


def demo(
    *,
    ratio: float = 0.5,
    epochs: int = 4,
    train_images: int = 4000,
    images: int = 1000,
    time: bool = True,
    seed: int = 0,
    output: Path = Path("runs/demo"),
    overwrite: bool = False,
) -> None:
    """Train a small network on generated images, and compress it with every method.

    Needs no download: images of textured shapes are painted on the spot, a small vision
    transformer learns to name them (a minute or two; kept in the folder for the next time), and
    LTM, ToMe, ToFu and LTMP merge its tokens down to the same share of its multiply-adds.

    Example:
        ltm demo --ratio 0.6 --output runs/demo

    Args:
        ratio: share of the multiply-adds that may remain.
        epochs: passes over the training images.
        train_images: how many training images to paint.
        images: how many images to evaluate on.
        time: measure latency.
        seed: of the images, the network and the training.
        output: folder for the network, the compressed model and the report.
        overwrite: replace the results of something else there.
    """
    for name, value in (("epochs", epochs), ("train_images", train_images), ("images", images)):
        if value < 1:
            raise ValueError(f"{name} is {value}: at least 1 is needed")
    # Threads that wait by spinning make a small network several times slower on a busy machine;
    # torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from ltm.compression.compress import compress
    from ltm.methods import DEFAULT, methods

    method_config(DEFAULT, ratio)
    check_folder(output, overwrite=overwrite or _is_own(output))
    data = f"shapes:classes=10,size=64,images={train_images},val_images={images},seed={seed}"
    result = compress(
        trained_network(data, epochs, seed, output / "network"),
        data,
        CompressSettings(
            method=DEFAULT,
            ratio=ratio,
            compare=tuple(name for name in methods() if name != DEFAULT),
            calibration_images=128,
            calibration_trials=60,
            time=time,
            time_batches=(1, 32),
            workers=0,
            device="cpu",
            seed=seed,
        ),
        folder=output,
        name="A ViT of 6 blocks",
        weights=f"trained here, {epochs} epochs on {train_images} generated images",
        command=_command(locals()),
        say=say,
    )
    result.save(output)
    print(result)
    say(f"Report: {output / 'report.html'}")


def _command(values: Mapping[str, Any]) -> str:
    """The call that repeats a run."""
    parameters = inspect.signature(demo).parameters.items()
    given = {name: values[name] for name, p in parameters if values[name] != p.default}
    given.pop("overwrite", None)
    return command_line("demo", **given)


def trained_network(data: str, epochs: int, seed: int, folder: Path) -> nn.Module:
    """The demo's network: trained now, or by an earlier run with the same settings."""
    from ltm.data.config import AugmentConfig
    from ltm.models import ModelSource
    from ltm.training.run import train
    from ltm.training.settings import (
        MergeSettings,
        ModelSettings,
        OptimSettings,
        RunSettings,
        TrainingData,
        TrainSettings,
        to_yaml,
    )

    words = tuple(f"{name}={value}" for name, value in NETWORK_ARGS.items())
    settings = TrainSettings(
        model=ModelSettings(name=NETWORK, model_args=words),
        merge=MergeSettings(method="none"),
        data=TrainingData(source=data, batch_size=64, workers=0),
        augment=AugmentConfig.none(),
        optim=OptimSettings(epochs=epochs, optimizer="muon", lr=5e-3, lr_warmup_epochs=0.5, clip=1),
        run=RunSettings(seed=seed, device="cpu"),
    )
    weights, known = folder / "model" / "model.safetensors", folder / "config.yaml"
    if weights.is_file() and known.is_file() and known.read_text("utf-8") == to_yaml(settings):
        say(f"Taking the network of an earlier run from {folder}")
        return ModelSource(model=NETWORK, weights=weights, model_args=words).load()
    say("Training a small vision transformer on generated images; it is kept for the next time")
    return train(settings=settings, output=folder, overwrite=True, say=say).model


def _is_own(output: Path) -> bool:
    """Whether a folder holds the results of an earlier demo."""
    try:
        known = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
        return str(known["command"]).startswith("ltm demo")
    except (OSError, ValueError, KeyError, TypeError):
        return False

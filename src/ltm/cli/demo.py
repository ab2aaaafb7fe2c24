"""`ltm demo`: what `make demo` runs. The main job from nothing, without a download."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ltm.cli.commands import Flat, command_line, interrupted, say
from ltm.compression.settings import CompressSettings
from ltm.files import output_folder
from ltm.models import method_config

if TYPE_CHECKING:
    from torch import nn

    from ltm.compression.compress import CompressResult

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


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """How large the demo is, and where it goes to."""

    ratio: float = 0.5
    """Share of the multiply-adds that may remain."""
    epochs: int = 4
    """Passes over the training images."""
    train_images: int = 4000
    """How many training images to paint."""
    images: int = 1000
    """How many images to evaluate on."""
    time: bool = True
    """Measure latency."""
    seed: int = 0
    """Of the images, the network and the training."""
    output: Path = Path("runs/demo")
    """Folder for the network, the compressed model and the report."""


def demo(settings: Flat[DemoSettings], *, overwrite: bool = False) -> None:
    """Train a small network on generated images, and compress it with every method.

    Needs no download: images of textured shapes are painted on the spot, a small vision
    transformer learns to name them (a minute or two; kept in the folder for the next time), and
    LTM, ToMe, ToFu and LTMP merge its tokens down to the same share of its multiply-adds.

    Example:
        ltm demo --ratio 0.6 --output runs/demo

    Args:
        settings: how large it is, and where it goes to.
        overwrite: replace the results of something else there.
    """
    for name in ("epochs", "train_images", "images"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} is {getattr(settings, name)}: at least 1 is needed")
    # Threads that wait by spinning make a small network several times slower on a busy machine;
    # torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from ltm.methods import DEFAULT

    method_config(DEFAULT, settings.ratio)
    output = settings.output
    with output_folder(output, overwrite=overwrite or _is_own(output)):
        result = _compressed(settings)
        result.save(output)
    print(result)
    say(f"Report: {output / 'report.html'}")
    if result.interrupted:
        interrupted(f"Stopped during {result.interrupted}; {output} holds what was done.")


def _compressed(settings: DemoSettings) -> CompressResult:
    """Train the network, or take that of an earlier run, and compress it with every method."""
    from ltm.compression.compress import compress
    from ltm.methods import DEFAULT, methods

    output, epochs, seed = settings.output, settings.epochs, settings.seed
    data = f"shapes:classes=10,size=64,images={settings.train_images}"
    data += f",val_images={settings.images},seed={seed}"
    return compress(
        _trained_network(data, epochs, seed, output / "network"),
        data,
        CompressSettings(
            method=DEFAULT,
            ratio=settings.ratio,
            compare=tuple(name for name in methods() if name != DEFAULT),
            calibration_images=128,
            calibration_trials=60,
            time=settings.time,
            time_batches=(1, 32),
            workers=0,
            device="cpu",
            seed=seed,
        ),
        folder=output,
        name="A ViT of 6 blocks",
        weights=f"trained here, {epochs} epochs on {settings.train_images} generated images",
        command=command_line("demo", settings),
        say=say,
    )


def _trained_network(data: str, epochs: int, seed: int, folder: Path) -> nn.Module:
    """The demo's network: trained now, or by an earlier run with the same settings."""
    from ltm.models import ModelSource
    from ltm.training.recipes import small_network
    from ltm.training.run import train
    from ltm.training.settings import to_yaml

    words = tuple(f"{name}={value}" for name, value in NETWORK_ARGS.items())
    settings = small_network(NETWORK, words, data, epochs=epochs, seed=seed)
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

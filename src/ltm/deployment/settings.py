"""Settings of `ltm.export` and `ltm.predict`. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ltm.core.validation import require_least

Format = Literal["onnx", "program", "openvino"]
Recipe = Literal["accurate", "small", "dynamic", "convolutional"]
LineFormat = Literal["jsonl", "csv"]

TOLERANCE = 1e-3
BATCH_SIZES = (1, 3, 16)


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """What may be said about a network's images and classes."""

    class_names: Path | None = None
    """Text file with one class name per line, or JSON; by default the names that the model has."""
    crop_ratio: float | None = None
    """Evaluation crop as a share of the resized side; by default the model's."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings(InputSettings):
    """What to write, and which images to check it on."""

    method: str | None = None
    """Convert the network first, with a method such as ltm, tome or ltm:support=learned."""
    ratio: float | None = None
    """Share of the multiply-adds to keep with --method; by default 0.7."""
    formats: tuple[Format, ...] = ("onnx",)
    """What to write."""
    int8: tuple[Recipe, ...] = ()
    """Int8 versions to add: accurate, small (all linear layers), dynamic (no calibration images
    needed) or convolutional."""
    data: str | None = None
    """Images to check and calibrate on: a folder or .zip of images, in class folders or not, tar
    shards, hf:NAME, or shapes (generated). By default generated images."""
    split: str = "val"
    """Split of the data, where it has several."""
    images: int | None = None
    """Images to measure the accuracy of int8 files on; by default all."""
    calibration_images: int = 128
    """Images that set the ranges of int8 files. They are not evaluated."""
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    """Batch sizes at which files are compared with the network."""
    tolerance: float = TOLERANCE
    """Largest relative difference allowed."""
    workers: int = 0
    """Loader processes."""

    def __post_init__(self) -> None:
        for name in ("formats", "batch_sizes"):
            if not getattr(self, name):
                raise ValueError(f"{name}: there is none; give at least one")
        require_least("batch_sizes", min(self.batch_sizes))
        if self.method is None and self.ratio is not None:
            raise ValueError("--ratio goes with --method; a saved run has its own")


@dataclass(frozen=True, kw_only=True)
class PredictSettings(InputSettings):
    """How images are prepared, and what is written about them."""

    top: int = 5
    """Classes per image, the likeliest first."""
    threshold: float = 0.5
    """Lowest score of a detector's boxes."""
    batch_size: int = 32
    """Images per batch."""
    threads: int = 2
    """Threads that read images."""

    def __post_init__(self) -> None:
        for name in ("top", "batch_size", "threads"):
            require_least(name, getattr(self, name))

"""Settings of `ltm.export`, `ltm.predict` and `ltm.embed`. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ltm.core.validation import require_least

Format = Literal["onnx", "program", "openvino", "aoti"]
Recipe = Literal["accurate", "small", "dynamic", "convolutional"]
LineFormat = Literal["jsonl", "csv"]
TableFormat = Literal["jsonl", "csv", "parquet"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]

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
    device: str = "cpu"
    """Where files are run to compare them: cpu, cuda, or tensorrt for ONNX files. An AOTInductor
    package is made for this device."""
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
class ManySettings(InputSettings):
    """How many images go through a network, and where."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N; tensorrt for ONNX files."""
    dtype: Dtype = "auto"
    """Of the network: auto is float16 on a GPU and float32 elsewhere."""
    compile: bool = False
    """Compile the network first, which takes a minute or two."""
    workers: int = 0
    """Processes that read images; 0 reads them in this one."""
    split: str = "train"
    """Split of hf:NAME and of shards named with {split}."""
    shard_rows: int = 4096
    """Rows of a Parquet file where the images come from no shards."""
    devices: int | None = None
    """Processes that share the work, one for each GPU, started by torch's launcher; with --ray the
    actors of the cluster, by default one for each of its GPUs."""
    ray: str | None = None
    """Run on Ray Data: local, auto, or the address of a cluster."""
    resume: bool = False
    """Go on with the Parquet files of a run that was stopped."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "shard_rows", "devices"):
            require_least(name, getattr(self, name, None))
        require_least("workers", self.workers, 0)


@dataclass(frozen=True, kw_only=True)
class EmbedSettings(ManySettings):
    """What is written about images, how they are prepared, and who does the work."""

    top: int = 5
    """How many classes to give, where the network has a head; 0 gives none."""
    batch_size: int = 64
    """Images per batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least("top", self.top, 0)


@dataclass(frozen=True, kw_only=True)
class PredictSettings(ManySettings):
    """How images are prepared, and what is written about them."""

    top: int = 5
    """Classes per image, the likeliest first."""
    threshold: float = 0.5
    """Lowest score of a detector's boxes."""
    batch_size: int = 32
    """Images per batch."""
    threads: int = 2
    """Threads that read images, without workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("top", "threads"):
            require_least(name, getattr(self, name))

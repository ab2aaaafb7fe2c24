"""Settings of `ltm.export`, `ltm.predict` and `ltm.embed`. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ltm.core.validation import require, require_least
from ltm.data.config import require_image_settings

Format = Literal["onnx", "program", "openvino", "aoti"]
Recipe = Literal["accurate", "small", "dynamic", "convolutional"]
LineFormat = Literal["jsonl", "csv"]
TableFormat = Literal["jsonl", "csv", "parquet"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]

TOLERANCE = 1e-3
BATCH_SIZES = (1, 3, 16)
INT8_SOURCES: tuple[Format, ...] = ("onnx", "program")
"""The formats that int8 files are made of; with openvino an ONNX file is written, too."""


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """How a network's images are cropped, and what its classes are called."""

    class_names: Path | None = None
    """Text file with one class name per line, or JSON; by default the model's own names."""
    crop_ratio: float | None = None
    """Evaluation crop as a share of the resized side; by default the model's."""

    def given(self) -> dict[str, object]:
        """What was said about images and classes."""
        return {"class_names": self.class_names, "crop_ratio": self.crop_ratio}

    def __post_init__(self) -> None:
        require_image_settings(self.crop_ratio)


@dataclass(frozen=True, kw_only=True)
class ExportSettings(InputSettings):
    """What to write, and which images to check it on."""

    method: str | None = None
    """Convert the network first, with a method such as ltm, tome or ltm:support=learned."""
    ratio: float | None = None
    """Share of the multiply-adds to keep with --method; by default 0.7."""
    formats: tuple[Format, ...] = ("onnx",)
    """onnx, program (torch.export), openvino, or aoti (an AOTInductor package)."""
    int8: tuple[Recipe, ...] = ()
    """Int8 versions to add: accurate, small (all linear layers), dynamic (no calibration images
    needed) or convolutional."""
    data: str | None = None
    """Images to check and calibrate on: a folder or .zip of images, in class folders or not, tar
    shards, hf:NAME, or the word shapes for generated images, which is also the default."""
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
    """Where files are compared with the network: cpu, cuda, or tensorrt for ONNX files. An
    AOTInductor package is made for this device."""
    workers: int = 0
    """Loader processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("formats", "batch_sizes"):
            if not getattr(self, name):
                raise ValueError(f"{name}: there is none; give at least one")
        require_least("batch_sizes", min(self.batch_sizes))
        require_least("images", self.images)
        for name in ("calibration_images", "tolerance", "workers"):
            require_least(name, getattr(self, name), 0)
        if self.int8 and not {*INT8_SOURCES, "openvino"} & {*self.formats}:
            raise ValueError(
                f"int8: int8 files are made of onnx files and programs, but formats is "
                f"{', '.join(self.formats)}; add onnx or program"
            )
        if self.method is None and self.ratio is not None:
            raise ValueError("--ratio goes with --method: give both, or leave the ratio out")


@dataclass(frozen=True, kw_only=True)
class ManySettings(InputSettings):
    """How many images go through a network, and which processes do the work."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N; tensorrt for ONNX files."""
    dtype: Dtype = "auto"
    """Precision of the network; auto is float16 on a GPU and float32 elsewhere."""
    compile: bool = False
    """Compile the network first, which takes a minute or two and makes it faster."""
    workers: int = 0
    """Processes that read images; 0 reads them in this one."""
    split: str = "train"
    """Which split to read, for hf:NAME and for shard patterns that contain {split}."""
    shard_rows: int = 4096
    """Rows per Parquet file when the input is not sharded."""
    devices: int | None = None
    """Processes that share the work, one for each GPU. With --ray: actors, by default one for each
    GPU of the cluster."""
    ray: str | None = None
    """Run on Ray Data: local, auto, or the address of a cluster."""
    resume: bool = False
    """Continue a stopped run, and keep the Parquet files that it wrote."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least("shard_rows", self.shard_rows)
        require_least("devices", self.devices)
        require_least("workers", self.workers, 0)


@dataclass(frozen=True, kw_only=True)
class EmbedSettings(ManySettings):
    """What is written about images, how they are prepared, and which processes do the work."""

    top: int = 5
    """Classes per image, the likeliest first; 0 for none."""
    batch_size: int = 64
    """Images per batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least("batch_size", self.batch_size)
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
    """Threads that read images if there are no workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "top", "threads"):
            require_least(name, getattr(self, name))
        require(0.0 <= self.threshold <= 1.0, "threshold", self.threshold, "from 0 to 1")

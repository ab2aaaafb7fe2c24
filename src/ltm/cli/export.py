"""`ltm export`: a model as files that other programs run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ltm.evaluation.images import expected_images
from ltm.files import check_folder, write_metrics
from ltm.models import ModelSource, method_config, require_least
from ltm.progress import Progress

if TYPE_CHECKING:
    from torch import nn

    from ltm.deployment.job import Export
    from ltm.methods import MethodConfig


def export(
    *,
    run: Path | None = None,
    model: str | None = None,
    pretrained: bool = False,
    weights: Path | None = None,
    method: str | None = None,
    ratio: float | None = None,
    formats: tuple[Literal["onnx", "program", "openvino"], ...] = ("onnx",),
    int8: tuple[Literal["accurate", "small", "dynamic", "convolutional"], ...] = (),
    data: str = "shapes",
    split: str = "val",
    images: int | None = None,
    calibration_images: int = 128,
    class_names: Path | None = None,
    crop_ratio: float | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    model_args: tuple[str, ...] = (),
    batch_sizes: tuple[int, ...] = (1, 3, 16),
    tolerance: float = 1e-3,
    workers: int = 0,
    output: Path = Path("runs/export"),
    overwrite: bool = False,
) -> None:
    """Write a model as ONNX, torch.export program or OpenVINO file that provably says the same.

    One file takes any batch size; the ONNX file carries its preprocessing and class names. Every
    file is compared with the network on images of --data, and refused where it differs. Int8 files
    come with their accuracy and speed against the float file.

    Example:
        ltm export --run runs/small --data imagenet/val --int8 accurate --output runs/export

    Args:
        run: a saved network, as ltm.save and the other commands write it.
        model: timm's name of a network, where there is no run.
        pretrained: take timm's own weights.
        weights: take those of a file in timm's keys, .safetensors or .pth; nothing is unpickled.
        method: merge tokens first, such as ltm, tome or ltm:support=learned.
        ratio: share of the multiply-adds that may remain with --method, 0.7 unless given.
        formats: what to write.
        int8: int8 versions to add: accurate, small (all linear layers), dynamic (no calibration
            images needed) or convolutional.
        data: images to compare and calibrate on: a folder or .zip of class folders, tar shards,
            hf:NAME, or shapes (generated).
        split: split of the data, where it has several.
        images: labelled images for the accuracy of int8 files; by default all.
        calibration_images: images that set the ranges of int8 files; none of them is evaluated.
        class_names: text file, one name a line, or JSON; by default what is known.
        crop_ratio: evaluation crop as a share of the resized side; by default the model's.
        num_classes: by default what the weights have.
        image_size: by default what the model was made for.
        model_args: further arguments of the model, such as depth=4.
        batch_sizes: batch sizes at which files are compared with the network.
        tolerance: largest relative difference allowed.
        workers: loader processes.
        output: folder for the files and metrics.json.
        overwrite: replace another run's results there.
    """
    check_folder(output, overwrite=overwrite)
    for name, given in (("formats", formats), ("batch_sizes", batch_sizes)):
        if not given:
            raise ValueError(f"{name}: there is none; give at least one")
    require_least("batch-sizes", min(batch_sizes))
    config = None if method is None else method_config(method, ratio)
    if config is None and ratio is not None:
        raise ValueError("--ratio goes with --method; a saved run has its own")
    if int8 and data == "shapes" and weights is not None:
        raise ValueError("data: int8 needs images of the network's own kind; give --data")

    from ltm.evaluation.images import part_images

    network = ModelSource(
        model=model,
        pretrained=pretrained,
        weights=weights,
        run=run,
        num_classes=num_classes,
        image_size=image_size,
        model_args=model_args,
    ).load(merges=config is not None)
    if config is not None:
        _merge_(network, config)
    parts = part_images(
        data, split=split, images=images, calibration_images=calibration_images if int8 else 0
    )
    job = _job(network, output, data, class_names or run, crop_ratio)
    loaders = _Batches(job, workers)
    sample = loaders.first(parts.evaluation, max(batch_sizes))
    job.write(formats, sample, batch_sizes=batch_sizes, tolerance=tolerance)
    rows = []
    if int8:
        calibration = loaders.all(parts.calibration, 16) if parts.calibration is not None else ()
        for recipe in int8:
            job.write_int8(recipe, (batch.images for batch in calibration))
        labelled = loaders.labelled(parts.evaluation, data)
        rows = job.measure_int8(labelled, progress=Progress("accuracy"))
    metrics = _describe(job, rows, data, len(sample))
    show(metrics)
    write_metrics(output, metrics)


def _merge_(network: nn.Module, config: MethodConfig) -> None:
    from ltm.api import is_merging, merge_tokens_

    if is_merging(network):
        raise ValueError("method: a saved run merges already; leave --method out")
    merge_tokens_(network, config)


def _job(
    network: nn.Module, output: Path, data: str, names: Path | None, crop_ratio: float | None
) -> Export:
    from ltm.data.config import DataConfig
    from ltm.deployment.information import describe, read_class_names, saved_class_names
    from ltm.deployment.job import Export

    spec = expected_images(network, DataConfig(source=data, crop_ratio=crop_ratio))
    known = None
    if names is not None:
        known = saved_class_names(names) if names.is_dir() else read_class_names(names)
    information = describe(network, class_names=known, spec=spec)
    return Export(network, output, information)


class _Batches:
    """Images as the exported files expect them."""

    def __init__(self, job: Export, workers: int) -> None:
        self.job, self.workers = job, workers

    def all(self, dataset: Any, batch_size: int) -> Any:
        from ltm.data.config import DataConfig
        from ltm.data.loading import evaluation_loader

        config = DataConfig(batch_size=batch_size, workers=self.workers)
        return evaluation_loader(dataset, self.job.information.spec, config)

    def labelled(self, dataset: Any, source: str) -> Any:
        from ltm.models import check_classes

        check_classes(self.job.model, dataset.class_names, source)
        return self.all(dataset, 16)

    def first(self, dataset: Any, number: int) -> Any:
        return next(iter(self.all(dataset.take(number), number))).images


def _describe(job: Export, rows: list[Any], data: str, num_images: int) -> dict[str, Any]:
    import torch

    from ltm.evaluation.environment import describe

    information = job.information
    return {
        "model": information.model,
        "token_merging": information.token_merging,
        "preprocessing": dataclasses.asdict(information.spec),
        "num_class_names": len(information.class_names or ()),
        "data": data,
        "parity_images": num_images,
        "files": [dataclasses.asdict(file) for file in job.files],
        "int8": [dataclasses.asdict(row) for row in rows],
        "environment": dataclasses.asdict(describe(torch.device("cpu"))),
    }


def show(metrics: dict[str, Any]) -> None:
    """Print what was written."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("file", "MB", "max relative difference (batch)", title=metrics["model"])
    for file in metrics["files"]:
        parity = ", ".join(
            f"{row['max_relative_difference']:.1e} ({row['batch_size']})" for row in file["parity"]
        )
        table.add_row(file["name"], f"{file['num_bytes'] / 1e6:.2f}", parity)
    console.print(table)
    if not metrics["int8"]:
        return
    table = Table("file", "size", "top-1 before", "after", "95% interval", "speed at batch 1")
    for row in metrics["int8"]:
        low, high = row["interval"]
        table.add_row(
            row["name"],
            f"{row['share_of_size']:.2f}",
            f"{100 * row['top1_before']:.2f}",
            f"{100 * row['top1_after']:.2f}",
            f"{100 * low:+.2f} to {100 * high:+.2f}",
            f"{row['speedup']:.2f}x",
        )
    console.print(table)

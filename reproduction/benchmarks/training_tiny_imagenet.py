"""Fine-tune ViT-Ti on Tiny-ImageNet, then LTM and LTMP on it; epoch times; the loader's speed.

    python -m reproduction.benchmarks.training_tiny_imagenet --data tiny-imagenet.zip \
        --weights vit_tiny_patch16_224.safetensors --output results/training_tiny_imagenet

Needs a GPU. Every part is written down as soon as it is done (`training_tiny_imagenet.json` and
`.md`); a part that fails is reported and the next one starts.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import timm
import torch
from torch import nn

from ltm.api import collect_statistics_, fit_, measure_share, report as report_of
from ltm.data.config import DataConfig
from ltm.data.datasets import Splits, open_splits
from ltm.data.loading import Batch, evaluation_loader
from ltm.data.transforms import image_spec
from ltm.models import changed
from ltm.training.classification import Classification, evaluate
from ltm.training.fabric import make_fabric
from ltm.training.network import build
from ltm.training.run import train
from ltm.training.settings import TrainSettings
from ltm.training.trainer import Trainer
from reproduction.benchmarks.recording import machine, parser, write_rows

LIGHT = {
    "scale": [0.6, 1.0],
    "color_jitter": 0.0,
    "auto_augment": None,
    "erase": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "smoothing": 0.0,
}
METHODS = {
    "LTM": {"method": "ltm"},
    "LTM, learned support": {"method": "ltm", "method_options": ["support=learned"]},
    "LTMP": {"method": "ltmp"},
}

Row = dict[str, Any]


class Report:
    """Rows and timings, written after every part."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.rows: list[Row] = []
        self.loader: list[Row] = []
        self.failures: list[str] = []

    def part(self, name: str, run: Callable[[], None]) -> None:
        """Run one part; what it raises is noted and goes no further."""
        start = time.perf_counter()
        print(f"--- {name}", flush=True)
        try:
            run()
        except Exception:  # noqa: BLE001 - the parts after it do not depend on this one
            self.failures.append(f"{name}: {traceback.format_exc()}")
            print(self.failures[-1], flush=True)
        print(f"--- {name}: {time.perf_counter() - start:.0f} s", flush=True)
        self.write()

    def write(self) -> None:
        """Write JSON and Markdown."""
        tables = (self._heading(), self._accuracy(), self._times(), self._loading())
        about = {**self.about, "loader": self.loader, "failures": self.failures}
        path = self.folder / "training_tiny_imagenet"
        write_rows(path, about, self.rows, "\n\n".join(tables))

    def _heading(self) -> str:
        return (
            "# ViT-Ti on Tiny-ImageNet: LTM and LTMP fine-tuned\n\n"
            f"{self.about['device']}, torch {self.about['torch']}, timm {self.about['timm']}, "
            f"{self.about['precision']}, batch {self.about['batch_size']}, input "
            f"{self.about['image_size']} px. Only mask modules train after the base."
        )

    def _accuracy(self) -> str:
        lines = [
            "| network | epochs | share of MACs | top-1 (%) | trained parameters |",
            "|" + "---|" * 5,
        ]
        for row in self.rows:
            share = "" if row["mac_share"] is None else f"{row['mac_share']:.3f}"
            top1, trained = f"{100 * row['top1']:.2f}", f"{row['trained']:,}"
            lines.append(f"| {row['name']} | {row['epochs']} | {share} | {top1} | {trained} |")
        return "\n".join(lines)

    def _times(self) -> str:
        """Seconds per epoch: the median of the longer runs, after their first epoch."""
        lines = [
            "| network | s/epoch, training | s/epoch with statistics | of LTMP's | images/s |",
            "|" + "---|" * 5,
        ]
        longest = {row["name"]: row for row in self.rows if row["epochs"] > 1}
        reference = longest.get("LTMP", {}).get("seconds_all")
        for name, row in longest.items():
            ratio = f"{row['seconds_all'] / reference:.3f}" if reference and "LTM" in name else ""
            lines.append(
                f"| {name} | {row['seconds']:.2f} | {row['seconds_all']:.2f} | {ratio} "
                f"| {row['images_per_second']:.0f} |"
            )
        return "\n".join(lines)

    def _loading(self) -> str:
        lines = ["| loop, ViT-S at 224 px | images/s | share of pre-loaded |", "|" + "---|" * 3]
        fastest = max((r["images_per_second"] for r in self.loader if r["preloaded"]), default=0.0)
        for row in self.loader:
            share = f"{row['images_per_second'] / fastest:.3f}" if fastest else ""
            lines.append(f"| {row['name']} | {row['images_per_second']:.0f} | {share} |")
        return "\n".join(lines)


def settings_of(options: argparse.Namespace, **groups: dict[str, Any]) -> TrainSettings:
    """Settings on Tiny-ImageNet; groups are added to what all runs share."""
    values: dict[str, dict[str, Any]] = {
        "model": {"name": "vit_tiny_patch16_224"},
        "data": {
            "source": str(options.data),
            "batch_size": options.batch_size,
            "workers": options.workers,
            "image_size": options.image_size,
            "crop_ratio": 1.0,
        },
        "augment": LIGHT,
        "run": {"device": options.device, "precision": options.precision},
    }
    for group, changes in groups.items():
        values[group] = values.get(group, {}) | changes
    return changed(TrainSettings(), values)


@cache
def splits_of(data: DataConfig) -> Splits:
    """The images, opened once for all runs."""
    return open_splits(data)


def row_of(name: str, folder: Path, trained: int) -> Row:
    """What a finished run says."""
    metrics = json.loads((folder / "metrics.json").read_text())
    with (folder / "log.csv").open(newline="") as file:
        epochs = list(csv.DictReader(file))
    later = epochs[1:] or epochs
    train_seconds = [float(epoch["train_seconds"]) for epoch in later]
    all_seconds = [
        float(epoch["train_seconds"]) + float(epoch["statistics_seconds"]) for epoch in later
    ]
    speeds = [float(epoch["images_per_second"]) for epoch in later]
    return {
        "name": name,
        "epochs": len(epochs),
        "top1": metrics["top1"],
        "last_top1": metrics["last_top1"],
        "loss": metrics["loss"],
        "mac_share": metrics["mac_share"],
        "ib_loss": metrics["ib_loss"],
        "ib_bound": metrics["ib_bound"],
        "trained": trained,
        "seconds": statistics.median(train_seconds),
        "seconds_all": statistics.median(all_seconds),
        "images_per_second": statistics.median(speeds),
        "epochs_log": epochs,
    }


def run_one(
    report: Report, options: argparse.Namespace, name: str, settings: TrainSettings
) -> Path:
    """Train, note the row, keep the log."""
    slug = "".join(c if c.isalnum() else "_" for c in name.lower())
    folder = options.output / "runs" / f"{slug}_{settings.optim.epochs}"
    result = train(
        data=splits_of(settings.data),
        settings=settings,
        output=folder,
        overwrite=True,
        say=print,
    )
    trained = sum(p.numel() for p in result.model.parameters() if p.requires_grad)
    report.rows.append(row_of(name, folder, trained))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return folder


def base(report: Report, options: argparse.Namespace) -> None:
    """Fine-tune the whole network on the 200 classes."""
    settings = settings_of(
        options,
        model={"weights": str(options.weights), "drop_path": 0.1},
        merge={"method": "none"},
        augment=LIGHT | {"smoothing": 0.1},
        optim={
            "epochs": options.base_epochs,
            "lr": 5e-4,
            "reference_batch": 512,
            "weight_decay": 0.05,
            "lr_warmup_epochs": 0.5,
            "clip": 1.0,
            "min_lr": 1e-6,
        },
    )
    folder = run_one(report, options, "ViT-Ti", settings)
    shutil.copytree(folder / "model", options.output / "base", dirs_exist_ok=True)


def tuned(
    report: Report, options: argparse.Namespace, name: str, merge: dict[str, Any], epochs: int
) -> None:
    """Fine-tune mask modules on the frozen network."""
    settings = settings_of(
        options,
        model={"weights": str(options.output / "base")},
        merge={"ratio": options.ratio} | merge,
        optim={"epochs": epochs, "lr": 5e-3, "weight_decay": 0.0, "min_lr": 1e-4},
        tune={"trainable": "mergers"},
    )
    run_one(report, options, name, settings)


def untrained(
    report: Report, options: argparse.Namespace, name: str, merge: dict[str, Any]
) -> None:
    """The same without training: class statistics, or thresholds, from training images alone."""
    settings = settings_of(
        options,
        model={"weights": str(options.output / "base")},
        merge={"ratio": options.ratio, "statistics_images": 4000} | merge,
        optim={"epochs": 1},
        tune={"trainable": "mergers"},
    )
    splits, fabric = splits_of(settings.data), make_fabric(settings.run)
    fabric.launch()
    model = fabric.to_device(build(settings, splits.train.num_classes).model).eval()
    spec = image_spec(settings.data, model)
    # Images of all classes: a few for thresholds, more for statistics.
    number = 512 if merge["method"] == "ltmp" else settings.merge.statistics_images
    clean = evaluation_loader(
        splits.train.take(number),  # type: ignore[union-attr]
        spec,
        settings.data,
        device=fabric.device,
    )
    share = report_of(model).share
    if merge["method"] == "ltmp":
        images = torch.cat([batch.images for batch in clean])
        fit_(model, images)
        share = measure_share(model, images)
    else:
        collect_statistics_(model, clean, passes=2)
    val = evaluation_loader(splits.val, spec, settings.data, device=fabric.device)
    found = evaluate(model, val, splits.train.num_classes, fabric)
    report.rows.append(
        {
            "name": name,
            "epochs": 0,
            "top1": found.top1,
            "loss": found.loss,
            "mac_share": share,
            "ib_loss": found.ib_loss,
            "ib_bound": found.ib_bound,
            "trained": 0,
        }
    )
    print(f"{name}, untrained: top-1 {100 * found.top1:.2f}, MACs {share:.3f}", flush=True)


Part = tuple[str, Callable[[], None]]


class Preloaded:
    """Batches that lie on the device already, as many as a loader gives."""

    def __init__(self, batches: list[Batch], length: int) -> None:
        self._batches, self._length = batches, length

    def set_epoch(self, epoch: int) -> None:
        """Always the same batches."""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self._length):
            yield self._batches[step % len(self._batches)]


def loading(report: Report, options: argparse.Namespace) -> None:
    """The same loop on the loader's batches and on pre-loaded ones, ViT-S at 224 px."""
    settings = settings_of(
        options,
        model={"name": "vit_small_patch16_224"},
        merge={"method": "none"},
        data={"batch_size": options.loader_batch, "image_size": 224},
        optim={"epochs": 100, "lr": 1e-4},
    )
    splits, fabric = splits_of(settings.data), make_fabric(settings.run)
    fabric.launch()
    num_classes = splits.train.num_classes
    model: nn.Module = timm.create_model("vit_small_patch16_224", num_classes=num_classes)
    fabric.to_device(model)
    task = Classification(settings, splits=splits)
    task.open_data()
    trainer = Trainer(fabric, task, model)
    held: Any = Preloaded(list(islice(trainer.batches, 8)), len(trainer.batches))
    task.held_out = cast("Any", Preloaded([], 0))
    sources = {"pre-loaded": held, f"{options.workers} workers": trainer.batches}
    speeds: dict[str, list[float]] = {name: [] for name in sources}
    # Each source's epochs in a row: workers have no other epoch in which to get ahead.
    turns = [name for _ in range(2) for name in sources for _ in range(options.loader_epochs + 1)]
    for epoch, name in enumerate(turns):
        trainer.batches = sources[name]
        row = trainer.run_epoch(epoch)
        print(f"{name}: {row.images_per_second:.0f} images/s", flush=True)
        if epoch and turns[epoch - 1] == name:  # a first one starts workers and warms up
            speeds[name].append(row.images_per_second)
    report.loader += [
        {
            "name": name,
            "preloaded": name == "pre-loaded",
            "images_per_second": statistics.median(found),
            "all": found,
        }
        for name, found in speeds.items()
    ]


def parse() -> argparse.Namespace:
    """The options."""
    options = parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="tiny-imagenet.zip or its folder")
    options.add_argument("--weights", type=Path, required=True, help="ViT-Ti/16 in timm's keys")
    options.add_argument("--output", type=Path, required=True)
    options.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options.add_argument("--precision", choices=["32", "bf16", "16"], default="bf16")
    options.add_argument("--image-size", type=int, default=224)
    options.add_argument("--batch-size", type=int, default=128)
    options.add_argument("--workers", type=int, default=8)
    options.add_argument("--ratio", type=float, default=0.7)
    options.add_argument("--base-epochs", type=int, default=5)
    options.add_argument("--epochs", type=int, nargs="+", default=[1, 5])
    options.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options.add_argument("--loader-batch", type=int, default=256)
    options.add_argument("--loader-epochs", type=int, default=3)
    options.add_argument(
        "--parts", nargs="+", choices=["loader", "training"], default=["loader", "training"]
    )
    options.add_argument("--minutes", type=float, default=1e9, help="start no part after so many")
    return options.parse_args()


def main() -> None:
    """Run all parts, as far as time allows."""
    options = parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_float32_matmul_precision("high")
    about = {
        **machine(),
        "cores": os.cpu_count(),
        "precision": options.precision,
        "batch_size": options.batch_size,
        "image_size": options.image_size,
        "ratio": options.ratio,
        "options": {name: str(value) for name, value in vars(options).items()},
    }
    print(json.dumps(about), flush=True)
    report = Report(options.output, about)
    loader: list[Part] = [("loader", lambda: loading(report, options))]
    training: list[Part] = [("base", lambda: base(report, options))]
    training += [
        (f"{name}, untrained", partial(untrained, report, options, name, METHODS[name]))
        for name in options.methods
    ]
    training += [
        (f"{name}, {epochs} epochs", partial(tuned, report, options, name, METHODS[name], epochs))
        for epochs in options.epochs
        for name in options.methods
    ]
    parts = (loader if "loader" in options.parts else []) + (
        training if "training" in options.parts else []
    )
    start = time.perf_counter()
    for name, run in parts:
        if time.perf_counter() - start > 60 * options.minutes:
            print(f"out of time before {name}", flush=True)
            break
        report.part(name, run)
    print((options.output / "training_tiny_imagenet.md").read_text(encoding="utf-8"), flush=True)
    if report.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Int8 versions of an exported LTM ViT-Ti: accuracy, size and speed against the float file.

    python -m reproduction.benchmarks.int8_imagenet --weights vit_tiny_patch16_224.safetensors \\
        --data imagenet-val.zip

Every image is evaluated and none by a file that was calibrated on it: the images are halved, and
each half is evaluated by files whose ranges come from images of the other.
"""

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ltm.api import merge_tokens_
from ltm.data.config import DataConfig
from ltm.data.datasets import open_dataset
from ltm.data.loading import evaluation_loader
from ltm.data.transforms import ImageSpec, image_spec
from ltm.deployment.formats import deployable, save_onnx, trace
from ltm.deployment.information import describe
from ltm.deployment.int8 import RECIPES, quantise_onnx
from ltm.evaluation.accuracy import paired_interval
from ltm.evaluation.latency import interleaved, speedup, spread
from ltm.evaluation.modes import OnnxModel
from ltm.models import ModelSource, check_classes, method_config
from reproduction.benchmarks.recording import parser, write_page

FLOAT = "float"


def halves(source: str, images: int | None) -> list[Any]:
    """The images in two parts, class by class."""
    dataset: Any = open_dataset(source, split="val", max_unreadable=0)
    dataset = dataset if images is None else dataset.take(images)
    return [dataset.select(range(fold, len(dataset), 2)) for fold in range(2)]


def batches(dataset: Any, spec: ImageSpec) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels as the files expect them."""
    yield from evaluation_loader(dataset, spec, DataConfig(batch_size=16, workers=0))


def evaluate(runners: dict[str, OnnxModel], dataset: Any, spec: ImageSpec) -> dict[str, Tensor]:
    """Which images each file gets right."""
    found: dict[str, list[Tensor]] = {name: [] for name in runners}
    for images, labels in batches(dataset, spec):
        for name, runner in runners.items():
            found[name].append(runner(images).argmax(1) == labels)
    return {name: torch.cat(parts) for name, parts in found.items()}


def main() -> None:
    """Export, quantise on one half, evaluate on the other, time in turns."""
    options = parser(__doc__)
    options.add_argument("--weights", type=Path, required=True)
    options.add_argument("--data", required=True)
    options.add_argument("--recipes", nargs="+", default=["accurate", "small", "dynamic"])
    options.add_argument("--ratio", type=float, default=0.7)
    options.add_argument("--images", type=int)
    options.add_argument("--calibration-images", type=int, default=128)
    options.add_argument("--rounds", type=int, default=25)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--output", type=Path, default=Path("results/export"))
    args = options.parse_args()
    torch.manual_seed(args.seed)
    model = ModelSource(model="vit_tiny_patch16_224", weights=args.weights).load()
    merge_tokens_(model, method_config("ltm", args.ratio))
    spec = image_spec(DataConfig(source=args.data), model)
    parts = halves(args.data, args.images)
    check_classes(model, parts[0].class_names, args.data)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(model, spec, parts, Path(folder), args)
    write_page(
        args.output / "int8_imagenet",
        title=f"Int8 LTM ViT-Ti at {args.ratio:g} of the MACs, ImageNet-1k validation images",
        command=f"python -m reproduction.benchmarks.int8_imagenet --weights {args.weights.name} "
        f"--data {Path(args.data).name}",
        about={"seed": args.seed, "calibration_images": args.calibration_images},
        columns={
            "file": "file",
            "megabytes": "MB",
            "share_of_size": "of float's size",
            "top1": "top-1 (%)",
            "against_float": "against float (points)",
            "speed_batch_1": "speed-up, batch 1",
            "speed_batch_8": "speed-up, batch 8",
        },
        rows=rows,
        notes=f"{sum(map(len, parts)):,} images; each half is evaluated by files calibrated on "
        f"{args.calibration_images} images of the other (`dynamic` needs none). In brackets 95% "
        "intervals: paired, image by image, for accuracy; of the median ratio within rounds for "
        "speed, all files in one loop.",
    )


def measure(
    model: Any, spec: ImageSpec, parts: list[Any], folder: Path, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row per file."""
    ready = deployable(model)
    paths = {FLOAT: save_onnx(trace(ready, spec.size), folder / "float.onnx", describe(ready))}
    correct: list[dict[str, Tensor]] = []
    for part, other in (parts, parts[::-1]):
        calibration = other.take(args.calibration_images)
        for name in args.recipes:
            paths[name] = folder / f"{name}.onnx"
            images = (images for images, _ in batches(calibration, spec))
            quantise_onnx(paths[FLOAT], paths[name], RECIPES[name], images)
        runners = {name: OnnxModel(path) for name, path in paths.items()}
        correct.append(evaluate(runners, part, spec))
        print({name: float(c.double().mean()) for name, c in correct[-1].items()}, flush=True)
    right = {name: torch.cat([fold[name] for fold in correct]) for name in runners}
    images = next(batches(parts[0], spec))[0]
    times = {
        size: interleaved(
            {name: partial(runner, images[:size]) for name, runner in runners.items()},
            torch.device("cpu"),
            rounds=args.rounds,
        )
        for size in (1, 8)
    }
    return [_row(name, paths, right, times) for name in runners]


def _row(
    name: str,
    paths: dict[str, Path],
    right: dict[str, Tensor],
    times: dict[int, dict[str, list[float]]],
) -> dict[str, Any]:
    size, whole = paths[name].stat().st_size, paths[FLOAT].stat().st_size
    apart = paired_interval(right[name], right[FLOAT])
    points = [100 * value for value in (apart.difference, apart.low, apart.high)]
    row = {
        "file": name,
        "about": RECIPES[name].description if name in RECIPES else "float32",
        "megabytes": size / 1e6,
        "share_of_size": size / whole,
        "top1": f"{100 * float(right[name].double().mean()):.2f}",
        "num_images": len(right[name]),
        "against_float": "{:+.2f} ({:+.2f} to {:+.2f})".format(*points),
    }
    for batch, rounds in times.items():
        gain = speedup(rounds[FLOAT], rounds[name])
        row[f"milliseconds_batch_{batch}"] = 1e3 * spread(rounds[name]).median
        row[f"speed_batch_{batch}"] = f"{gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f})"
    return row


if __name__ == "__main__":
    main()

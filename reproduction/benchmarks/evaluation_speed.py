"""Speed of `ltm.evaluation.accuracy.evaluate` against a bare timm loop, on the same images.

    python -m reproduction.benchmarks.evaluation_speed --data imagenet/val --weights vit_tiny.safetensors

The bare loop is timm's own: its loader, its transform, `model(images).argmax(1) == labels`. Both
run in turns, several times; the evaluation must reach 90% of the loop's images per second. On a
machine with other work to do, `--workers 0` gives a second, steadier figure: processor time.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from timm.data import create_loader, resolve_data_config

from ltm.data.config import DataConfig
from ltm.data.datasets import open_dataset
from ltm.data.loading import evaluation_loader
from ltm.data.transforms import image_spec
from ltm.evaluation.accuracy import evaluate, summarise
from ltm.models import ModelSource
from reproduction.benchmarks.recording import parser


def main() -> None:
    """Run both in turns and print their speeds."""
    options = parser(__doc__)
    options.add_argument("--data", default="shapes:classes=1000,size=256,val_images=2000")
    options.add_argument("--model", default="vit_tiny_patch16_224")
    options.add_argument("--weights", type=Path)
    options.add_argument("--images", type=int, default=2000)
    options.add_argument("--batch-size", type=int, default=64)
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--turns", type=int, default=3)
    args = options.parse_args()

    model = ModelSource(model=args.model, weights=args.weights).load(untrained=True)
    dataset: Any = open_dataset(args.data)
    dataset = dataset.take(args.images)
    config = DataConfig(source=args.data, batch_size=args.batch_size, workers=args.workers)
    spec = image_spec(config, model)
    ours = evaluation_loader(dataset, spec, config)
    known = resolve_data_config(model=model)
    theirs = create_loader(
        dataset,
        input_size=known["input_size"],
        batch_size=args.batch_size,
        use_prefetcher=False,
        interpolation=spec.interpolation,
        mean=spec.mean,
        std=spec.std,
        crop_pct=spec.crop_ratio,
        num_workers=args.workers,
        device=torch.device("cpu"),
        persistent_workers=args.workers > 0,
    )

    def bare() -> float:
        correct = 0
        with torch.inference_mode():
            for images, labels in theirs:
                correct += int((model(images).argmax(1) == labels).sum())
        return correct / len(dataset)

    def evaluated() -> float:
        return summarise(evaluate({"model": model}, ours)["model"]).top1

    seconds: dict[str, list[tuple[float, float]]] = {"bare timm loop": [], "evaluate": []}
    for turn in range(args.turns):
        for (name, times), loop in zip(seconds.items(), (bare, evaluated), strict=True):
            wall, work = time.perf_counter(), time.process_time()
            top1 = loop()
            wall, work = time.perf_counter() - wall, time.process_time() - work
            times.append((wall, work))
            speed = len(dataset) / wall
            print(f"turn {turn}: {name:<15} {speed:7.1f} images/s, top-1 {top1:.4f}", flush=True)
    kinds = ("by the clock",) if args.workers else ("by the clock", "by processor time")
    for index, kind in enumerate(kinds):
        ratios = [a[index] / b[index] for a, b in zip(*seconds.values(), strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"evaluate at {statistics.median(ratios):.3f} of the loop's speed {kind} ({spread})")


if __name__ == "__main__":
    main()

"""Speed of `ltm.evaluation.accuracy.evaluate` against a bare timm loop, on the same images.

    python benchmarks/evaluation_speed.py --data imagenet/val --weights vit_tiny.safetensors

The bare loop is timm's own: its loader, its transform, `model(images).argmax(1) == labels`. Both
run in turns, several times; the evaluation must reach 90% of the loop's images per second.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from timm.data import create_loader, resolve_data_config

from ltm.cli.models import load_model
from ltm.data.classification import open_dataset
from ltm.data.config import DataConfig
from ltm.data.loading import evaluation_loader
from ltm.data.transforms import image_spec
from ltm.evaluation.accuracy import evaluate, summarise


def main() -> None:
    """Run both in turns and print their speeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="shapes:classes=1000,size=256,val_images=2000")
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()

    model = load_model(args.model, weights=args.weights, untrained=True)
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

    speeds: dict[str, list[float]] = {"bare timm loop": [], "evaluate": []}
    for turn in range(args.turns):
        for (name, speed), loop in zip(speeds.items(), (bare, evaluated), strict=True):
            began = time.perf_counter()
            top1 = loop()
            speed.append(len(dataset) / (time.perf_counter() - began))
            print(
                f"turn {turn}: {name:<15} {speed[-1]:7.1f} images/s, top-1 {top1:.4f}", flush=True
            )
    ratios = [ours / bare for bare, ours in zip(*speeds.values(), strict=True)]
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    print(f"evaluate at {middle:.3f} of the bare loop's speed ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()

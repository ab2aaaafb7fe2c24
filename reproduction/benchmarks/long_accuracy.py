"""Accuracy where tokens are many: a ViT at a larger size, with its position embeddings resampled.

    python -m reproduction.benchmarks.long_accuracy --weights vit_tiny.safetensors \
        --data imagenet-val.zip --output results/long_accuracy

LTM compares all pairs or two sides (`matching="alternate"`), ToMe merges in every block. Nothing is
trained or chosen on the images. Differences are in points of top-1, image by image.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

import ltm
from ltm.evaluation.accuracy import evaluate, paired_interval, summarise
from ltm.evaluation.images import load_batches, open_images
from ltm.models import ModelSource
from reproduction.benchmarks.recording import machine, parser, table, write_rows

METHODS = {
    "LTM": lambda ratio: ltm.LTM(ratio=ratio, weights="uniform"),
    "LTM, two sides": lambda ratio: ltm.LTM(
        ratio=ratio, weights="uniform", support=ltm.Matched(matching="alternate")
    ),
    "ToMe": lambda ratio: ltm.ToMe(ratio=ratio),
}
HEAD = ("method", "share of MACs", "top-1", "against the original", "interval", "divergence")


def main() -> None:
    """Evaluate every method at every ratio on the same images."""
    options = parser(__doc__)
    options.add_argument("--model", default="vit_tiny_patch16_224")
    options.add_argument("--weights", type=Path, required=True)
    options.add_argument("--data", required=True)
    options.add_argument("--size", type=int, default=384)
    options.add_argument("--ratios", type=float, nargs="+", default=[0.7, 0.55])
    options.add_argument("--images", type=int)
    options.add_argument("--workers", type=int, default=8)
    options.add_argument("--device", default="cuda")
    options.add_argument("--output", type=Path)
    args = options.parse_args()
    source = ModelSource(model=args.model, weights=args.weights, image_size=args.size)
    host = source.load().eval().to(args.device)
    models: dict[str, Any] = {"original": host}
    for ratio in args.ratios:
        for name, config in METHODS.items():
            model = copy.deepcopy(host)
            ltm.merge_tokens_(model, config(ratio), args.size)
            models[f"{name} {ratio}"] = model
    dataset = open_images(args.data, "val", args.images)
    batches = load_batches(dataset, args.data, host, batch_size=50, workers=args.workers)
    found = evaluate(models, batches, original="original")
    rows, lines = [], []
    for name, outputs in found.items():
        seen = summarise(outputs)
        apart = paired_interval(outputs.correct, found["original"].correct)
        method, _, ratio = name.rpartition(" ")
        row = {"method": method or name, "ratio": float(ratio) if method else 1.0}
        row |= {"top1": seen.top1, "divergence": seen.divergence, "images": seen.num_images}
        row |= {"difference": apart.difference, "low": apart.low, "high": apart.high}
        rows.append(row)
        interval = f"{100 * apart.low:+.2f} to {100 * apart.high:+.2f}"
        points = f"{100 * seen.top1:.2f}", f"{100 * apart.difference:+.2f}"
        lines.append([row["method"], row["ratio"], *points, interval, f"{seen.divergence:.4f}"])
    page = (
        f"# Accuracy of {args.model} at {args.size} px\n\nNothing trained, {len(dataset):,} images of "
        f"`{Path(args.data).name}`, made by `python -m reproduction.benchmarks.long_accuracy`.\n\n"
        f"{table(HEAD, lines)}"
    )
    print(page, flush=True)
    if args.output is not None:
        given = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
        command = f"python -m reproduction.benchmarks.long_accuracy {' '.join(given)}"
        about = {"command": command, "date": time.strftime("%Y-%m-%d"), "size": args.size}
        write_rows(args.output, {**about, **machine()}, rows, page)


if __name__ == "__main__":
    main()

"""Train small networks from scratch with LTM and without any merging, on generated shapes.

    python -m reproduction.benchmarks.training_parity --output results/training_parity
    python -m reproduction.benchmarks.training_parity --output results/training_parity --device cuda \
        --images 8000 --epochs 40 --seeds 3 --batch-size 128 --workers 8

The same network, images, order and augmentation, once with LTM at 0.7 of its MACs and once as it
is. Every finished run is written down at once; runs that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ltm.training.recipes import SCRATCH
from ltm.training.run import train
from ltm.training.settings import TrainSettings
from reproduction.benchmarks.recording import machine, parser, plain, write_rows

FAMILIES = {
    "vit": "ViT, 6 blocks, width 96",
    "swin": "Swin, 3 stages, width 32",
    "mobilevit": "MobileViT-XXS",
    "efficientvit": "EfficientViT-B0",
}


def settings_of(
    family: str, method: str, seed: int, arguments: argparse.Namespace
) -> TrainSettings:
    """The settings of one run: the small recipe at the asked scale."""
    recipe = SCRATCH[f"shapes_{family}"]
    merge = recipe.merge
    if method == "none":
        merge = replace(merge, method="none", method_options=(), ratio=None)
    source = (
        f"shapes:classes={arguments.classes},size={arguments.size},images={arguments.images},"
        f"val_images={arguments.val_images}"
    )
    # At least one epoch merges.
    warm = min(max(1, round(arguments.epochs * arguments.warm)), arguments.epochs - 1)
    model = replace(
        recipe.model,
        model_args=tuple(
            f"img_size={arguments.size}" if word.startswith("img_size=") else word
            for word in recipe.model.model_args
        ),
    )
    return replace(
        recipe,
        model=model,
        merge=replace(merge, warm_epochs=warm if method != "none" else 0),
        data=replace(
            recipe.data,
            source=source,
            image_size=arguments.size,
            batch_size=arguments.batch_size,
            workers=arguments.workers,
        ),
        optim=replace(recipe.optim, epochs=arguments.epochs, lr=arguments.lr),
        run=replace(recipe.run, seed=seed, device=arguments.device, precision=arguments.precision),
    )


def run_once(family: str, method: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one network; the row says what came out."""
    start = time.perf_counter()
    settings = settings_of(family, method, seed, arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = train(settings=settings, output=folder)
    last = result.history[-1]
    return {
        "family": family,
        "method": method,
        "seed": seed,
        "top1": last["val_top1"],
        "best_top1": result.metrics["top1"],
        "train_loss": last["train_loss"],
        "val_loss": last["val_loss"],
        "mac_share": last["mac_share"],
        "tokens": last["tokens"],
        "parameters": result.metrics["parameters"],
        "seconds": time.perf_counter() - start,
        "history": [
            [row["train_loss"], row["val_loss"], row["val_top1"]] for row in result.history
        ],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Mean top-1 over the seeds, and the difference with its standard error."""
    lines = [
        "| network | parameters | without merging | LTM | difference | share of MACs | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, name in FAMILIES.items():
        found = {(row["method"], row["seed"]): row for row in rows if row["family"] == family}
        seeds = [s for (method, s) in found if method == "ltm" and ("none", s) in found]
        if not seeds:
            continue
        base, merged = (
            [100 * found[method, seed]["top1"] for seed in seeds] for method in ("none", "ltm")
        )
        gaps = [m - b for m, b in zip(merged, base, strict=True)]
        error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        spread = f" ± {error:.2f}" if len(gaps) > 1 else ""
        lines.append(
            f"| {name} | {found['none', seeds[0]]['parameters']:,} | {statistics.mean(base):.2f} "
            f"| {statistics.mean(merged):.2f} | {statistics.mean(gaps):+.2f}{spread} "
            f"| {found['ltm', seeds[0]]['mac_share']:.3f} | {len(seeds)} |"
        )
    return "\n".join(lines)


def write(output: Path, arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write all rows and the table."""
    about = {"settings": plain(arguments), **machine()}
    heading = (
        "# Trained from scratch on generated shapes, with LTM and without\n\n"
        f"{arguments.images} training and {arguments.val_images} held-out images of "
        f"{arguments.classes} classes at {arguments.size} px, {arguments.epochs} epochs; top-1 (%) "
        f"after the last epoch. {about['device']}, torch {torch.__version__}.\n\n"
    )
    write_rows(output / "training_parity", about, rows, heading + table(rows))


def parse() -> argparse.Namespace:
    """The options."""
    options = parser(__doc__)
    options.add_argument("--output", type=Path, default=Path("results/training_parity"))
    options.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    options.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options.add_argument("--precision", choices=["32", "bf16"], default="32")
    options.add_argument("--classes", type=int, default=10)
    options.add_argument("--size", type=int, default=64)
    options.add_argument("--images", type=int, default=2000)
    options.add_argument("--val-images", type=int, default=1000)
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--warm", type=float, default=0.1, help="share of epochs without merging")
    options.add_argument("--lr", type=float, default=1e-3)
    options.add_argument("--batch-size", type=int, default=64)
    options.add_argument("--workers", type=int, default=0)
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--minutes", type=float, default=1e9, help="start no run after so many")
    return options.parse_args()


def main() -> None:
    """Run what is missing, and print the table."""
    arguments = parse()
    file = arguments.output / "training_parity.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if file.is_file() else []
    done = {(row["family"], row["method"], row["seed"]) for row in rows}
    start = time.perf_counter()
    for seed in range(arguments.seeds):
        for family in arguments.families:
            for method in ("none", "ltm"):
                if (family, method, seed) in done:
                    continue
                if time.perf_counter() - start > 60 * arguments.minutes:
                    print("out of time", flush=True)
                    break
                try:
                    row = run_once(family, method, seed, arguments)
                except Exception:  # noqa: BLE001 - one run that fails leaves the others
                    print(
                        f"{family} {method} seed {seed} failed\n{traceback.format_exc()}",
                        flush=True,
                    )
                    continue
                rows.append(row)
                write(arguments.output, arguments, rows)
                print(
                    f"{family} {method} seed {seed}: top-1 {100 * row['top1']:.2f}, train loss "
                    f"{row['train_loss']:.3f}, {row['seconds']:.0f} s",
                    flush=True,
                )
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()

"""Fine-tune learned supports on frozen networks, and compare with the same supports untrained.

    python benchmarks/training_supports.py --output results/training_supports

A small network of each family learns generated shapes without merging; then its weights are frozen,
LTM with a learned support takes it to 0.7 of its MACs, and only the mask modules train.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from training_parity import FAMILIES, settings_of

from ltm.data.classification import open_splits
from ltm.data.loading import evaluation_loader
from ltm.data.transforms import image_spec
from ltm.evaluation.accuracy import evaluate
from ltm.training.config import MergeSettings, OptimSettings, Settings, TuneSettings
from ltm.training.models import build
from ltm.training.run import train

QUIET = Console(quiet=True)
SCALE = {
    "classes": 10, "size": 64, "val_images": 1000, "lr": 1e-3, "batch_size": 64, "workers": 0,
    "precision": "32", "warm": 0.0,
}  # fmt: skip


def untrained_top1(settings: Settings) -> float:
    """The accuracy of the converted network as training would start it."""
    splits = open_splits(settings.data)
    torch.manual_seed(settings.run.seed)
    model = build(settings, splits.train.num_classes).model.eval()
    batches = evaluation_loader(splits.val, image_spec(settings.data, model), settings.data)
    return float(evaluate({"it": model}, batches)["it"].correct.double().mean())


def run_once(family: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One network: as it is, merged untrained, and after its mask modules have learned."""
    scale = argparse.Namespace(
        **SCALE, images=options.images, epochs=options.epochs, device=options.device
    )
    plain = settings_of(family, "none", seed, scale)
    with tempfile.TemporaryDirectory() as folder:
        whole = train(plain, Path(folder) / "whole", console=QUIET)
        settings = replace(
            plain,
            model=replace(plain.model, weights=str(Path(folder) / "whole" / "model")),
            merge=MergeSettings(ratio=0.7, method_options=("support=learned",)),
            optim=OptimSettings(
                epochs=options.tuning_epochs, lr=1e-2, weight_decay=0.0, min_lr=1e-4
            ),
            tune=TuneSettings(trainable="mergers"),
        )
        before = untrained_top1(settings)
        tuned = train(settings, Path(folder) / "tuned", console=QUIET)
    return {
        "family": family,
        "seed": seed,
        "whole": whole.metrics["top1"],
        "untrained": before,
        "tuned": tuned.history[-1]["val_top1"],
        "mac_share": tuned.history[-1]["mac_share"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Means over the seeds."""
    lines = [
        "| network | share of MACs | as it is | LTM, untrained | LTM, fine-tuned | gain by seed |",
        "|---|---|---|---|---|---|",
    ]
    for family, name in FAMILIES.items():
        found = [row for row in rows if row["family"] == family]
        if not found:
            continue
        means = [
            f"{100 * statistics.mean(row[kind] for row in found):.2f}"
            for kind in ("whole", "untrained", "tuned")
        ]
        gains = ", ".join(f"{100 * (row['tuned'] - row['untrained']):+.1f}" for row in found)
        lines.append(f"| {name} | {found[0]['mac_share']:.3f} | {' | '.join(means)} | {gains} |")
    return "\n".join(lines)


def main() -> None:
    """Run all, writing after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("results/training_supports"))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=10, help="of the network without merging")
    parser.add_argument("--tuning-epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        for family in options.families:
            rows.append(run_once(family, seed, options))
            print(rows[-1], flush=True)
            about = {
                "settings": {name: str(value) for name, value in vars(options).items()},
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
                "cores": torch.get_num_threads(),
                "torch": torch.__version__,
                "timm": timm.__version__,
                "python": platform.python_version(),
                "rows": rows,
            }
            text = json.dumps(about, indent=1) + "\n"
            (options.output / "training_supports.json").write_text(text, encoding="utf-8")
            heading = (
                "# Learned supports on frozen networks, untrained and fine-tuned\n\n"
                f"{options.images} generated images of 10 classes at 64 px, 1,000 others; top-1 "
                f"(%), means over seeds; {options.epochs} epochs without merging, then "
                f"{options.tuning_epochs} of the mask modules alone.\n\n"
            )
            page = heading + table(rows) + "\n"
            (options.output / "training_supports.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

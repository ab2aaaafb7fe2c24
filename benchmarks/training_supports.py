"""Fine-tune a learned support on a frozen network, and compare with the same support untrained.

    python benchmarks/training_supports.py --weights vit_tiny_patch16_224.safetensors \
        --data imagenet-val.zip --output results/training_supports

ViT-Ti keeps its ImageNet weights; LTM with a learned support takes it to a share of its MACs, and
only the mask modules train, on half of the images. The other half is what accuracies are of.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from ltm.data.classification import open_splits
from ltm.data.loading import evaluation_loader
from ltm.data.transforms import image_spec
from ltm.evaluation.accuracy import evaluate, paired_interval
from ltm.training.config import Settings, from_mapping
from ltm.training.models import build
from ltm.training.run import train


def settings_of(options: argparse.Namespace, ratio: float) -> Settings:
    """Fine-tuning as `ltm finetune` does it, with a learned support."""
    return from_mapping(
        {
            "model": {"name": "vit_tiny_patch16_224", "weights": str(options.weights)},
            "merge": {"ratio": ratio, "method_options": ["support=learned"]},
            "data": {
                "source": str(options.data),
                "holdout_ratio": 0.5,
                "batch_size": options.batch_size,
                "workers": options.workers,
            },
            "augment": {"scale": [0.6, 1.0], "color_jitter": 0.0, "auto_augment": None,
                        "erase": 0.0, "mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0},
            "optim": {"epochs": options.epochs, "lr": options.lr, "weight_decay": 0.0},
            "tune": {"trainable": "mergers"},
            "run": {"seed": 0, "device": options.device},
        }
    )  # fmt: skip


def correct(model: nn.Module, settings: Settings) -> Tensor:
    """Which held-out images a network gets right."""
    images = open_splits(settings.data).val
    batches = evaluation_loader(images, image_spec(settings.data, model), settings.data)
    return evaluate({"it": model.eval()}, batches)["it"].correct


def run_once(options: argparse.Namespace, ratio: float) -> dict[str, Any]:
    """The network as it is, merged untrained, and after its mask modules have learned."""
    settings, start = settings_of(options, ratio), time.perf_counter()
    plain = replace(settings, merge=replace(settings.merge, method="none", method_options=()))
    num_classes = open_splits(settings.data).train.num_classes
    whole = correct(build(plain, num_classes).model, settings)
    untrained = correct(build(settings, num_classes).model, settings)
    print(f"untrained {100 * untrained.double().mean():.2f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run = train(settings, folder)
        assert run.model is not None
        tuned = correct(run.model, settings)
    gain = paired_interval(tuned, untrained)
    return {
        "ratio": ratio,
        "mac_share": run.history[-1]["mac_share"],
        "num_images": len(whole),
        "whole": float(whole.double().mean()),
        "untrained": float(untrained.double().mean()),
        "tuned": float(tuned.double().mean()),
        "gain": [gain.difference, gain.low, gain.high],
        "history": [[row["train_loss"], row["val_top1"]] for row in run.history],
        "seconds": time.perf_counter() - start,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """One row a ratio."""
    lines = [
        "| share of MACs | as it is | LTM, untrained | LTM, fine-tuned | gain (95%) |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        tops = " | ".join(f"{100 * row[kind]:.2f}" for kind in ("whole", "untrained", "tuned"))
        gain = "{:+.2f} ({:+.2f} to {:+.2f})".format(*(100 * part for part in row["gain"]))
        lines.append(f"| {row['mac_share']:.3f} | {tops} | {gain} |")
    return "\n".join(lines)


def main() -> None:
    """Run all, writing after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True, help="ViT-Ti/16 in timm's keys")
    parser.add_argument("--data", type=Path, required=True, help="ImageNet validation images")
    parser.add_argument("--output", type=Path, default=Path("results/training_supports"))
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.7])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for ratio in options.ratios:
        rows.append(run_once(options, ratio))
        about = {
            "settings": {
                name: value.name if isinstance(value, Path) else value
                for name, value in vars(options).items()
            },
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "torch": torch.__version__,
            "timm": timm.__version__,
            "python": platform.python_version(),
            "rows": rows,
        }
        text = json.dumps(about, indent=1) + "\n"
        (options.output / "training_supports.json").write_text(text, encoding="utf-8")
        heading = (
            "# A learned support on a frozen ViT-Ti, untrained and fine-tuned\n\n"
            f"ImageNet weights; {options.epochs} epochs of the mask modules alone on half of the "
            f"images, top-1 (%) on the other {rows[0]['num_images']}.\n\n"
        )
        page = heading + table(rows) + "\n"
        (options.output / "training_supports.md").write_text(page, encoding="utf-8")
        print(page, flush=True)


if __name__ == "__main__":
    main()

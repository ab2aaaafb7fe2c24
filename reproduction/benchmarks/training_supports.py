"""Fine-tune a learned support in a network that is not trained; compare with it untrained.

    python -m reproduction.benchmarks.training_supports --weights vit_tiny_patch16_224.safetensors \
        --data imagenet-val.zip --output results/training_supports

A trained ViT-Ti keeps its weights; LTM with a learned support takes it to a share of its MACs, and
only the mask modules train. Accuracies are of held-out images: half of them all, where the data
have no images for validation.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ltm.data.datasets import open_splits
from ltm.data.loading import evaluation_loader
from ltm.data.transforms import image_spec
from ltm.evaluation.accuracy import Outputs, evaluate, paired_interval
from ltm.models import changed
from ltm.training.network import build
from ltm.training.run import train
from ltm.training.settings import TrainSettings
from reproduction.benchmarks.recording import machine, parser, plain, write_rows


def settings_of(options: argparse.Namespace, ratio: float) -> TrainSettings:
    """Fine-tuning as `ltm finetune` does it, with a learned support."""
    return changed(TrainSettings(), {
            "model": {"name": "vit_tiny_patch16_224", "weights": str(options.weights)},
            "merge": {"ratio": ratio, "method_options": ["support=learned", "weights=uniform"]},
            "data": {
                "source": str(options.data),
                "holdout_ratio": 0.5,
                "batch_size": options.batch_size,
                "epoch_images": options.epoch_images,
                "workers": options.workers,
            },
            "augment": {"scale": [0.6, 1.0], "color_jitter": 0.0, "auto_augment": None,
                        "erase": 0.0, "mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0},
            "optim": {"epochs": options.epochs, "lr": options.lr, "weight_decay": 0.0},
            "tune": {"trainable": "mergers"},
            "run": {"seed": 0, "device": options.device},
        })  # fmt: skip


def answers(model: nn.Module, settings: TrainSettings) -> Outputs:
    """What a network says about the held-out images."""
    images = open_splits(settings.data).val
    batches = evaluation_loader(images, image_spec(settings.data, model), settings.data)
    return evaluate({"it": model.eval()}, batches)["it"]


def run_once(options: argparse.Namespace, ratio: float) -> dict[str, Any]:
    """The network as it is, merged untrained, and after its mask modules have learned."""
    settings, start = settings_of(options, ratio), time.perf_counter()
    plain = replace(settings, merge=replace(settings.merge, method="none", method_options=()))
    num_classes = open_splits(settings.data).train.num_classes
    whole = answers(build(plain, num_classes).model, settings)
    untrained = answers(build(settings, num_classes).model, settings)
    with tempfile.TemporaryDirectory() as folder:
        run = train(settings=settings, output=folder, say=print)
        assert run.model is not None
        tuned = answers(run.model, settings)
    gain = paired_interval(tuned.correct, untrained.correct)
    less = untrained.loss.double() - tuned.loss.double()
    spread = 1.96 * float(less.std()) / len(less) ** 0.5
    return {
        "ratio": ratio,
        "mac_share": run.history[-1]["mac_share"],
        "num_images": len(less),
        "top1": [float(x.correct.double().mean()) for x in (whole, untrained, tuned)],
        "loss": [float(x.loss.double().mean()) for x in (whole, untrained, tuned)],
        "gain": [gain.difference, gain.low, gain.high],
        "less_loss": [float(less.mean()), float(less.mean()) - spread, float(less.mean()) + spread],
        "history": [[row["train_loss"], row["val_top1"]] for row in run.history],
        "seconds": time.perf_counter() - start,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """One row a ratio."""
    lines = [
        "| share of MACs | | as it is | LTM, untrained | LTM, fine-tuned | better by (95%) |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        share, between = f"{row['mac_share']:.3f}", "{:+.2f} ({:+.2f} to {:+.2f})"
        tops = " | ".join(f"{100 * value:.2f}" for value in row["top1"])
        gain = between.format(*(100 * part for part in row["gain"]))
        lines.append(f"| {share} | top-1 | {tops} | {gain} |")
        losses = " | ".join(f"{value:.3f}" for value in row["loss"])
        less = between.replace(".2f", ".3f").format(*row["less_loss"])
        lines.append(f"| {share} | loss | {losses} | {less} |")
    return "\n".join(lines)


def main() -> None:
    """Run all, writing after each."""
    arguments = parser(__doc__)
    arguments.add_argument("--weights", type=Path, required=True, help="ViT-Ti/16 in timm's keys")
    arguments.add_argument("--data", type=Path, required=True, help="images with labels")
    arguments.add_argument("--output", type=Path, default=Path("results/training_supports"))
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0.5])
    arguments.add_argument("--epochs", type=int, default=6)
    arguments.add_argument("--lr", type=float, default=0.2)
    arguments.add_argument("--epoch-images", type=int, default=0, help="0 for all")
    arguments.add_argument("--batch-size", type=int, default=50)
    arguments.add_argument("--workers", type=int, default=0)
    arguments.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    for ratio in options.ratios:
        rows.append(run_once(options, ratio))
        about = {"settings": plain(options), **machine(None if on_gpu else torch.device("cpu"))}
        heading = (
            "# A learned support in a ViT-Ti whose weights stay, untrained and fine-tuned\n\n"
            f"{options.weights.stem}, {options.data.stem}; {options.epochs} epochs of the mask "
            f"modules alone; top-1 (%) and loss on {rows[0]['num_images']:,} held-out images.\n\n"
        )
        page = heading + table(rows) + "\n"
        write_rows(options.output / "training_supports", about, rows, page)
        print(page, flush=True)


if __name__ == "__main__":
    main()

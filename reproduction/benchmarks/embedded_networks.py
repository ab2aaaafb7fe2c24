"""Train the small networks that come with the package and show themselves in `ltm serve`.

    python -m reproduction.benchmarks.embedded_networks --output runs/embedded

Generated shapes of 20 classes at 96 px, a fixed seed, one core, about a quarter of an hour each.
Weights go into the package in half precision. Their accuracy, as stored, is that on 1,000 images of
the test split; which epoch is kept was decided on others.
"""

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ltm.data.config import AugmentConfig, DataConfig
from ltm.data.datasets import open_dataset
from ltm.data.loading import evaluation_loader
from ltm.evaluation.accuracy import evaluate, summarise
from ltm.evaluation.records import describe
from ltm.training.recipes import small_network
from ltm.training.run import train
from ltm.web.networks import CLASSES, EMBEDDED, SIDE, embedded_network, weights_path
from reproduction.benchmarks.recording import parser, write_json

VAL_IMAGES = 1000
SOURCE = f"shapes:classes={CLASSES},size={SIDE},images=8000,val_images={VAL_IMAGES}"


def keep(name: str, run: Path) -> None:
    """Put a run's weights into the package, in half precision."""
    weights = load_file(run / "model" / "model.safetensors")
    target = weights_path(name)
    target.parent.mkdir(exist_ok=True)
    save_file({key: value.half().contiguous() for key, value in weights.items()}, target)


def accuracy(name: str) -> float:
    """Top-1 of a network as the package has it, on images that had no part in its training."""
    network = embedded_network(name)
    loader = evaluation_loader(
        open_dataset(SOURCE, split="test"), network.spec, DataConfig(batch_size=100, workers=0)
    )
    return summarise(evaluate({name: network.model}, loader)[name]).top1


def main() -> None:
    """Train, keep, measure and write what was found."""
    options = parser(__doc__)
    options.add_argument("--networks", nargs="+", default=list(EMBEDDED), choices=list(EMBEDDED))
    options.add_argument("--epochs", type=int, default=12)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--output", type=Path, default=Path("runs/embedded"))
    args = options.parse_args()
    for name in args.networks:
        run = args.output / name.lower()
        settings = small_network(
            EMBEDDED[name].model,
            EMBEDDED[name].words,
            SOURCE,
            epochs=args.epochs,
            seed=args.seed,
            augment=AugmentConfig.light(),
        )
        train(settings=settings, output=run, resume="auto", say=print)
        keep(name, run)
    report = {
        "command": f"python -m reproduction.benchmarks.embedded_networks --epochs {args.epochs}",
        "seed": args.seed,
        "images": SOURCE,
        "networks": {
            name: {
                "top1": accuracy(name),
                "test_images": VAL_IMAGES,
                "bytes": weights_path(name).stat().st_size,
            }
            for name in EMBEDDED
        },
        "environment": dataclasses.asdict(describe(torch.device("cpu"))),
    }
    write_json(args.output / "embedded_networks.json", report)


if __name__ == "__main__":
    main()

"""Speed of exported LTM networks against their exported originals, in ONNX Runtime on a CPU.

    python -m reproduction.benchmarks.export_speed --weights vit_tiny_patch16_224.safetensors

ViT-Ti has the weights given, ViT-S none: matching depends on the images, its cost does not. All
files of a network and a batch size run in one loop, in turns; a speed-up is the median of the
ratios within rounds, with its 95% interval.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ltm.api import conversion_of, is_merging, merge_tokens_
from ltm.data.shapes import example_pictures
from ltm.data.transforms import ImageSpec, evaluation_transform
from ltm.deployment.export import compare
from ltm.deployment.formats import deployable, save_onnx, trace
from ltm.deployment.information import describe
from ltm.evaluation.latency import interleaved, speedup, spread
from ltm.evaluation.modes import OnnxModel
from ltm.models import ModelSource, method_config
from reproduction.benchmarks.recording import parser, write_page

ORIGINAL = "original"
METHODS = ("ltm", "ltm-static", "tome")


def export(model: nn.Module, path: Path, images: Tensor, threads: int) -> tuple[OnnxModel, float]:
    """An exported network, and how far it is from torch."""
    ready = deployable(model)
    runner = OnnxModel(save_onnx(trace(ready), path, describe(ready)), threads=threads)
    return runner, compare(ready, runner, images, (len(images),))[0].max_relative_difference


def pictures(number: int) -> Tensor:
    """Generated pictures as both networks take them."""
    transform = evaluation_transform(ImageSpec(mean=(0.5,) * 3, std=(0.5,) * 3), normalize=True)
    return torch.stack([transform(picture.image) for picture in example_pictures(number)])


def measure(name: str, weights: Path | None, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one network."""
    images = pictures(max(args.batch_sizes))
    runners: dict[str, OnnxModel] = {}
    known: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in (ORIGINAL, *METHODS):
            model = ModelSource(model=name, weights=weights).load(untrained=weights is None)
            if method != ORIGINAL:
                merge_tokens_(model, method_config(method, args.ratio))
            runner, apart = export(model, Path(folder) / f"{method}.onnx", images, args.threads)
            runners[method] = runner
            known[method] = {"share_of_macs": _share(model), "max_relative_difference": apart}
        rows = []
        for size in args.batch_sizes:
            calls = {m: partial(runner, images[:size]) for m, runner in runners.items()}
            times = interleaved(calls, torch.device("cpu"), rounds=args.rounds)
            rows += [_row(name, m, size, times, known[m]) for m in runners]
            print(*rows[-len(runners) :], sep="\n", flush=True)
    return rows


def _share(model: nn.Module) -> float:
    if not is_merging(model):
        return 1.0
    done = conversion_of(model)
    return done.macs_after / done.macs_before


def _row(
    name: str, method: str, size: int, times: dict[str, list[float]], known: dict[str, Any]
) -> dict[str, Any]:
    gain = speedup(times[ORIGINAL], times[method])
    return {
        "model": name,
        "method": method,
        "batch": size,
        **known,
        "milliseconds": 1e3 * spread(times[method]).median,
        "speedup": gain.median,
        "interval": f"{gain.low:.2f} to {gain.high:.2f}",
    }


def main() -> None:
    """Export, time in turns, and write what was found."""
    options = parser(__doc__)
    options.add_argument("--weights", type=Path, help="weights of ViT-Ti; untrained without")
    options.add_argument("--ratio", type=float, default=0.7)
    options.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--output", type=Path, default=Path("results/export"))
    args = options.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    weights = {"vit_tiny_patch16_224": args.weights, "vit_small_patch16_224": None}
    rows = [row for name, file in weights.items() for row in measure(name, file, args)]
    given = f" --weights {args.weights.name}" if args.weights else ""
    write_page(
        args.output / "export_speed",
        title="Exported LTM against the exported original, ONNX Runtime, CPU",
        command=f"python -m reproduction.benchmarks.export_speed{given}",
        about={"seed": args.seed, "ratio": args.ratio, "rounds": args.rounds},
        columns={
            "model": "model",
            "method": "method",
            "batch": "batch",
            "share_of_macs": "share of MACs",
            "milliseconds": "ms",
            "speedup": "speed-up",
            "interval": "95% interval",
        },
        rows=rows,
        notes="`ltm` matches tokens image by image, `ltm-static` is the frozen mask, folded to one "
        "product. All files of a model and a batch size ran in one loop, in turns.",
    )


if __name__ == "__main__":
    main()

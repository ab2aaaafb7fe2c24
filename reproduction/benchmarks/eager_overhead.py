"""How long the processor is busy with a forward in eager mode: no GPU, launches that do nothing.

In eager mode a GPU often waits for the processor. Here Triton compiles for a GPU that is not there,
a driver stands in for NVIDIA's, and tokens are few and narrow: little but overhead is left.

python -m reproduction.benchmarks.eager_overhead --output results/eager_overhead.json
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import timm
import torch
import triton
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from triton.backends.compiler import GPUTarget

import ltm
from ltm.kernels import dispatch
from reproduction.benchmarks.recording import parser, write_json

SIDE, CLASSES = 64, 10
SITES, COUNTS = (3, 5, 8), (14, 12, 9)


class _Utils:
    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024

    def unload_module(self, *_: Any) -> None:
        pass

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}


class _Launcher:
    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *_: Any) -> None:
        pass


class _Driver:
    """An H200 that is not there."""

    utils, launcher_cls = _Utils(), _Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def network(config: ltm.LTM | None, statistics_of: DataLoader[Any] | None = None) -> nn.Module:
    """Twelve blocks of next to no work, converted and frozen."""
    model = timm.models.VisionTransformer(
        img_size=SIDE, embed_dim=32, depth=12, num_heads=1, num_classes=CLASSES
    ).eval()
    if config is None:
        return model
    ltm.merge_tokens_(model, config)
    if statistics_of is not None:
        before = dispatch.enable(False)
        ltm.collect_statistics_(model, statistics_of)
        dispatch.enable(before)
    return ltm.freeze_(model)


def main() -> None:
    """Print the table, and write it."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=400)
    options.add_argument("--output", type=Path)
    arguments = options.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(_Driver())  # pyright: ignore[reportArgumentType]
    dispatch._runs_on = lambda x: x.device.type == "cpu"  # noqa: SLF001
    images = TensorDataset(torch.randn(40, 3, SIDE, SIDE), torch.arange(40) % CLASSES)
    planned: dict[str, Any] = {"sites": SITES, "counts": COUNTS}
    models = {
        "original": network(None),
        "static": network(ltm.LTM(**planned, support=ltm.Learned(), weights="uniform")),
        "matching": network(ltm.LTM(**planned, weights="uniform")),
        "weighted": network(ltm.LTM(**planned), DataLoader(images, batch_size=20)),
    }
    x = torch.randn(1, 3, SIDE, SIDE)
    times: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for turn in range(arguments.rounds + 20):
            for name, model in models.items():
                start = time.perf_counter()
                model(x)
                if turn >= 20:
                    times[name].append(1e6 * (time.perf_counter() - start))
    median = {name: round(statistics.median(values)) for name, values in times.items()}
    for name, microseconds in median.items():
        print(f"{name:10} {microseconds} us, {microseconds / median['original']:.2f}")
    if arguments.output is not None:
        result = {
            "setting": f"12 blocks, {(SIDE // 16) ** 2} patches, width 32, one image, one thread",
            "sites": SITES,
            "counts": COUNTS,
            "microseconds": median,
            "rounds": arguments.rounds,
            "versions": {m.__name__: m.__version__ for m in (torch, triton, timm)},
            "command": "python -m reproduction.benchmarks.eager_overhead",
            "seed": 0,
        }
        write_json(arguments.output, result)


if __name__ == "__main__":
    main()

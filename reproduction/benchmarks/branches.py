"""Does it pay to find the attention that tokens receive while attention goes on?

    python -m reproduction.benchmarks.branches --output results/speed/branches.json

In a CUDA graph both can run side by side. Each network is captured several times with branches and
without, and as the original, and all take turns. Then graphs are replayed on random images: a branch
that began too early would show as another answer than without branches.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

import timm
import torch

import ltm
from ltm.adapters import blocks
from ltm.core.patches import embed_by_product_
from reproduction.benchmarks.long_sequences import timed
from reproduction.benchmarks.recording import machine, parser, write_json

CASES = (
    ("vit_base_patch16_siglip_224", 224, 32),
    ("vit_base_patch16_224", 224, 128),
    ("vit_base_patch16_224", 224, 1),
    ("vit_small_patch16_224", 224, 32),
)
REPLAYED = (
    ("vit_base_patch16_siglip_224", 224, 1),
    ("vit_base_patch16_384", 384, 1),
    ("vit_small_patch16_224", 224, 32),
)
CAPTURES = 3


def _made(name: str, size: int) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return timm.create_model(name, img_size=size).eval()


def _merging(name: str, size: int) -> Any:
    model = _made(name, size)
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.7, weights="uniform"), size)
    ltm.freeze_(model)
    return model.half()


def _captured(model: Any, images: torch.Tensor, *, branches: bool) -> Any:
    marking = blocks.mark
    if not branches:
        blocks.mark = lambda _: None
    try:
        return ltm.capture(model, images)
    finally:
        blocks.mark = marking


def _race(name: str, size: int, batch: int) -> dict[str, Any]:
    images = torch.randn(batch, 3, size, size, device="cuda").half()
    original = _made(name, size)
    embed_by_product_(original)
    networks = {("original", 0): ltm.capture(original.half(), images)}
    for number in range(CAPTURES):
        for branches in (False, True):
            key = "with branches" if branches else "without", number
            networks[key] = _captured(_merging(name, size), images, branches=branches)
    times: dict[tuple[str, int], list[float]] = {network: [] for network in networks}
    for number in range(8):
        order = random.Random(number).sample(list(networks), len(networks))  # noqa: S311
        for network in order:
            took = timed(networks[network], images, milliseconds=25)
            if number > 0:  # the first round warms up
                times[network].append(took)
    row: dict[str, Any] = {"model": name, "px": size, "batch": batch}
    row |= {"without": [], "with branches": []}
    for (kind, _), taken in times.items():
        if kind != "original":
            pairs = zip(times["original", 0], taken, strict=True)
            row[kind].append(statistics.median(a / b for a, b in pairs))
    return row


def _replay(name: str, size: int, batch: int, *, times: int = 60) -> dict[str, Any]:
    """How often a graph with branches gives exactly what it gave before, and one without."""
    model, images = _merging(name, size), torch.randn(batch, 3, size, size, device="cuda").half()
    branching, plain = (_captured(model, images, branches=on) for on in (True, False))
    again = same = 0
    for _ in range(times):
        given = torch.randn_like(images)
        found = branching(given)
        again += torch.equal(found, branching(given))
        same += torch.equal(found, plain(given))
    return {"model": name, "px": size, "batch": batch, "images": times, "again": again,
            "as without branches": same}  # fmt: skip


@torch.no_grad()
def main() -> None:
    """Time every case, replay graphs, and write what was found."""
    options = parser(__doc__)
    options.add_argument("--output", type=Path, required=True)
    output = options.parse_args().output
    command = f"python -m reproduction.benchmarks.branches --output {output}"
    about = {"command": command, "date": time.strftime("%Y-%m-%d"), **machine()}
    rows, replays = [_race(*case) for case in CASES], [_replay(*case) for case in REPLAYED]
    write_json(output, {**about, "rows": rows, "replays": replays})


if __name__ == "__main__":
    main()

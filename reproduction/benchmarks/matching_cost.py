"""What a matching costs as tokens grow: time, memory, and its share of a forward.

    python -m reproduction.benchmarks.matching_cost --output results/speed/matching_cost
    python -m reproduction.benchmarks.matching_cost --plot results/speed/matching_cost.json

One image through ViT-B, 0.70 of its multiply-adds, half precision, CUDA graphs. The matching of a
site is everything from its tokens to the merged ones. `all pairs` lets any token join any other,
`two sides` even ones odd ones only (`matching="alternate"`). Memory is what a matching of the first
site's tokens takes at its peak beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch

import ltm
from ltm.api import mergers
from ltm.core.matching import Rule, match
from ltm.core.patches import embed_by_product_
from reproduction.benchmarks.recording import machine, parser, table, write_rows

SIDES = (14, 24, 32, 37, 48, 64, 96, 128)
"""Patches along an image: 196 to 16,384 tokens."""
PATCH, WIDTH = 16, 768
MATCHINGS = {"all pairs": "free", "two sides": "alternate"}


def _captured(run: Callable[[], object], milliseconds: float = 60) -> float:
    """Milliseconds of a graph, the median of five."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times, repeats = [], 5
    for _ in range(6):
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / repeats)
        repeats = max(3, round(milliseconds / 5 / times[-1]))
    return sorted(times[1:])[2]


def _matching(num_in: int, num_out: int, alternate: bool, sized: bool) -> Callable[[], object]:
    """Who leaves, and the merge, of tokens with a class token before them."""
    torch.manual_seed(0)
    tokens = torch.randn(1, num_in + 1, WIDTH, device="cuda").half()
    attention = torch.rand(1, num_in + 1, device="cuda")
    size = torch.ones(1, num_in + 1, device="cuda") if sized else None
    rule = Rule(
        num_leaving=num_in - num_out, num_prefix=1, protection=1.0, attended=0.5, keep_norm=True,
        alternate=alternate,
    )  # fmt: skip

    def run() -> object:
        merge = match(tokens, rule, size=size, attention=attention).merge
        return merge.apply(tokens, size)

    return run


def _memory(run: Callable[[], object]) -> float:
    """Megabytes at the peak."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _model(side: int, matching: str | None) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = timm.create_model("vit_base_patch16_224", img_size=PATCH * side).eval()
    if matching is None:
        embed_by_product_(model)
    else:
        support = ltm.Matched(matching=matching)  # pyright: ignore[reportArgumentType]
        config = ltm.LTM(ratio=0.7, weights="uniform", support=support)
        ltm.merge_tokens_(model, config, PATCH * side)
        ltm.freeze_(model)
    return model.half()


def _row(side: int) -> dict[str, Any]:
    images = torch.randn(1, 3, PATCH * side, PATCH * side, device="cuda").half()
    original = _model(side, None)
    row: dict[str, Any] = {"tokens": side * side}
    row["original_ms"] = _captured(lambda: original(images))
    for name, matching in MATCHINGS.items():
        model = _model(side, matching)
        sites = [merger.site for _, merger in mergers(model)]
        runs = [
            _matching(site.num_in, site.num_out, matching == "alternate", sized=place > 0)
            for place, site in enumerate(sites)
        ]
        row[f"{name}, sites"] = [[site.num_in, site.num_out] for site in sites]
        row[f"{name}, forward_ms"] = _captured(lambda model=model: model(images))
        row[f"{name}, matching_ms"] = [_captured(run) for run in runs]
        row[f"{name}, share"] = sum(row[f"{name}, matching_ms"]) / row[f"{name}, forward_ms"]
        row[f"{name}, memory_mb"] = _memory(runs[0])
        row[f"{name}, speed"] = row["original_ms"] / row[f"{name}, forward_ms"]
    torch.cuda.empty_cache()
    return row


def _page(rows: list[dict[str, Any]]) -> str:
    head = ["tokens", "original, ms"]
    for name in MATCHINGS:
        head += [f"{name}: first site, ms", "share of the forward", "memory, MB", "speed"]
    lines = []
    for row in rows:
        line = [f"{row['tokens']:,}", f"{row['original_ms']:.2f}"]
        for name in MATCHINGS:
            line += [
                f"{row[f'{name}, matching_ms'][0]:.3f}",
                f"{row[f'{name}, share']:.1%}",
                f"{row[f'{name}, memory_mb']:.1f}",
                f"{row[f'{name}, speed']:.2f}x",
            ]
        lines.append(line)
    return table(head, lines)


def _plot(path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - machines that measure may lack it

    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    tokens = [row["tokens"] for row in rows]
    for name in MATCHINGS:
        first = [row[f"{name}, matching_ms"][0] for row in rows]
        left.loglog(tokens, first, "o-", label=f"matching, {name}")
        right.semilogx(tokens, [100 * row[f"{name}, share"] for row in rows], "o-", label=name)
    left.loglog(tokens, [row["original_ms"] for row in rows], "k--", label="the original's forward")
    left.set(xlabel="tokens", ylabel="ms, one image")
    right.set(xlabel="tokens", ylabel="matching, % of the forward", ylim=(0, None))
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path.with_suffix(".png"), dpi=120)


@torch.no_grad()
def main() -> None:
    """Measure every length, or plot what was measured."""
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--output", type=Path)
    options.add_argument("--sides", type=int, nargs="+", default=list(SIDES))
    options.add_argument("--plot", type=Path, help="rows to plot, in place of measuring")
    args = options.parse_args()
    if args.plot is not None:
        _plot(args.plot)
        return
    command = f"python -m reproduction.benchmarks.matching_cost {' '.join(sys.argv[1:])}".rstrip()
    about = {"command": command, "date": time.strftime("%Y-%m-%d"), **machine()}
    rows = []
    for side in args.sides:
        rows.append(_row(side))
        print(json.dumps(rows[-1]), flush=True)
        if args.output is not None:
            write_rows(args.output, about, rows, _page(rows))


if __name__ == "__main__":
    main()

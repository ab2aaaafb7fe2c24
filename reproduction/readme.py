"""README's numbers and pictures, made from rows under results/: `python -m reproduction.readme`.

A part of README between `<!-- made from rows: NAME -->` and `<!-- end -->` is written here. Nothing
else in README states a measurement; tests/test_numbers.py checks both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
from matplotlib.figure import Figure

import ltm
from ltm.data.shapes import example_pictures
from ltm.data.transforms import image_spec
from ltm.report.pictures import enlarge, paint_groups, prepare
from ltm.report.tracing import trace
from ltm.zoo import DEMO_MODELS

ROOT = Path(__file__).parents[1]
ACCURACY = "results/calibration/vit_tiny_patch16_224.json"
SPEED = "results/speed/metrics.json"
RATIOS = "results/speed/vit_tiny_ratios.json"
EXAMPLE = "docs/examples/vit-tiny-0.7/metrics.json"
SHARES = (0.85, 0.7, 0.55, 0.4)
METHODS = {"ltm": "LTM (matched)", "tome": "ToMe", "tofu": "ToFu", "ltmp": "LTMP"}
TIMED = {"ltm-uniform": "ltm", "tome": "tome", "tofu": "tofu"}
STYLES = {"ltm": ("#d55e00", "o"), "tome": ("#0072b2", "^"), "tofu": ("#009e73", "s")}
PART = re.compile(r"(<!-- made from rows: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Write the parts of README, and its pictures."""
    page, images = ROOT / "README.md", ROOT / "docs" / "images"
    page.write_text(updated(page.read_text()))
    accuracy_against_time().savefig(images / "accuracy_time.png", dpi=150)
    what_merges().savefig(images / "merging.png", dpi=110)


def updated(text: str) -> str:
    """README with its parts written anew."""
    return PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}{part[3]}", text)


def headline() -> str:
    """What ViT-Ti gains and loses at 0.7."""
    row = _row("ltm", 0.7)
    change, faster = row["against_base"], speedups()["ltm"][0.7]
    low, high = 100 * change["low"], 100 * change["high"]
    return (
        f"**ViT-Ti on ImageNet at {100 * row['budget']:.0f}% of the multiply-adds: "
        f"{faster:.2f}x as fast on an H200, "
        f"top-1 {100 * row['top1']:.2f}, was {100 * top1('base', 1.0):.2f}** "
        f"(95% interval {low:+.1f} to {high:+.1f}).\n"
    )


def numbers() -> str:
    """Top-1 and speed-up by method, at shares of the multiply-adds."""
    kept = " | ".join(f"{100 * share:.0f}%" for share in SHARES)
    lines = [f"| multiply-adds kept (original: {100 * top1('base', 1.0):.2f}) | {kept} |"]
    lines.append("|---" * (1 + len(SHARES)) + "|")
    for method, name in METHODS.items():
        fast = speedups().get(method, {})
        cells = [
            f"{100 * top1(method, share):.2f}" + (f", {fast[share]:.2f}x" if share in fast else "")
            for share in SHARES
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def speed() -> str:
    """How fast ViT-B is at 0.7 with one image and with 128, by method."""
    names = {"ltm-uniform": "LTM (matched)", "ltm-static": "LTM (static mask)", "tome": "ToMe"}
    fast = [
        f"{name} {_compiled(method, 1):.2f}x and {_compiled(method, 128):.2f}x"
        for method, name in names.items()
    ]
    return f"ViT-B at 70%, everything compiled, at batch 1 and 128:\n{', '.join(fast)}.\n"


def compressed() -> str:
    """What `ltm compress` found on ViT-Ti."""
    run = _read(EXAMPLE)
    lines = [
        "```text",
        f"{'network':10}{'top-1':>7}{'change':>8}{'agreement':>11}{'MACs':>7}{'batch 8':>9}",
    ]
    for method, row in run["networks"].items():
        accuracy, change = row["accuracy"], row["against_base"]
        fast = next(t["speedup"] for t in row["timings"] if t["batch_size"] == 8)
        moved = "" if change is None else f"{100 * change['difference']:+.2f}"
        name = METHODS.get(method, "original").partition(" ")[0]
        lines.append(
            f"{name:10}{100 * accuracy['top1']:7.2f}{moved:>8}"
            f"{100 * accuracy['agreement']:10.1f}%{row['share']:7.2f}{fast:8.2f}x"
        )
    return "\n".join([*lines, "```"]) + "\n"


def accuracy_against_time() -> Figure:
    """Top-1 of ViT-Ti against its measured time, as a share of the original's."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    base = 100 * top1("base", 1.0)
    for method, (colour, marker) in STYLES.items():
        points = sorted(_points(method))
        if points:
            axes.plot(
                *zip(*points, strict=True), color=colour, marker=marker, label=METHODS[method]
            )
    axes.plot(1.0, base, color="#222222", marker="D", linestyle="none", label="original")
    axes.set_xlabel("time of a batch, original = 1")
    axes.set_ylabel("top-1, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def what_merges() -> Figure:
    """Generated images, and below each the groups of patches that became one token."""
    model = timm.create_model(next(iter(DEMO_MODELS)), pretrained=True).eval()
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.4))
    chosen = [example_pictures()[index] for index in (1, 2, 4, 5)]
    spec = image_spec(model=model)
    scenes = prepare([one.image for one in chosen], [one.name for one in chosen], spec)
    merged = trace(model, scenes.inputs)[-1]
    figure = Figure(figsize=(8, 4.3), layout="constrained")
    above, below = figure.subplots(2, len(chosen))
    for index, pixels in enumerate(scenes.pixels):
        above[index].imshow(enlarge(pixels))
        above[index].set_title(f"{merged.grid[0] * merged.grid[1]} patches", fontsize=10)
        below[index].imshow(paint_groups(enlarge(pixels), merged.group_grid(index)))
        below[index].set_title(f"{merged.num_tokens(index)} tokens", fontsize=10)
    for axes in (*above, *below):
        axes.set_axis_off()
    return figure


PARTS = {"headline": headline, "numbers": numbers, "speed": speed, "compressed": compressed}


def top1(method: str, share: float) -> float:
    """Top-1 of ViT-Ti, converted and not trained."""
    return _row(method, share)["top1"]


def _row(method: str, share: float) -> dict[str, Any]:
    rows = _read(ACCURACY)["rows"]
    return next(
        row
        for row in rows
        if row["part"] == "curves" and row["method"] == method and row["budget"] == share
    )


def speedups() -> dict[str, dict[float, float]]:
    """Speed-ups of ViT-Ti by method and share, where they were measured."""
    found: dict[str, dict[float, float]] = {}
    if (ROOT / RATIOS).exists():
        for row in _read(RATIOS)["rows"]:
            method = TIMED.get(row["method"].partition(":")[0])
            if method is not None and row["speedup"] is not None:
                found.setdefault(method, {})[row["ratio"]] = row["speedup"]
    return found


def _points(method: str) -> Iterator[tuple[float, float]]:
    for share, fast in speedups().get(method, {}).items():
        yield 1 / fast, 100 * top1(method, share)


def _compiled(method: str, batch: int) -> float:
    """The speed-up of ViT-B, both sides compiled and captured in a CUDA graph."""
    wanted = ("vit_base_patch16_224", method, 0.7, batch, "compiled-cudagraph", "model", "fp16")
    keys = ("model", "method", "ratio", "batch_size", "mode", "scope", "dtype")
    return next(
        row["speedup"] for row in _read(SPEED)["rows"] if tuple(row[key] for key in keys) == wanted
    )


def _read(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


if __name__ == "__main__":
    main()

"""README's numbers and pictures, made from rows under results/: `python -m reproduction.readme`.

A part of README, and of the pages on tuning, between `<!-- made from rows: NAME -->` and
`<!-- end -->` is written here. Nothing else in README states a measurement; tests/test_numbers.py
checks both.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

import timm
import torch
from matplotlib.figure import Figure

import ltm
from ltm.data.shapes import example_pictures
from ltm.data.transforms import image_spec
from ltm.evaluation.accuracy import paired_interval
from ltm.report.pictures import enlarge, paint_groups, prepare
from ltm.report.tracing import trace
from ltm.zoo import DEMO_MODELS

ROOT = Path(__file__).parents[1]
ACCURACY = "results/calibration/vit_tiny_patch16_224.json"
SPEED = "results/speed/metrics.json"
RATIOS = "results/speed/vit_tiny_ratios.json"
OTHERS = (
    "results/calibration/vit_tiny_tiny_imagenet.json",
    "results/calibration/vit_tiny_avg_tiny_imagenet.json",
)
ROTARY = "results/rotary/rotary_positions.json"
LEARNING = "results/learning/vit_tiny.jsonl"
EXPLORED = "results/learning/exploration.jsonl"
PAGES = ("README.md", "docs/tuning.md", "results/learning.md")
EXAMPLE = "docs/examples/vit-tiny-0.7/metrics.json"
SHARES = (0.85, 0.7, 0.55, 0.4)
METHODS = {"ltm": "LTM (matched)", "tome": "ToMe", "tofu": "ToFu", "ltmp": "LTMP"}
TIMED = {"ltm-uniform": "ltm", "tome": "tome", "tofu": "tofu"}
STYLES = {"ltm": ("#d55e00", "o"), "tome": ("#0072b2", "^"), "tofu": ("#009e73", "s")}
PART = re.compile(r"(<!-- made from rows: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Write the parts of README and of other pages, and README's pictures."""
    for page in PAGES:
        (ROOT / page).write_text(updated((ROOT / page).read_text()))
    images = ROOT / "docs" / "images"
    accuracy_against_time().savefig(images / "accuracy_time.png", dpi=150)
    what_merges().savefig(images / "merging.png", dpi=110)


def updated(text: str) -> str:
    """A page with its parts written anew."""
    return PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}{part[3]}", text)


def headline() -> str:
    """What ViT-Ti gains and loses at 0.7."""
    row = _row("ltm", 0.7)
    change, faster = row["against_base"], speedups()["ltm"][0.7]
    low, high = 100 * change["low"], 100 * change["high"]
    return (
        f"**ViT-Ti on ImageNet at {100 * row['budget']:.0f}% of the multiply-adds: "
        f"{faster:.2f}x as fast on an H200, "
        f"top-1 {100 * row['top1']:.2f} instead of {100 * top1('base', 1.0):.2f}**\n"
        f"({row['num_images']:,} validation images, 95% interval of the change {low:+.1f} to "
        f"{high:+.1f} points; speed at batch 128, fp16, in a CUDA graph).\n"
    )


def numbers() -> str:
    """Top-1 and speed-up by method, at shares of the multiply-adds."""
    kept = " | ".join(f"{100 * share:.0f}%" for share in SHARES)
    lines = [f"| multiply-adds kept (original: top-1 {100 * top1('base', 1.0):.2f}) | {kept} |"]
    lines.append("|---" * (1 + len(SHARES)) + "|")
    for method, name in METHODS.items():
        fast = speedups().get(method, {})
        cells = [
            f"{100 * top1(method, share):.2f}" + (f", {fast[share]:.2f}x" if share in fast else "")
            for share in SHARES
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def compressed() -> str:
    """What `ltm compress` found on ViT-Ti."""
    run = _read(EXAMPLE)
    form, batch = (run["deployment"][key] for key in ("form", "batch_size"))
    assert (form, batch) == ("onnxruntime", 1)  # as the text below says
    lines = [
        "```text",
        f"{'network':10}{'top-1':>7}{'change':>8}{'same class':>12}{'MACs':>7}{'speed':>8}",
    ]
    for method, row in run["networks"].items():
        accuracy, change = row["accuracy"], row["against_base"]
        deployed = (t for t in row["timings"] if t["mode"] == form and t["batch_size"] == batch)
        fast = next(deployed)["speedup"]
        moved = "" if change is None else f"{100 * change['difference']:+.2f}"
        name = METHODS.get(method, "original").partition(" ")[0]
        lines.append(
            f"{name:10}{100 * accuracy['top1']:7.2f}{moved:>8}"
            f"{100 * accuracy['agreement']:11.1f}%{row['share']:7.2f}{fast:7.2f}x"
        )
    evaluated = next(iter(run["networks"].values()))["accuracy"]["num_images"]
    chosen, version = run["num_calibration_images"], run["environment"]["packages"]["ltm"]
    said = (
        f"It chose the schedule on {chosen} of {chosen + evaluated:,} images and evaluated the "
        f'other {evaluated:,}. "Same class": how often a network predicts what the original does. '
        '"Speed": one image at a time in ONNX Runtime, which it recommends here, on two CPU cores; '
        f"version {version}."
    )
    return "\n".join([*lines, "```", "", _paragraph(said)])


def learning() -> str:
    """What each part of LTM adds on ViT-Ti: points of top-1 against the original, and KL."""
    rows = {
        "ToMe, its best schedule": "tome",
        "schedule: ToMe's rule at LTM's sites and counts": "tome at ltm's sites",
        "matching rule: LTM's, same sites and counts": "ltm",
        "LTM's rule, with informative weights": "ltm informative",
        "LTM's rule; schedule, `attended` and `size_power` calibrated": "ltm calibrated",
    }
    lines = _headed("", LEARNED_AT)
    for name, row in rows.items():
        cells = [_change([f"{row} {share:g} untrained 0"]) for share in LEARNED_AT]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    unlearned, learned = (f"{_explored(job):.3f}" for job in ("default 0.4", LEARNED_MATCHING))
    at_40 = f"KL {learned} instead of {unlearned}, on training images"
    cells = [at_40 if share == 0.4 else NOT_MEASURED for share in LEARNED_AT]
    lines.append("| LTM's rule, with learned matching | " + " | ".join(cells) + " |")
    cells = [_change([f"ltm calibrated {s:g} all {n}" for n in range(3)]) for s in LEARNED_AT]
    lines.append("| calibrated and distilled, three seeds | " + " | ".join(cells) + " |")
    return "\n".join(["", *lines, "", ""])


def more() -> str:
    """Other networks than that of the table, and what helps at its strongest merging."""
    ahead = []
    for path in OTHERS:
        rows = [row for row in _read(path)["rows"] if row["budget"] == 0.7]
        found = next(row for row in rows if row["method"] == "ltm")["against_tome"]
        ahead.append([100 * found[end] for end in ("difference", "low", "high")])
    (tuned, *of_tuned), (pooled, *of_pooled) = ahead
    rotary = {
        row["method"]: row["loss"]
        for row in _read(ROTARY)["rows"]
        if (row["seed"], row["ratio"], row["position"]) == (0, 0.7, "kept")
    }
    assert rotary["LTM"] > rotary["ToMe"]
    falling = -100 * _learned()["tome 0.4 untrained 0"]["against_base"]["difference"]
    usual, default = (
        -100 * _row(method, 0.4)["against_base"]["difference"] for method in ("tome", "ltm")
    )
    learned = [_learned()[key] for key in TUNED]
    calibrated, *after = (-100 * row["against_base"]["difference"] for row in learned)
    seconds = mean(row["tuning"]["seconds"] for row in learned[1:])
    elsewhere = (
        f"On Tiny-ImageNet at 70%, LTM is {tuned:.2f} points above ToMe on a fine-tuned ViT-Ti "
        f"(95% interval {of_tuned[0]:+.2f} to {of_tuned[1]:+.2f}), and level with it on a ViT "
        f"without class token ({pooled:+.2f}, {of_pooled[0]:+.2f} to {of_pooled[1]:+.2f}; "
        "[both](results/accuracy.md#two-other-networks)). On a small ViT with rotary positions it "
        "is [not better than ToMe](results/rotary.md)."
    )
    stronger = (
        f"At 40%, LTM's default schedule loses {default:.2f} points, ToMe's {usual:.2f}, and "
        f"ToMe's other schedule {falling:.2f}. A schedule of LTM calibrated on unlabelled training "
        f"images loses {calibrated:.2f}. Distillation from the original, without labels too, cuts "
        f"that to {mean(after):.2f}: it trained all parameters for {seconds:.0f} s on an H200 "
        "([what each part adds](docs/tuning.md))."
    )
    large, tome, one, static = (
        f"{_compiled(method, batch):.2f}x"
        for method, batch in (
            ("ltm-uniform", 128), ("tome", 128), ("ltm-uniform", 1), ("ltm-static", 1)
        )
    )  # fmt: skip
    larger = (
        "A ViT-B with random weights at 70%, compiled and captured like the original, runs at "
        f"{large} of its speed at batch 128 (ToMe at {tome}). With one image it runs at {one}, or "
        f"at {static} with a static mask, which is one trained pattern for all images."
    )
    return "\n".join(map(_paragraph, (elsewhere, stronger, larger)))


def bound() -> str:
    """The information bottleneck's part, with paired intervals of 95%."""
    rows = {
        "none": "ltm {} untrained 0",
        "none, calibrated": "ltm calibrated {} untrained 0",
        "weights: tokens weigh by the bound too": "ltm informative {} untrained 0",
        "weights, gains trained": GAINS,
        "what leaves: the bound protects, not the attention": "ltm bound decides {} untrained 0",
        "what leaves: nothing protects": "ltm without protection {} untrained 0",
        "distilled, weights not by the bound": "ltm {} all 0",
        "distilled, the bound in weights and in the loss": "ltm with the bound {} all 0",
    }
    lines = _headed("", LEARNED_AT[:3])
    for name, key in rows.items():
        cells = [_with_interval(key.format(f"{share:g}")) for share in LEARNED_AT[:3]]
        if set(cells) == {NOT_MEASURED}:
            continue
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(["", *lines, "", ""])


def peers() -> str:
    """Other methods on ViT-Ti, as they are and calibrated."""
    lines = _headed("untrained", LEARNED_AT)
    for name, row in PEERS.items():
        cells = [_change([f"{row} {share:g} untrained 0"]) for share in LEARNED_AT]
        if set(cells) != {NOT_MEASURED}:
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(["", *lines, "", ""])


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


PARTS = {
    "headline": headline,
    "numbers": numbers,
    "compressed": compressed,
    "more": more,
    "learning": learning,
    "bound": bound,
    "peers": peers,
}
LEARNED_AT = (0.7, 0.55, 0.4, 0.3)
LEARNED_MATCHING = "40 embed only ste"
GAINS = "ltm gains {} mergers 0"
EARLIER = {
    "informative weights": "ltm informative {} untrained 0",
    "gains trained": GAINS,
    "no protection": "ltm without protection {} untrained 0",
}
"""Keys in the tuning benchmark for methods of the evaluation without training."""
NOT_MEASURED = "not measured"
TUNED = ("ltm calibrated 0.4 untrained 0", *(f"ltm calibrated 0.4 all {n}" for n in range(3)))
PEERS = {
    "ToMe (decreasing below 0.5)": "tome",
    "ToMe, calibrated": "tome calibrated",
    "ToFu": "tofu",
    "ToFu at LTM's sites": "tofu at ltm's sites",
    "PiToMe": "pitome",
    "PiToMe, every block protects": "pitome protecting everywhere",
    "PiToMe, calibrated": "pitome calibrated",
    "DiffRate": "diffrate",
    "DiffRate, calibrated": "diffrate calibrated",
    "DTEM, untrained": "dtem",
    "LTMP, thresholds set on images": "ltmp",
    "LTM": "ltm",
    "LTM, calibrated": "ltm calibrated",
}
"""Names of the rows of `reproduction.benchmarks.learning`."""


def _paragraph(text: str) -> str:
    return fill(text, 118, break_long_words=False, break_on_hyphens=False) + "\n"


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


def _headed(corner: str, shares: Sequence[float]) -> list[str]:
    """The first lines of a table with a column a share."""
    heads = " | ".join(f"{share:.2f}" for share in shares)
    return [f"| {corner} | {heads} |", "|---" * (1 + len(shares)) + "|"]


def _change(keys: Sequence[str]) -> str:
    """Points against the original and KL, means over rows of the tuning benchmark."""
    found = [row for row in map(_learned().get, keys) if row is not None]
    if len(found) < len(keys):
        return NOT_MEASURED
    points = mean(100 * row["against_base"]["difference"] for row in found)
    mark = r"\*" if any(row.get("earlier") for row in found) else ""
    return f"{points:+.2f}, {mean(row['divergence'] for row in found):.3f}{mark}"


def _with_interval(key: str) -> str:
    row = _learned().get(key)
    if row is None:
        return NOT_MEASURED
    low, high = (100 * row["against_base"][end] for end in ("low", "high"))
    return f"{_change([key])} ({low:+.2f} to {high:+.2f})"


@cache
def _learned() -> dict[str, Any]:
    """Rows of the tuning benchmark by key; where it lacks one, that of an earlier evaluation."""
    rows = _read(ACCURACY)["rows"]
    right = {id(row): torch.tensor([letter == "1" for letter in row["correct"]]) for row in rows}
    base = next(right[id(row)] for row in rows if row["method"] == "base")
    found: dict[str, Any] = {}
    for row in rows:
        against = dataclasses.asdict(paired_interval(right[id(row)], base))
        key = EARLIER.get(row["method"], f"{row['method']} {{}} untrained 0")
        found[key.format(f"{row['budget']:g}")] = {
            "against_base": against,
            "divergence": row["divergence"],
            "earlier": True,
        }
    return found | {row["key"]: row for row in _rows(LEARNING)}


def _explored(job: str) -> float:
    """KL on the training images that were not fitted."""
    return next(row["kl"] for row in _rows(EXPLORED) if row.get("job") == job)


def _rows(path: str) -> list[Any]:
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()]


def _read(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


if __name__ == "__main__":
    main()

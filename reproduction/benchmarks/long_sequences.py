"""Speed of captured networks on a GPU, in half precision: long sequences, and other sets.

    python -m reproduction.benchmarks.long_sequences --output results/speed/long_sequences
    python -m reproduction.benchmarks.long_sequences --set families --ratios 0.7
        --output results/speed/families
    python -m reproduction.benchmarks.long_sequences --set one_image --ratios 0.7
        --methods static weighted --output results/speed/one_image

A case is one network at one batch size: the original, and LTM at two shares of its multiply-adds,
matching and static. All are captured, and timed in rounds whose order changes. A ratio is the
original's time over the other's, round by round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch

import ltm
from ltm.core.patches import embed_by_product_
from reproduction.benchmarks.recording import machine, parser, table, write_rows


class Case(NamedTuple):
    """A network, its image size and a batch."""

    model: str
    size: int
    batch: int


CASES = (
    Case("vit_base_patch16_siglip_gap_512", 512, 32),
    Case("vit_base_patch16_384", 384, 64),
    Case("vit_base_patch16_384", 384, 1),
    Case("vit_base_patch14_dinov2", 518, 32),
    Case("vit_base_patch16_224", 1024, 8),
    Case("vit_base_patch14_dinov2", 518, 1),
    Case("vit_base_patch16_224", 512, 32),
    Case("vit_large_patch14_dinov2", 518, 16),
    Case("vit_base_patch16_224", 1024, 1),
)
FAMILIES = tuple(
    Case(model, size, batch)
    for batch in (128, 32, 1)
    for model, size in (
        ("vit_base_patch16_dinov3", 224),
        ("vit_base_patch16_dinov3", 512),
        ("vit_base_patch16_siglip_224", 224),
        ("vit_base_patch16_siglip_384", 384),
        ("transformers ViT-B", 224),
    )
)
"""Rotary positions, attention-pooled heads, and ViT-B of Hugging Face transformers."""
GRIDS = (
    ("swin_tiny_patch4_window7_224", 224),
    ("swin_base_patch4_window7_224", 224),
    ("mobilevit_xs", 224),
    ("mobilevit_s", 224),
    ("efficientvit_b1", 224),
    ("efficientvit_b1", 288),
)
VITS = ("vit_small_patch16_224", "vit_base_patch16_224")
SETS = {
    "long": CASES,
    "families": FAMILIES,
    "one_image": tuple(Case(*grid, 1) for grid in GRIDS),
    "grids": tuple(Case(*grid, 128) for grid in GRIDS),
    "weights": tuple(Case(model, 224, batch) for batch in (128, 1) for model in VITS),
}
METHODS: dict[str, dict[str, Any]] = {
    "matching": {"weights": "uniform"},
    "static": {"weights": "uniform", "support": ltm.Learned()},
    "sides": {"weights": "uniform", "support": ltm.Matched(matching="alternate")},
    "weighted": {},
}
"""Weighted is the default: a matching on sequences, static on grids, with informative weights."""


def _made(case: Case) -> Any:
    settings: dict[str, Any]
    with torch.device("cuda"):
        if case.model.startswith("transformers"):
            import transformers  # noqa: PLC0415 - only these cases need it

            settings = {"image_size": case.size, "num_labels": 1000}
            config = transformers.ViTConfig(**settings)
            return transformers.ViTForImageClassification(config).eval()
        # Made for one size DINOv3 keeps its angles; else they come from the processor every time,
        # which no graph can record.
        settings = {"dynamic_img_size": False} if "dinov3" in case.model else {}
        if case.model.startswith("vit"):
            settings["img_size"] = case.size
        return timm.create_model(case.model, **settings).eval()


def _networks(case: Case, ratios: list[float], methods: list[str]) -> dict[str, Any]:
    """The captured networks of a case, by name."""
    torch.manual_seed(0)
    original = _made(case)
    images = torch.randn(case.batch, 3, case.size, case.size, device="cuda").half()
    state = original.state_dict()
    embed_by_product_(original)  # as freeze_ does with the others
    found = {"original": ltm.capture(original.half(), images)}
    for ratio in ratios:
        for name in methods:
            model = _made(case)
            model.load_state_dict(state)
            ltm.merge_tokens_(model, ltm.LTM(ratio=ratio, **METHODS[name]), case.size)
            if name == "weighted":
                few = torch.randn(32, 3, case.size, case.size, device="cuda")
                ltm.collect_statistics_(model, [(few, torch.arange(32, device="cuda"))])
            ltm.freeze_(model)
            found[f"{name} {ratio:.2f}"] = ltm.capture(model.half(), images)
    return {name: (network, images) for name, network in found.items()}


def timed(network: Any, images: torch.Tensor, *, milliseconds: float) -> float:
    """Milliseconds of one forward, over as many as fill the time."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    network(images)
    end.record()
    torch.cuda.synchronize()
    repeats = max(2, round(milliseconds / max(start.elapsed_time(end), 1e-3)))
    start.record()
    for _ in range(repeats):
        network(images)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def _measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    networks = _networks(case, options.ratios, options.methods)
    times: dict[str, list[float]] = {name: [] for name in networks}
    order = random.Random(0)  # noqa: S311 - only the order of a round
    for number in range(options.rounds + 1):
        for name in order.sample(list(networks), len(networks)):
            took = timed(*networks[name], milliseconds=options.milliseconds)
            if number > 0:  # the first round warms up
                times[name].append(took)
    row: dict[str, Any] = {**case._asdict(), "rounds": options.rounds}
    row["original_ms"] = statistics.median(times["original"])
    for name, taken in times.items():
        if name != "original":
            ratios = [a / b for a, b in zip(times["original"], taken, strict=True)]
            row[f"{name}_ms"], row[name] = statistics.median(taken), statistics.median(ratios)
    return row


def main() -> None:
    """Measure every case, and write a row for each."""
    options = parser(__doc__)
    options.add_argument("--output", type=Path)
    options.add_argument("--set", choices=SETS, default="long")
    options.add_argument("--cases", type=int, nargs="+", help="numbers in the set; all by default")
    options.add_argument("--ratios", type=float, nargs="+", default=[0.7, 0.5])
    options.add_argument("--methods", nargs="+", choices=METHODS, default=["matching", "static"])
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--milliseconds", type=float, default=60)
    args = options.parse_args()
    rows = []
    cases = SETS[args.set]
    for number in args.cases or range(len(cases)):
        began = time.monotonic()
        try:
            rows.append(_measure(cases[number], args))
        except (RuntimeError, ValueError, ImportError) as error:
            print(f"{cases[number]}: {error}", flush=True)
            continue
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}
        print(shown, f"{time.monotonic() - began:.0f} s", flush=True)
        torch.cuda.empty_cache()
        if args.output is not None:
            _write(args, rows)


def _write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    names = [f"{name} {ratio:.2f}" for ratio in args.ratios for name in args.methods]
    head = ["model", "px", "batch", "original, ms", *names]
    lines = [
        [r["model"], r["size"], r["batch"], f"{r['original_ms']:.3f}"]
        + [f"{r[n]:.2f}x" for n in names]
        for r in rows
    ]
    given = " ".join(sys.argv[1:])
    command = f"python -m reproduction.benchmarks.long_sequences {given}".rstrip()
    about = {"command": command, "date": time.strftime("%Y-%m-%d"), **machine()}
    about["dtype"] = "float16, CUDA graphs"
    write_rows(args.output, about, rows, table(head, lines))


if __name__ == "__main__":
    main()

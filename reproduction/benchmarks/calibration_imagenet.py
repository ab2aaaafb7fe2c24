"""Top-1 against multiply-adds, cross-fitted: what is chosen on one half is judged on the other.

    python -m reproduction.benchmarks.calibration_imagenet --model vit_tiny_patch16_224 \
        --weights vit_tiny.safetensors --data imagenet-val.zip --output results/calibration

Images are dealt into two halves. Whatever looks at images (calibrated schedules, LTMP's thresholds,
class statistics, fine-tuning) looks at one half, without labels, and the network is evaluated on
the other; then the halves change places, so that every image is evaluated once. Rows are written as
they are done, and a second call goes on where the first one stopped.
"""

import argparse
import copy
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import ltm
from ltm.api import fit_, measure_share, mergers
from ltm.calibration import CalibrateResult, CalibrateSettings, Calibration
from ltm.evaluation import records
from ltm.evaluation.accuracy import Outputs, evaluate, paired_interval, summarise
from ltm.evaluation.images import load_batches, open_images
from ltm.files import write_text
from ltm.methods import MethodConfig
from ltm.models import ModelSource
from reproduction.benchmarks.recording import parser

BUDGETS = (0.95, 0.85, 0.7, 0.55, 0.4)
ABLATED = (0.7, 0.55)
BASE = "base"
COLUMNS = (
    "| share of MACs | method | top-1 | against the original | against ToMe | agreement "
    "| divergence |"
)
STYLES = {"tome": "s--", "tofu": "^--", "ltmp": "v:", "ltm": "o-", "ltm calibrated": "D-"}

Part = tuple[Tensor, Tensor]
"""Images and their labels; labels are for evaluation only."""


class Bench:
    """A network and two halves of the images."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        host = ModelSource(
            model=args.model, weights=args.weights, model_args=tuple(args.model_args)
        ).load()
        self.host = host.eval().to(self.device)
        self.original = Remembered(self.host)
        self.halves = self._halves()
        self.calibrations: dict[tuple[int, ltm.LTM], Calibration] = {}
        self.results: dict[tuple[int, ltm.LTM, float], CalibrateResult] = {}

    def _halves(self) -> tuple[Part, Part]:
        dataset = open_images(self.args.data, "val", self.args.images)
        loader = load_batches(
            dataset, self.args.data, self.host, batch_size=100, workers=self.args.workers
        )
        batches = list(loader)
        images = torch.cat([batch[0] for batch in batches])
        labels = torch.cat([batch[1] for batch in batches])
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        first, second = order[::2], order[1::2]
        return (images[first], labels[first]), (images[second], labels[second])

    def fitting(self, fold: int) -> Tensor:
        """The images that a fold may look at: the half that it is not evaluated on."""
        return self.halves[1 - fold][0]

    def calibrated(self, fold: int, budget: float, base: ltm.LTM) -> CalibrateResult:
        """A schedule chosen on some of the images of the other half."""
        if (fold, base) not in self.calibrations:
            few = self.fitting(fold)[: self.args.calibration_images]
            settings = CalibrateSettings(trials=self.args.trials, seed=0)
            self.calibrations[fold, base] = Calibration(self.host, few, base, settings)
        if (fold, base, budget) not in self.results:
            start = time.perf_counter()
            result = self.calibrations[fold, base].within(budget)
            self.results[fold, base, budget] = result
            print(f"{result}\n{time.perf_counter() - start:.0f} s", flush=True)
        return self.results[fold, base, budget]

    def outputs(self, build: "Build") -> tuple[Outputs, list[float]]:
        """What networks, one made for each half, say about all the images; and what they cost."""
        parts, shares = [], []
        for fold, (images, labels) in enumerate(self.halves):
            model = copy.deepcopy(self.host)
            shares.append(build(model, fold))
            size = self.args.batch_size
            batches = list(zip(images.split(size), labels.split(size), strict=True))
            found = evaluate({BASE: self.original, "other": model}, batches, original=BASE)
            parts.append(found["other"])
        return joined(parts), shares


class Remembered(nn.Module):
    """A network that answers each batch once, and from memory afterwards."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.answers: dict[bytes, Tensor] = {}

    def forward(self, images: Tensor) -> Tensor:
        few = images[:, :, ::16, ::16].float().cpu().contiguous()
        key = few.numpy().tobytes()
        if key not in self.answers:
            self.answers[key] = self.model(images)
        return self.answers[key]


def joined(parts: list[Outputs]) -> Outputs:
    """Outputs of several sets of images as one."""
    tensors = [f.name for f in dataclasses.fields(Outputs) if f.name != "has_original"]
    found: dict[str, Any] = {n: torch.cat([getattr(p, n) for p in parts]) for n in tensors}
    return Outputs(**found)


Build = Callable[[nn.Module, int], float]
"""Converts a network for a fold, and says what share of the multiply-adds is left."""


def peer(bench: Bench, config: MethodConfig) -> Build:
    """A method as it is; LTMP's thresholds are set on unlabelled images."""

    def build(model: nn.Module, fold: int) -> float:
        report = ltm.merge_tokens_(model, config)
        if isinstance(config, ltm.LTMP):
            fit_(model, bench.fitting(fold)[:256], tolerance=0.01)
            return measure_share(model, bench.fitting(fold)[:256])
        return report.share

    return build


def calibrated(bench: Bench, budget: float, *, statistics: bool = False, **changes: Any) -> Build:
    """LTM with a calibrated schedule, and what may be changed about it afterwards."""

    def build(model: nn.Module, fold: int) -> float:
        found = bench.calibrated(fold, budget, ltm.LTM(weights="uniform")).config
        report = ltm.merge_tokens_(model, dataclasses.replace(found, **changes))
        if statistics:
            ltm.collect_statistics_(model, list(bench.fitting(fold).split(100)))
        return report.share

    return build


def tuned(bench: Bench, budget: float, **changes: Any) -> Build:
    """The calibrated LTM whose mask modules learn to answer as the original does."""
    informed = calibrated(bench, budget, statistics=True, weights="informative", **changes)

    def build(model: nn.Module, fold: int) -> float:
        share = informed(model, fold)
        distil_(model, bench.host, bench.fitting(fold))
        return share

    return build


def distil_(model: nn.Module, original: nn.Module, images: Tensor, epochs: int = 3) -> None:
    """Train mask modules, and nothing else, on unlabelled images."""
    with torch.no_grad():
        targets = torch.cat([original(batch).softmax(-1) for batch in images.split(50)])
    model.requires_grad_(False)
    learning = [p.requires_grad_() for _, m in mergers(model) for p in m.parameters()]
    optimizer = torch.optim.AdamW(learning, lr=3e-3, weight_decay=0.0)
    order = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        losses: list[float] = []
        for places in torch.randperm(len(images), generator=order).split(50):
            outputs = model(images[places]).log_softmax(-1)
            loss = nn.functional.kl_div(outputs, targets[places], reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: divergence {sum(losses) / len(losses):.4f}", flush=True)


def curve_rows(bench: Bench) -> Iterator[tuple[str, float, Build]]:
    """Every method at every budget."""
    yield BASE, 1.0, lambda _model, _fold: 1.0
    for budget in bench.args.budgets:
        yield "tome", budget, peer(bench, ltm.ToMe(ratio=budget))
        yield "tofu", budget, peer(bench, ltm.ToFu(ratio=budget))
        yield "ltm", budget, peer(bench, ltm.LTM(ratio=budget, weights="uniform"))
        yield "ltm calibrated", budget, calibrated(bench, budget)
        yield "ltmp", budget, peer(bench, ltm.LTMP(ratio=budget))


def ablation_rows(bench: Bench) -> Iterator[tuple[str, float, Build]]:
    """The calibrated LTM with one thing changed at a time."""
    for budget in bench.args.ablated:
        blocks: Any = bench.host.blocks
        everywhere = ltm.LTM(ratio=budget, sites=tuple(range(len(blocks))), weights="uniform")
        informed = calibrated(bench, budget, statistics=True, weights="informative")
        yield "informative weights", budget, informed
        yield "gains trained", budget, tuned(bench, budget)
        yield "gains and layers trained", budget, tuned(bench, budget, mlp=True)
        unbiased = calibrated(bench, budget, proportional_attention=False)
        yield "sizes ignored in attention", budget, unbiased
        yield "patches weigh alike", budget, calibrated(bench, budget, attended=0.0)
        yield "sizes count in full", budget, calibrated(bench, budget, size_power=1.0)
        by_mean = calibrated(bench, budget, operators=None, keep_norm=False)
        yield "all sites merge by the mean", budget, by_mean
        yield "all sites keep norms", budget, calibrated(bench, budget, operators=None)
        yield "no protection", budget, calibrated(bench, budget, protections=None, protection=0.0)
        yield "sides as in ToMe", budget, calibrated(bench, budget, matching="alternate")
        yield "every block merges", budget, peer(bench, everywhere)


class Rows:
    """Rows on disk, written whole after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = json.loads(path.read_text())["rows"]

    def find(self, part: str, method: str, budget: float) -> dict[str, Any] | None:
        """A row that is there already."""
        wanted = (part, method, budget)
        return next((r for r in self.rows if (r["part"], r["method"], r["budget"]) == wanted), None)

    def add(self, part: str, method: str, budget: float, outputs: Outputs, **about: Any) -> None:
        """Note a row down, compared with the original and with ToMe at the same budget."""
        row = {"part": part, "method": method, "budget": budget} | dataclasses.asdict(
            summarise(outputs)
        )
        for other, other_budget in ((BASE, 1.0), ("tome", budget)):
            found = self.find("curves", other, other_budget)
            if found is not None and method != other:
                against = paired_interval(outputs.correct, unpacked(found["correct"]))
                row[f"against_{other}"] = dataclasses.asdict(against)
        self.rows.append(row | about | {"correct": packed(outputs.correct)})

    def write(self, about: dict[str, Any]) -> None:
        """Replace the file."""
        write_text(self.path, json.dumps({**about, "rows": self.rows}, indent=1) + "\n")


def packed(correct: Tensor) -> str:
    """Which images were right, one digit each."""
    return "".join("1" if right else "0" for right in correct.tolist())


def unpacked(text: str) -> Tensor:
    """The reverse of `packed`."""
    return torch.tensor([digit == "1" for digit in text])


def write_report(path: Path) -> None:
    """Write the Markdown table and the curves beside the rows."""
    rows = json.loads(path.read_text())["rows"]
    titles = {"curves": "Every method at every budget", "ablation": "One thing changed at a time"}
    lines: list[str] = []
    for part, title in titles.items():
        chosen = [row for row in rows if row["part"] == part]
        if chosen:
            lines += [f"## {title}", "", COLUMNS, "|---" * COLUMNS.count(" | ") + "|---|"]
            chosen.sort(key=lambda row: -row["budget"])
            lines += [_line(row) for row in chosen] + [""]
    path.with_suffix(".md").write_text("\n".join(lines))
    _curves([row for row in rows if row["part"] == "curves"]).savefig(
        path.with_suffix(".png"), dpi=130
    )


def _line(row: dict[str, Any]) -> str:
    share = sum(row["shares"]) / len(row["shares"])
    cells = [
        f"{share:.3f}",
        row["method"],
        f"{100 * row['top1']:.2f}",
        _difference(row.get("against_base")),
        _difference(row.get("against_tome")),
        f"{100 * row['agreement']:.2f}",
        f"{row['divergence']:.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def _difference(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    difference, low, high = (100 * found[key] for key in ("difference", "low", "high"))
    return f"{difference:+.2f} ({low:+.2f} to {high:+.2f})"


def _curves(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for method, style in STYLES.items():
        chosen = sorted((r for r in rows if r["method"] == method), key=lambda r: r["budget"])
        if not chosen:
            continue
        shares = [sum(row["shares"]) / len(row["shares"]) for row in chosen]
        losses = [100 * row["against_base"]["difference"] for row in chosen]
        reach = [
            [100 * (r["against_base"]["difference"] - r["against_base"]["low"]) for r in chosen],
            [100 * (r["against_base"]["high"] - r["against_base"]["difference"]) for r in chosen],
        ]
        axes.errorbar(shares, losses, reach, fmt=style, capsize=2, label=method, markersize=4)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_ylim(bottom=-12)
    axes.set_xlabel("share of the original's multiply-adds")
    axes.set_ylabel("top-1, points from the original (paired 95%)")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def main() -> None:
    """Run what is missing and write the tables."""
    options = parser(__doc__)
    options.add_argument("--model", default="vit_tiny_patch16_224")
    options.add_argument("--weights", type=Path)
    options.add_argument("--model-args", nargs="*", default=[], help="such as depth=4")
    options.add_argument("--name", help="of the files; the model's by default")
    options.add_argument("--data", required=True)
    options.add_argument("--images", type=int, default=2000)
    options.add_argument("--calibration-images", type=int, default=256)
    options.add_argument("--trials", type=int, default=150)
    options.add_argument("--budgets", type=float, nargs="*", default=BUDGETS)
    options.add_argument("--methods", nargs="*", help="of the curves; all by default")
    options.add_argument("--ablated", type=float, nargs="*", default=ABLATED)
    options.add_argument("--batch-size", type=int, default=100)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--output", type=Path, required=True)
    args = options.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    bench, rows = Bench(args), Rows(args.output / f"{args.name or args.model}.json")
    about = {
        "command": " ".join(
            ["python", "-m", "reproduction.benchmarks.calibration_imagenet", *sys.argv[1:]]
        ),
        "environment": dataclasses.asdict(records.describe(bench.device)),
    }
    setting = {
        "device": about["environment"]["device"],
        "calibration": f"{args.calibration_images} images, {args.trials} trials",
    }
    for part, make in (("curves", curve_rows), ("ablation", ablation_rows)):
        for method, budget, build in make(bench):
            if part == "curves" and args.methods and method not in args.methods:
                continue
            if rows.find(part, method, budget) is None:
                outputs, shares = bench.outputs(build)
                rows.add(part, method, budget, outputs, shares=shares, **setting)
                rows.write(about)
                top1, left = rows.rows[-1]["top1"], ", ".join(f"{share:.3f}" for share in shares)
                print(f"{part}: {method} at {left}: top-1 {top1:.4f}", flush=True)
    write_report(args.output / f"{args.name or args.model}.json")


if __name__ == "__main__":
    main()

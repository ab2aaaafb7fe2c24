"""What learning adds: schedules, matching, calibration, distillation, and every peer tuned alike.

    python -m reproduction.benchmarks.learning --weights vit_tiny.safetensors \
        --fit imagenet-train.zip --data imagenet-val.zip --output results/learning

Everything that looks at images looks at `--fit`, without labels: calibration at 300 of them, tuning
at four fifths, the rest decides what is kept. `--data` is evaluated once, at the end of each row.
Rows are written as they are done, and a second call goes on where the first one stopped; `--part i/n`
makes every n-th row, so that processes can share the work. Rows that are not tuned take about two
minutes each on a processor: `--only untrained`.
"""

import argparse
import copy
import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ltm
from ltm.api import fit_, measure_share
from ltm.calibration import CalibrateSettings
from ltm.core.mask_gradient import weigh
from ltm.core.matching import Rule, by_attention, match_least_harm, merge_in_order
from ltm.data.datasets import Splits
from ltm.evaluation import records
from ltm.evaluation.accuracy import evaluate, paired_interval, summarise
from ltm.evaluation.images import load_batches, open_images
from ltm.files import write_text
from ltm.methods import MethodConfig, config_from_dict
from ltm.methods.base import Decision, Hints, Merger, Site
from ltm.methods.ltm.matched import MatchingMerger
from ltm.models import ModelSource
from ltm.training.distillation import Distillation, set_aside
from ltm.training.recipes import FINETUNE, distilling
from ltm.training.run import run_task
from ltm.training.settings import with_options
from reproduction.benchmarks.recording import parser

BASE = "base"
RATIOS = (0.55, 0.4, 0.3, 0.7)
EPOCHS = 10
"""In each, every image is seen `--repeats` times."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What to measure: a method, whether its schedule is calibrated, and how it is tuned."""

    name: str
    ratio: float
    config: MethodConfig
    calibrated: bool = False
    counts_of_ltm: bool = False
    tuned: str = ""
    """What trains; empty for nothing."""
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    @property
    def key(self) -> str:
        return f"{self.name} {self.ratio:g} {self.tuned or 'untrained'} {self.seed}"


class BoundDecides(ltm.LTM):
    """The informative step decides who leaves, in the place of the attention; it weighs nothing."""

    def build(self, site: Site) -> Merger:
        assert isinstance(self.weights, ltm.Informative)
        return BoundDecidesMerger(site, self.matched, self.weights, self.choice_at(site.block))


class BoundDecidesMerger(MatchingMerger):
    """Tokens that the bound wants are protected."""

    def forward(self, tokens: Tensor, hints: Hints) -> Decision:
        k = self.site.num_prefix
        rule = Rule(
            num_leaving=tokens.shape[1] - k - hints.num_out,
            num_prefix=k,
            protection=self.protection,
            attended=self.settings.attended,
            keep_norm=True,
        )
        logits, wanted = weigh(tokens, hints.size, hints.carry, self.step(hints), k)
        found = match_least_harm(tokens, rule, size=hints.size, attention=wanted)
        weight = by_attention(None, tokens, hints.size, hints.importance, rule)
        return Decision(merge=merge_in_order(found, weight, keep_norm=True), values=logits)


class Answers(nn.Module):
    """What a network says of batches that stay where they are; it is asked once for each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.known: dict[int, Tensor] = {}

    def forward(self, images: Tensor) -> Tensor:
        place = images.data_ptr()
        if place not in self.known:
            self.known[place] = self.model(images)
        return self.known[place]


class Bench:
    """A network, images to fit on and images to judge on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        source = ModelSource(
            model=args.model, weights=args.weights, model_args=tuple(args.model_args)
        )
        self.host = source.load().eval().to(self.device)
        self.fitting = open_images(args.fit, "train", None, labelled=False)
        judged = load_batches(
            open_images(args.data, "val", args.images),
            args.data,
            self.host,
            batch_size=250,
            workers=args.workers,
        )
        self.judged = [
            (images.to(self.device), labels.to(self.device)) for images, labels in judged
        ]
        self.answers = Answers(self.host)
        self.few = self._read(300)

    def _read(self, number: int) -> Tensor:
        """The first of the images to fit on."""
        part = self.fitting.take(number)
        batches = load_batches(
            part, self.args.fit, self.host, batch_size=100, workers=0, labelled=False
        )
        return torch.cat([images for images, _ in batches]).to(self.device)

    @cached_property
    def many(self) -> Tensor:
        """All images to fit on, for class statistics."""
        return self._read(len(self.fitting))

    def config_of(self, row: Row) -> MethodConfig:
        """The method with its schedule."""
        if row.counts_of_ltm:
            found = ltm.merge_tokens_(copy.deepcopy(self.host), _plain(row.ratio))
            sites = [site for site in found.sites if site.merges]
            return row.config.scheduled(
                counts=tuple(site.num_out for site in sites),
                sites=tuple(site.block for site in sites),
            )
        if not row.calibrated:
            return row.config
        path = self.args.output / f"{self.args.name}-{row.config.name}-{row.ratio:g}.json"
        if not path.exists():
            settings = CalibrateSettings(budget=row.ratio, trials=self.args.trials)
            found = ltm.calibrate(self.host, self.few, settings, config=row.config)
            write_text(path, json.dumps(found.to_dict(), indent=1) + "\n")
        return config_from_dict(json.loads(path.read_text())["config"])

    def measure(self, row: Row) -> dict[str, Any]:
        """Convert, tune and judge."""
        start = time.perf_counter()
        config = self.config_of(row)
        calibrating = time.perf_counter() - start
        model = copy.deepcopy(self.host)
        share = ltm.merge_tokens_(model, config).share
        if config.needs_images():
            fit_(model, self.few[:128], tolerance=0.01)
            share = measure_share(model, self.few[:128])
        elif not row.tuned and isinstance(config, ltm.LTM) and config.weights is not None:
            fit_(model, self.many)
        tuning: dict[str, Any] = {}
        if row.tuned:
            model, tuning = self.tune(model, row)
        models = {BASE: self.answers, "other": model.eval()}
        outputs = evaluate(models, self.judged, original=BASE)
        found = outputs["other"]
        against = paired_interval(found.correct, outputs[BASE].correct)
        return {
            "name": row.name,
            "ratio": row.ratio,
            "tuned": row.tuned,
            "options": dict(row.options),
            "seed": row.seed,
            "share": share,
            "config": config.to_dict(),
            **dataclasses.asdict(summarise(found)),
            "base_top1": summarise(outputs[BASE]).top1,
            "against_base": dataclasses.asdict(against),
            "calibration_seconds": calibrating,
            "tuning": tuning,
            "seconds": time.perf_counter() - start,
        }

    def tune(self, model: nn.Module, row: Row) -> tuple[nn.Module, dict[str, Any]]:
        """Let the original teach: the task of `ltm compress --tune` and `ltm.finetune`."""
        parts = set_aside(self.fitting)
        train = parts.train.select(list(range(len(parts.train))) * self.args.repeats)
        settings = with_options(
            FINETUNE[distilling(row.tuned)],
            {
                "method": row.config.name,
                "epochs": EPOCHS,
                "batch_size": self.args.batch_size,
                "workers": self.args.workers,
                "seed": row.seed,
                "device": str(self.device),
                "source": self.args.fit,
                "precision": "bf16" if self.device.type == "cuda" else "32",
                **dict(row.options),
            },
        )
        task = Distillation(settings, model=model, splits=Splits(train, parts.val))
        result = run_task(task, None)
        return result.model, result.metrics


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """All rows, the most wanted first."""
    tuned = {"tuned": args.trainable, "options": tuple(json.loads(args.options).items())}
    for seed in range(args.seeds):
        for ratio in args.ratios:
            yield Row(**_calibrated("ltm", _plain(ratio)), seed=seed, **tuned)
    yield from (Row(**at) for ratio in args.ratios for at in _as_they_are(ratio))
    for ratio in args.ratios:
        yield from (Row(**_given(name, config), **tuned) for name, config in peers(ratio).items())
    yield from (row for ratio in args.ratios for row in _parts(ratio, tuned))
    for ratio in args.ratios:
        yield Row(**_given("ltm informative", ltm.LTM(ratio=ratio)))
        decides = BoundDecides(ratio=ratio, weights=ltm.Informative(gain=1.0))
        yield Row(**_given("ltm bound decides", decides))
    for ratio in args.ratios:
        yield Row(**_calibrated("tome", ltm.ToMe(ratio=ratio)), **tuned)
        for method in (ltm.ToMe, ltm.DiffRate, ltm.ToFu, ltm.PiToMe):
            yield Row(**_calibrated(method.name, method(ratio=ratio)))


def _plain(ratio: float) -> ltm.LTM:
    return ltm.LTM(ratio=ratio, weights="uniform")


def _given(name: str, config: MethodConfig) -> dict[str, Any]:
    return {"name": name, "ratio": config.ratio, "config": config}


def _calibrated(name: str, config: MethodConfig) -> dict[str, Any]:
    return {**_given(f"{name} calibrated", config), "calibrated": True}


def _as_they_are(ratio: float) -> Iterator[dict[str, Any]]:
    """Methods without tuning; ToMe and ToFu at LTM's sites and counts too."""
    yield _given("ltm", _plain(ratio))
    yield _calibrated("ltm", _plain(ratio))
    yield from (_given(name, config) for name, config in peers(ratio).items())
    everywhere = ltm.PiToMe(ratio=ratio, protect_from=0.0)
    yield _given("pitome protecting everywhere", everywhere)
    for method in (ltm.ToMe, ltm.ToFu):
        at = _given(f"{method.name} at ltm's sites", method(ratio=ratio))
        yield {**at, "counts_of_ltm": True}


def _parts(ratio: float, tuned: dict[str, Any]) -> Iterator[Row]:
    """What distillation does without calibration, and the bottleneck's part in it."""
    yield Row(**_given("ltm", _plain(ratio)), **tuned)
    bound = {**tuned, "options": (*tuned["options"], ("bound_weight", 0.1))}
    yield Row(**_given("ltm with the bound", ltm.LTM(ratio=ratio)), **bound)
    yield Row(**_given("ltm gains", ltm.LTM(ratio=ratio)), tuned="mergers")


def peers(ratio: float) -> dict[str, MethodConfig]:
    """Each with its best known schedule."""
    falling = ltm.ToMe(ratio=ratio, schedule="decreasing")
    return {
        "tome": falling if ratio < 0.5 else ltm.ToMe(ratio=ratio),
        "tofu": ltm.ToFu(ratio=ratio),
        "pitome": ltm.PiToMe(ratio=ratio),
        "diffrate": ltm.DiffRate(ratio=ratio),
        "dtem": ltm.DTEM(ratio=ratio),
        "ltmp": ltm.LTMP(ratio=ratio),
    }


def main() -> None:
    """Make the rows that are missing."""
    options = parser(__doc__)
    options.add_argument("--model", default="vit_tiny_patch16_224")
    options.add_argument("--model-args", nargs="*", default=[])
    options.add_argument("--weights", type=Path)
    options.add_argument("--fit", required=True)
    options.add_argument("--data", required=True)
    options.add_argument("--images", type=int)
    options.add_argument("--ratios", type=float, nargs="*", default=RATIOS)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--trials", type=int, default=250)
    options.add_argument("--repeats", type=int, default=6)
    options.add_argument("--batch-size", type=int, default=128)
    options.add_argument("--trainable", default="biases")
    options.add_argument("--options", default="{}", help="further settings of the tuning, as JSON")
    options.add_argument(
        "--only", nargs="*", default=[""], help="rows whose name, ratio and so on match a pattern"
    )
    options.add_argument("--part", default="0/1")
    options.add_argument("--deadline", type=float, default=1e9, help="seconds; no row starts later")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--name", default="vit_tiny")
    options.add_argument("--output", type=Path, required=True)
    args = options.parse_args()
    start, (part, parts) = time.perf_counter(), (int(text) for text in args.part.split("/"))
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"{args.name}.jsonl"
    done = set()
    if path.exists():
        done = {json.loads(line)["key"] for line in path.read_text().splitlines()}
    bench = Bench(args)
    wanted = [row for row in rows(args) if any(re.search(text, row.key) for text in args.only)]
    about: dict[str, Any] = {"environment": dataclasses.asdict(records.describe(bench.device))}
    words = [Path(word).name if Path(word).exists() else word for word in sys.argv[1:]]
    about["command"] = " ".join(["python -m reproduction.benchmarks.learning", *words])
    for row in wanted[part::parts]:
        if row.key in done or time.perf_counter() - start > args.deadline:
            continue
        try:
            found = bench.measure(row)
        except (ValueError, RuntimeError) as error:
            print(f"{row.key}: {error}", flush=True)
            continue
        with path.open("a") as file:
            file.write(json.dumps({"key": row.key, **found, **about}) + "\n")
        change, kl = 100 * found["against_base"]["difference"], found["divergence"]
        print(f"{row.key}: {change:+.2f} points, KL {kl:.4f}, {found['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""`ltm demo`: what `make demo` runs. The main job on a network of the package, within a minute."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ltm.cli.commands import Flat, command_line, interrupted, say
from ltm.compression.settings import CompressSettings
from ltm.files import output_folder
from ltm.models import ModelSource, method_config, require_least

if TYPE_CHECKING:
    from ltm.compression.compress import CompressResult
    from ltm.evaluation.latency import Timing

_MODES = {"eager": "PyTorch", "onnxruntime": "ONNX Runtime", "compiled": "torch.compile"}
"""Ways to run a network, and what people call them."""
_BATCHES = (1, 8)
_ROUNDS = 7
_CONTROL_IMAGES = 100
_NEXT = """
Report, with pictures of what merges: {report}
Next, with a network and images of your own:
  ltm compress --model vit_small_patch16_224 --pretrained --data IMAGES --output runs/mine
  ltm export --run runs/mine --data IMAGES
  ltm serve --run runs/mine"""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """How large the demo is, and where it goes to."""

    ratio: float = 0.5
    """Share of the multiply-adds that may remain."""
    images: int = 200
    """How many images to evaluate on."""
    time: bool = True
    """Measure latency, in PyTorch and in ONNX Runtime."""
    compile: bool = False
    """Time torch.compile too, which takes a few minutes."""
    seed: int = 0
    """Of the images."""
    output: Path = Path("runs/demo")
    """Folder for the compressed model and the report."""


def demo(settings: Flat[DemoSettings], *, overwrite: bool = False) -> None:
    """Compress a network that comes with the package, and see what that gains: a minute.

    Needs no download and no training. The network is a vision transformer with 784 tokens that
    names generated shapes. Half of its multiply-adds are merged away; both networks then run on
    the same images, and are timed on this machine.

    Example:
        ltm demo --ratio 0.4 --output runs/demo

    Args:
        settings: how large it is, and where it goes to.
        overwrite: replace the results of something else there.
    """
    from ltm.methods import DEFAULT

    require_least("images", settings.images)
    method_config(DEFAULT, settings.ratio)
    output = settings.output
    with output_folder(output, overwrite=overwrite or _is_own(output)):
        result = _compressed(settings)
        done = not result.interrupted
        timings = _timings(result, settings) if settings.time and done else []
        result = _with_times(result, timings)
        result.save(output)
    if not done:
        interrupted(f"Stopped during {result.interrupted}; {output} holds what was done.")
    control = _accuracy_at_random(result, settings)
    say("")
    for line in _story(result, timings, control):
        say(line)
    say(_NEXT.format(report=output / "report.html"))


def _compressed(settings: DemoSettings) -> CompressResult:
    from ltm.compression.compress import compress

    return compress(
        ModelSource(model="demo_vit", pretrained=True),
        _data(settings),
        CompressSettings(
            ratio=settings.ratio,
            # The default schedule is as good here, and there is a minute for everything.
            calibrate=False,
            time=False,
            bottleneck_images=0,
            workers=0,
            device="cpu",
            seed=settings.seed,
        ),
        folder=settings.output,
        weights="from the package",
        command=command_line("demo", settings),
        say=say,
    )


def _data(settings: DemoSettings) -> str:
    from ltm.zoo import DEMO_DATA

    return f"{DEMO_DATA},val_images={settings.images},seed={settings.seed}"


def _timings(result: CompressResult, settings: DemoSettings) -> list[Timing]:
    """The original and the compressed network in turns, in each mode and batch size."""
    from ltm.api import unmerged_copy
    from ltm.data.datasets import open_dataset
    from ltm.evaluation.images import repeated_images
    from ltm.evaluation.latency import BASE, Candidate, Conditions, measure_latency

    assert result.model is not None
    base, method = unmerged_copy(result.model), result.comparison.method
    modes = ["eager", "onnxruntime", *(["compiled"] if settings.compile else [])]
    candidates = [
        Candidate(method=BASE, model=base),
        Candidate(method=method, model=result.model),
    ]
    found: list[Timing] = []
    dataset = open_dataset(_data(settings), split="val")
    for batch in _BATCHES:
        say(f"Timing batches of {batch}: {', '.join(_MODES[mode] for mode in modes)}")
        found += measure_latency(
            candidates,
            Conditions(
                model="demo_vit", image_size=(224, 224), batch_size=batch, rounds=_ROUNDS, warmup=1
            ),
            modes,
            images=repeated_images(dataset, _data(settings), base, batch),
        )
    return [timing for timing in found if timing.milliseconds is not None]


def _with_times(result: CompressResult, timings: list[Timing]) -> CompressResult:
    """The same result; its report tells the times in PyTorch."""
    eager = [timing for timing in timings if timing.mode == "eager"]
    networks = tuple(
        replace(network, timings=tuple(t for t in eager if t.method == network.method))
        for network in result.comparison.networks
    )
    return replace(result, comparison=replace(result.comparison, networks=networks))


def _accuracy_at_random(result: CompressResult, settings: DemoSettings) -> float:
    """Top-1 where as many tokens merge in the same blocks, but at random."""
    from copy import deepcopy

    from ltm.data.datasets import open_dataset
    from ltm.evaluation.accuracy import evaluate, summarise
    from ltm.evaluation.control import merge_at_random_
    from ltm.evaluation.images import load_batches

    assert result.model is not None
    say("Merging as many tokens at random, as a control")
    control = merge_at_random_(deepcopy(result.model), settings.seed)
    dataset = open_dataset(_data(settings), split="val").take(_CONTROL_IMAGES)
    batches = load_batches(dataset, _data(settings), control, batch_size=20, workers=0)
    return summarise(evaluate({"random": control}, batches)["random"]).top1


def _story(result: CompressResult, timings: list[Timing], control: float) -> list[str]:
    """What was found, the gain first."""
    base, compressed = result.comparison.base, result.comparison.compressed
    assert base is not None
    assert compressed is not None
    assert base.accuracy is not None
    assert compressed.accuracy is not None
    assert compressed.against_base is not None
    number = base.accuracy.num_images
    loss = "no loss" if compressed.against_base.high >= 0 else "a real loss"
    kept = (
        f"{loss} in accuracy: {100 * compressed.accuracy.top1:.1f}% of {number} images right, "
        f"{100 * base.accuracy.top1:.1f}% before."
    )
    least = min(_CONTROL_IMAGES, number)
    macs = f"Multiply-adds an image: {base.gmacs:.2f} billion before, {compressed.gmacs:.2f} now."
    return [
        f"{_gain(timings)} and {kept}" if timings else f"At {compressed.share:.2f}: {kept}",
        "",
        *_time_table(timings),
        f"{macs} Nothing was trained.",
        f"Merging as many tokens at random leaves {100 * control:.1f}% of {least} images right.",
    ]


def _gain(timings: list[Timing]) -> str:
    """What the compressed network gains in the form in which it is fastest over all batches."""
    from math import prod

    def total(mode: str) -> float:
        return prod(t.milliseconds or 0 for t in timings if t.mode == mode)

    best = min({timing.mode for timing in timings}, key=total)
    gains = [
        f"{timing.speedup:.2f}x as fast at batch {timing.batch_size}"
        for timing in timings
        if timing.mode == best and timing.method != timings[0].method
    ]
    return f"{' and '.join(gains)} in {_MODES[best]}"


def _time_table(timings: list[Timing]) -> list[str]:
    """Milliseconds a batch of both networks, in every form."""
    if not timings:
        return []
    found = {(t.mode, t.batch_size, t.method): t for t in timings}
    original = timings[0].method
    rows = [
        f"{_MODES[t.mode]:14}{t.batch_size:>6}"
        f"{found[t.mode, t.batch_size, original].milliseconds:>10.1f} ms"
        f"{t.milliseconds:>10.1f} ms{t.speedup:>7.2f}x"
        for t in timings
        if t.method != original
    ]
    return [f"{'':14}{'batch':>6}{'original':>13}{'compressed':>13}{'speed':>8}", *rows, ""]


def _is_own(output: Path) -> bool:
    """Whether a folder holds the results of an earlier demo."""
    try:
        known = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
        return str(known["command"]).startswith("ltm demo")
    except (OSError, ValueError, KeyError, TypeError):
        return False

"""`ltm demo`, which `make demo` runs: compress a network of the package within a minute."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ltm.cli.commands import Flat, command_line, interrupted, say
from ltm.compression.settings import CompressSettings
from ltm.core.validation import require_least
from ltm.files import output_folder
from ltm.models import ModelSource, method_config

if TYPE_CHECKING:
    from ltm.compression.compress import CompressResult

_BATCHES = (1, 8)
_ROUNDS = 6
_CONTROL_IMAGES = 100
_NEXT = """
Report, with pictures of what merges: {report}
Next, with a network and images of your own:
  ltm compress --model vit_small_patch16_224 --pretrained --data IMAGES --max-loss 0.5 --export \\
      --output runs/mine
  ltm serve --run runs/mine"""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """How large the demo is, and where its results go."""

    ratio: float = 0.5
    """Share of the multiply-adds to keep."""
    images: int = 200
    """Images to evaluate on."""
    time: bool = True
    """Measure latency, in PyTorch and in ONNX Runtime."""
    compile: bool = False
    """Time torch.compile too, which takes a few minutes."""
    seed: int = 0
    """Seed of the images."""
    output: Path = Path("runs/demo")
    """Folder for the compressed model and the report."""


def demo(settings: Flat[DemoSettings], *, overwrite: bool = False) -> None:
    """Compress a network that comes with the package, and see what that gains, in a minute.

    Needs no download and no training. The network is a vision transformer with 784 tokens that
    classifies generated shapes. Merging saves half of its multiply-adds. Both networks are then
    evaluated on the same images and timed on this machine.

    Example:
        ltm demo --ratio 0.4 --output runs/demo

    Args:
        settings: How large it is, and where its results go.
        overwrite: Replace another run's results there.
    """
    from ltm.methods import DEFAULT

    require_least("images", settings.images)
    method_config(DEFAULT, settings.ratio)
    output = settings.output
    with output_folder(output, overwrite=overwrite or _is_own(output)):
        result = _compressed(settings)
        result.save(output)
    if result.interrupted:
        interrupted(f"Stopped during {result.interrupted}; {output} holds what was done.")
    control = _accuracy_at_random(result, settings)
    say("")
    for line in _story(result, control):
        say(line)
    say(_NEXT.format(report=output / "report.html"))


def _compressed(settings: DemoSettings) -> CompressResult:
    from ltm.compression.compress import compress

    return compress(
        ModelSource(model="demo_vit", pretrained=True),
        _data(settings),
        CompressSettings(
            ratio=settings.ratio,
            # It takes longer than a minute, and the default schedule is as good here.
            calibrate=False,
            time=settings.time,
            forms=_forms(settings),
            time_batches=_BATCHES,
            time_rounds=_ROUNDS,
            export=settings.time,
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


def _forms(settings: DemoSettings) -> tuple[str, ...]:
    if not settings.time:
        return ()
    return ("eager", "onnxruntime", *(("compiled",) if settings.compile else ()))


def _data(settings: DemoSettings) -> str:
    from ltm.zoo import DEMO_DATA

    return f"{DEMO_DATA},val_images={settings.images},seed={settings.seed}"


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


def _story(result: CompressResult, control: float) -> list[str]:
    """What was found, the gain first, and the code that runs it."""
    from ltm.evaluation.records import text_table
    from ltm.report.comparison import too_busy
    from ltm.report.documents import forms_table

    base, compressed = result.comparison.base, result.comparison.compressed
    deployed = result.deployment
    assert base is not None
    assert compressed is not None
    assert base.accuracy is not None
    assert compressed.accuracy is not None
    assert compressed.against_base is not None
    assert deployed is not None
    number = base.accuracy.num_images
    loss = "no loss" if compressed.against_base.high >= 0 else "a real loss"
    kept = (
        f"{loss} in accuracy: {100 * compressed.accuracy.top1:.1f}% of {number} images right, "
        f"{100 * base.accuracy.top1:.1f}% before."
    )
    least = min(_CONTROL_IMAGES, number)
    macs = f"Multiply-adds per image: {base.gmacs:.2f} billion before, {compressed.gmacs:.2f} now."
    gain = _gain(result)
    table, busy = forms_table(result.comparison), too_busy(result.comparison)
    return [
        f"{gain} and {kept}" if gain else f"At {compressed.share:.2f}: {kept}",
        "",
        *([text_table(table), ""] if len(table) > 1 else []),
        *([busy, ""] if busy else []),
        f"{macs} Nothing was trained.",
        f"Merging as many tokens at random leaves {100 * control:.1f}% of {least} images right.",
        "",
        f"To run it in {deployed.title}:",
        *(f"  {line}" for line in deployed.code.splitlines()),
    ]


def _gain(result: CompressResult) -> str:
    """The speed-up in the recommended form, in words; empty if nothing was timed."""
    compressed, deployed = result.comparison.compressed, result.deployment
    assert compressed is not None
    assert deployed is not None
    gains = [
        f"{timing.speedup:.2f}x as fast at batch {timing.batch_size}"
        for timing in compressed.timings
        if timing.mode == deployed.form and timing.speedup
    ]
    return f"{' and '.join(gains)} in {deployed.title}" if gains else ""


def _is_own(output: Path) -> bool:
    """Whether a folder holds the results of an earlier demo."""
    try:
        known = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
        return str(known["command"]).startswith("ltm demo")
    except (OSError, ValueError, KeyError, TypeError):
        return False

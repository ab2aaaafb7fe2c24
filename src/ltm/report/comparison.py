"""What a report tells: networks side by side, what they were measured on, and what that shows.

The sentences (`verdicts`) say what the numbers show and no more: a difference is real only where
its interval leaves out zero.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ltm.api import conversion_of
from ltm.evaluation.accuracy import PairedDifference
from ltm.evaluation.latency import BASE, Timing
from ltm.evaluation.measurement import Measurement
from ltm.evaluation.records import Environment
from ltm.methods.base import Site
from ltm.report.curves import display_name


@dataclass(frozen=True, kw_only=True)
class BlockChange:
    """One block of the compressed network that merges."""

    block: int
    before: str
    """Tokens that enter: a number, or height x width."""
    after: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A compressed network, its original and its peers, on the same images and machine."""

    title: str
    model: str
    weights: str
    method: str
    """The one that was saved; the other networks are for comparison."""
    ratio: float | None
    data: str
    num_calibration_images: int
    """Unlabelled images that schedules and thresholds were chosen on; none of them is evaluated."""
    finetune_epochs: float
    calibration: dict[str, Any] | None = None
    """The search for the schedule, as `CalibrateResult.to_dict` tells it."""
    seed: int
    command: str
    environment: Environment
    networks: tuple[Measurement, ...]
    lead: dict[str, PairedDifference] = field(default_factory=dict)
    """Accuracy of the compressed network less that of each peer, image by image."""
    blocks: tuple[BlockChange, ...] = ()
    num_blocks: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    """Methods that could not be compared, and why."""
    interrupted: str = ""
    """What was going on when the run was stopped; empty for a complete one."""

    def network(self, method: str) -> Measurement | None:
        """The network of a method, if it was measured."""
        return next((n for n in self.networks if n.method == method), None)

    @property
    def base(self) -> Measurement | None:
        return self.network(BASE)

    @property
    def compressed(self) -> Measurement | None:
        return self.network(self.method)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, networks by method."""
        values = dataclasses.asdict(self)
        values["networks"] = {network["method"]: network for network in values["networks"]}
        values["complete"] = not self.interrupted
        return values


def block_changes(model: nn.Module) -> tuple[BlockChange, ...]:
    """The blocks of a converted model that merge, in words."""
    done = conversion_of(model)
    return tuple(
        BlockChange(block=site.block, **_counts(site), how=done.config.describe(site))
        for site in done.sites
        if site.merges
    )


def _counts(site: Site) -> dict[str, str]:
    if site.grid_in is not None and site.grid_out is not None:
        (h, w), (h2, w2) = site.grid_in, site.grid_out
        return {"before": f"{h} x {w}", "after": f"{h2} x {w2}"}
    return {"before": str(site.num_in), "after": str(site.num_out)}


# --- What can be said about it -----------------------------------------------------------------

_TOLERANCE = 0.005
_FEW_IMAGES = 1000


def verdicts(comparison: Comparison) -> list[str]:
    """All that can be said, the main thing first."""
    found = [
        *_accuracy(comparison),
        *_budget(comparison),
        *_speed(comparison),
        *_peers(comparison),
        *_cautions(comparison),
    ]
    return found or ["Nothing was measured."]


def _points(difference: PairedDifference) -> str:
    """A difference in percentage points with its interval."""
    low, high = 100 * difference.low, 100 * difference.high
    return f"{100 * difference.difference:+.1f} points (95% interval {low:+.1f} to {high:+.1f})"


def _accuracy(comparison: Comparison) -> list[str]:
    base, compressed = comparison.base, comparison.compressed
    if base is None or compressed is None or not (base.accuracy and compressed.accuracy):
        return []
    before, after = 100 * base.accuracy.top1, 100 * compressed.accuracy.top1
    name = display_name(comparison.method)
    kept = f"kept {after:.1f} of {before:.1f}" if after <= before else (
        f"reached {after:.1f}, from {before:.1f},"
    )  # fmt: skip
    sentences = [f"{name} {kept} top-1 at {compressed.share:.2f} of the multiply-adds."]
    if compressed.against_base is not None:
        difference = compressed.against_base
        sentences.append(
            f"On these {difference.num_images:,} images the difference is {_points(difference)}: "
            f"{_meaning(difference)}."
        )
    return sentences


def _meaning(difference: PairedDifference) -> str:
    if difference.high < 0:
        return "a real loss"
    if difference.low > 0:
        return "a real gain"
    return "neither a loss nor a gain can be told from chance"


def _budget(comparison: Comparison) -> list[str]:
    compressed, ratio = comparison.compressed, comparison.ratio
    if compressed is None or ratio is None or compressed.share <= ratio + _TOLERANCE:
        return []
    return [f"The budget of {ratio:.2f} was missed: the share is {compressed.share:.3f}."]


def _speed(comparison: Comparison) -> list[str]:
    compressed = comparison.compressed
    timings = [] if compressed is None else [t for t in compressed.timings if t.speedup]
    if not timings:
        return []
    parts = [_speed_part(timing) for timing in sorted(timings, key=lambda t: t.batch_size)]
    conditions = "; ".join(dict.fromkeys(f"{timing.mode}, {timing.dtype}" for timing in timings))
    where = comparison.environment.device
    return [f"Measured speed: {'; '.join(parts)} ({conditions} on {where})."]


def _speed_part(timing: Timing) -> str:
    low, high = timing.speedup_interval or (0.0, 0.0)
    if round(low, 2) > 1:
        said = f"{timing.speedup:.2f}x as fast"
    elif round(high, 2) < 1:
        said = f"slower, {timing.speedup:.2f}x"
    else:
        said = "no gain"
    return f"{said} at batch {timing.batch_size}"


def _peers(comparison: Comparison) -> list[str]:
    name = display_name(comparison.method)
    sentences: list[str] = []
    for peer, difference in comparison.lead.items():
        network = comparison.network(peer)
        if network is None or network.accuracy is None:
            continue
        sentences.append(
            f"{name} against {display_name(peer)} ({100 * network.accuracy.top1:.1f} at "
            f"{network.share:.2f}): {_points(difference)}; {_standing(difference, name)}."
        )
    for peer, reason in comparison.left_out.items():
        sentences.append(f"{display_name(peer)} is not compared: {reason.rstrip('.')}.")
    return sentences


def _standing(difference: PairedDifference, name: str) -> str:
    if difference.low > 0:
        return f"{name} is better"
    if difference.high < 0:
        return f"{name} is worse"
    return "too close to call"


def _cautions(comparison: Comparison) -> list[str]:
    sentences = []
    compressed = comparison.compressed
    accuracy = None if compressed is None else compressed.accuracy
    if accuracy is not None and accuracy.num_images < _FEW_IMAGES:
        low, high = accuracy.top1_interval
        sentences.append(
            f"Only {accuracy.num_images} images were evaluated: top-1 itself is known to "
            f"{50 * (high - low):.1f} points either way."
        )
    if comparison.interrupted:
        sentences.append(
            f"The run was stopped during {comparison.interrupted}: what is missing here was not "
            "measured."
        )
    return sentences

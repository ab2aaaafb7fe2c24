"""What a report says: networks side by side, what they were measured on, and what that shows.

The sentences (`verdicts`) claim no more than the numbers show: a difference is real only if its
interval excludes zero.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ltm.api import conversion_of
from ltm.evaluation.accuracy import Accuracy, PairedDifference, is_at_chance
from ltm.evaluation.latency import BASE, Timing
from ltm.evaluation.measurement import Measurement
from ltm.evaluation.modes import TITLES
from ltm.evaluation.records import Environment, percent, points
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
class CurvePoint:
    """One ratio of a curve, measured on the images to choose on."""

    ratio: float
    share: float
    loss: PairedDifference
    """Accuracy less that of the original."""
    top1: float
    num_changed: int
    """Images for which the network predicts another label than the original."""
    timing: Timing
    chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The form that is recommended, and how to run it."""

    form: str
    batch_size: int
    code: str
    """Lines of Python that run it."""
    file: str = ""
    """The name of the file for this form, if one was written."""
    num_images: int = 0
    """Images on which the file's predictions were compared."""
    num_changed: int = 0
    """Images on which the file predicts another label than the original."""
    num_unlike: int = 0
    """Images on which the file predicts another label than the compressed network."""

    @property
    def title(self) -> str:
        return TITLES[self.form]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A compressed network, its original and its peers, on the same images and machine."""

    title: str
    model: str
    weights: str
    method: str
    """The method of the saved network; the others are for comparison."""
    ratio: float | None
    data: str
    num_calibration_images: int
    """Unlabelled images on which schedules and thresholds were chosen; none is evaluated."""
    finetune_epochs: float
    calibration: dict[str, Any] | None = None
    """The search for the schedule, from `CalibrateResult.to_dict`."""
    tuning: dict[str, Any] | None = None
    """The metrics of `ltm.training.tuning.tune_`."""
    seed: int
    command: str
    environment: Environment
    networks: tuple[Measurement, ...]
    lead: dict[str, PairedDifference] = field(default_factory=dict)
    """Accuracy of the compressed network less that of each peer, image by image."""
    blocks: tuple[BlockChange, ...] = ()
    num_blocks: int = 0
    labelled: bool = True
    """Whether the images have labels. If not, the original's predictions take their place, and
    what is called accuracy is agreement with the original."""
    num_classes: int = 0
    """Of the evaluated images; 0 where that is not known."""
    untrained: bool = False
    """Whether masks are learned that nothing has trained."""
    preemptions: float = 0.0
    """How often other processes took a core while networks were timed, per second of work."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Methods that could not be compared, and why."""
    deployment: Deployment | None = None
    curve: tuple[CurvePoint, ...] = ()
    max_loss: float | None = None
    """Points that may be lost, if the ratio was chosen."""
    goal_speedup: float | None = None
    goal_ms: float | None = None
    interrupted: str = ""
    """The stage that Ctrl-C stopped; empty for a complete run."""

    def network(self, method: str) -> Measurement | None:
        """The network of a method, if it was measured."""
        return next((n for n in self.networks if n.method == method), None)

    @property
    def measure(self) -> str:
        """What is measured on the images."""
        return "top-1" if self.labelled else "agreement"

    @property
    def unit(self) -> str:
        """What a difference is counted in."""
        return "points" if self.labelled else "points of agreement"

    @property
    def base(self) -> Measurement | None:
        return self.network(BASE)

    @property
    def compressed(self) -> Measurement | None:
        return self.network(self.method)

    @property
    def form(self) -> str:
        """The form whose times are shown: the recommended one."""
        return "eager" if self.deployment is None else self.deployment.form

    def timing(self, method: str, batch_size: int, form: str | None = None) -> Timing | None:
        """The time of a network, by default in the recommended form."""
        network = self.network(method)
        return None if network is None else network.timing(batch_size, form or self.form)

    @property
    def timing_deployed(self) -> Timing | None:
        """The time of the compressed network in the recommended form."""
        deployed = self.deployment
        return None if deployed is None else self.timing(self.method, deployed.batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, networks by method."""
        values = dataclasses.asdict(self)
        values["networks"] = {network["method"]: network for network in values["networks"]}
        values["complete"] = not self.interrupted
        return values


def block_changes(model: nn.Module) -> tuple[BlockChange, ...]:
    """The merging blocks of a converted model, in words."""
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


# --- Sentences -----------------------------------------------------------------------------------

_TOLERANCE = 0.005
_FEW_IMAGES = 1000


def verdicts(comparison: Comparison) -> list[str]:
    """All sentences, the most important first."""
    found = [
        *_accuracy(comparison),
        *_tuned(comparison),
        *_budget(comparison),
        *_deployed(comparison),
        *_goal(comparison),
        *_speed(comparison),
        *_advice(comparison),
        *_choice(comparison),
        *_peers(comparison),
        *_cautions(comparison),
    ]
    return found or ["Nothing was measured."]


def _tuned(comparison: Comparison) -> list[str]:
    found = comparison.tuning
    if found is None:
        return []
    before, after = found["divergence_untrained"], found["divergence_tuned"]
    held = f"{found['num_held_out']:,} images set aside"
    how = (
        f"It was tuned ({found['trainable']}) for {found['length']} on {found['num_images']:,} "
        f"images without labels, with the original as teacher: on {held} the divergence from the "
        f"original went from {before:.4f} to {after:.4f}"
    )
    if found["kept"] == "tuned":
        agreed, agrees = (percent(found[key]) for key in ("agreement_untrained", "agreement"))
        return [f"{how}. It says the same as the original on {agrees} of them, before on {agreed}."]
    return [f"{how}. That is no better, so the untuned network is kept."]


def _points(difference: PairedDifference) -> str:
    """A difference in percentage points with its interval."""
    low, high = points(difference.low), points(difference.high)
    return f"{points(difference.difference)} points (95% interval {low} to {high})"


def _accuracy(comparison: Comparison) -> list[str]:
    base, compressed = comparison.base, comparison.compressed
    if base is None or compressed is None or not (base.accuracy and compressed.accuracy):
        return []
    before, after = base.accuracy.top1, compressed.accuracy.top1
    name = display_name(comparison.method)
    if not comparison.labelled:
        return _agreement(name, compressed.accuracy, compressed.share)
    top1 = f"kept {percent(after)} of {percent(before)} top-1"
    if after > before:
        top1 = f"raised top-1 from {percent(before)} to {percent(after)}"
    sentences = [f"{name} {top1} at {compressed.share:.2f} of the multiply-adds."]
    if compressed.against_base is not None:
        difference = compressed.against_base
        sentences.append(
            f"On these {difference.num_images:,} images the difference is {_points(difference)}: "
            f"{_meaning(difference)}."
        )
    return sentences


def _agreement(name: str, accuracy: Accuracy, share: float) -> list[str]:
    """The sentences of `_accuracy` where images have no labels."""
    low, high = map(percent, accuracy.top1_interval)
    same = (
        f"{name} predicts the same class as the original on {percent(accuracy.top1)}% of "
        f"{accuracy.num_images:,} images, at {share:.2f} of the multiply-adds."
    )
    why = (
        "The images have no labels, so agreement with the original is measured, not accuracy "
        f"(95% interval {low} to {high})."
    )
    return [same, why]


def _meaning(difference: PairedDifference) -> str:
    if difference.high < 0:
        return "a real loss"
    if difference.low > 0:
        return "a real gain"
    return "too small to tell from chance"


def _budget(comparison: Comparison) -> list[str]:
    compressed, ratio = comparison.compressed, comparison.ratio
    if compressed is None or ratio is None or compressed.share <= ratio + _TOLERANCE:
        return []
    kept = f"{compressed.share:.3f} of the multiply-adds"
    return [f"The budget of {ratio:.2f} was missed: the network keeps {kept}."]


def _speed(comparison: Comparison) -> list[str]:
    compressed = comparison.compressed
    timings = [] if compressed is None else [t for t in compressed.timings if t.speedup]
    if not timings:
        return []
    by_form: dict[str, list[Timing]] = {}
    for timing in sorted(timings, key=lambda t: t.batch_size):
        by_form.setdefault(timing.mode, []).append(timing)
    parts = [
        f"{TITLES[form]} {', '.join(_speed_part(timing) for timing in members)}"
        for form, members in by_form.items()
    ]
    where = comparison.environment.device
    on = f"{timings[0].dtype} on {where}"
    return [f"Measured speed, against the original in the same form: {'; '.join(parts)} ({on})."]


def _deployed(comparison: Comparison) -> list[str]:
    """Which form to run, and whether its file predicts the same as the networks."""
    deployed, timing = comparison.deployment, comparison.timing_deployed
    if deployed is None:
        return []
    sentences = []
    if timing is not None and timing.images_per_second is not None:
        base = comparison.timing(BASE, deployed.batch_size)
        before = ""
        if base is not None and base.images_per_second is not None:
            before = f" (the original {_rate(base.images_per_second)})"
        sentences.append(
            f"Run it in {deployed.title}: {_rate(timing.images_per_second)} images per second at "
            f"batch {deployed.batch_size}{before}, {_speed_part(timing, at=False)}."
        )
    if deployed.num_images:
        unlike = "the same labels as the network"
        if deployed.num_unlike:
            unlike = f"another label than the network on {_count(deployed.num_unlike)}"
        sentences.append(
            f"On all {deployed.num_images:,} evaluated images, {deployed.file} predicts {unlike}, "
            f"and another label than the original on {_count(deployed.num_changed)} "
            f"({percent(deployed.num_changed / deployed.num_images)}%)."
        )
    return sentences


def _rate(images_per_second: float) -> str:
    return f"{images_per_second:,.{0 if images_per_second >= 100 else 1}f}"


def _count(number: int) -> str:
    return f"{number:,} {'image' if number == 1 else 'images'}"


_NEAR = 0.03
"""A goal counts as met if the time is off by no more than this share, either way."""


def _goal(comparison: Comparison) -> list[str]:
    """Whether the last measurement meets the goal, misses it or goes beyond it."""
    timing = comparison.timing_deployed
    if timing is None or timing.milliseconds is None or not timing.speedup:
        return []
    where = f"in {TITLES[timing.mode]} at batch {timing.batch_size}"
    if comparison.goal_speedup is not None:
        asked, came = f"{comparison.goal_speedup:g}x", f"{timing.speedup:.2f}x"
        reached = timing.speedup / comparison.goal_speedup
    elif comparison.goal_ms is not None:
        asked, came = f"{comparison.goal_ms:g} ms", f"{timing.milliseconds:.2f} ms"
        reached = comparison.goal_ms / timing.milliseconds
    else:
        return []
    off = f"{percent(abs(1 - reached), 0)}%: it came to {came}"
    if abs(1 - reached) <= _NEAR:
        said = f"met: {came}"
    elif reached < 1:
        said = f"missed by {off}"
    else:
        said = f"exceeded by {off}, so a larger --ratio would do"
    return [f"The goal of {asked} {where} is {said}."]


def _choice(comparison: Comparison) -> list[str]:
    """How the ratio was chosen from a curve."""
    chosen = next((point for point in comparison.curve if point.chosen), None)
    if chosen is None or comparison.max_loss is None:
        return []
    kept = -100 * chosen.loss.difference <= comparison.max_loss
    how = (
        f"the fastest of {len(comparison.curve)} within {comparison.max_loss:g} points"
        if kept
        else f"none of {len(comparison.curve)} is within {comparison.max_loss:g} points, and this "
        "one loses least"
    )
    lost = f"{points(chosen.loss.difference)} {comparison.unit} there"
    on = f"{chosen.loss.num_images:,} other images ({lost})"
    return [f"The ratio of {chosen.ratio:g} was chosen on {on}: {how}."]


_SMALL_GMACS = 0.3


def _advice(comparison: Comparison) -> list[str]:
    """If there is no gain somewhere: why, and what to do."""
    compressed = comparison.compressed
    timed = [] if compressed is None else [t for t in compressed.timings if t.speedup_interval]
    fast = [timing for timing in timed if _is_faster(timing)]
    slow = [timing for timing in timed if not _is_faster(timing)]
    if not slow:
        return []
    where = ", ".join(f"{TITLES[t.mode]} at batch {t.batch_size}" for t in slow)
    base = comparison.base
    small = base is not None and base.gmacs < _SMALL_GMACS
    why = (
        f"the network has only {1e3 * base.gmacs:.0f} million multiply-adds, and overhead takes "
        "longer than they do"
        if small and base is not None
        else "matching adds small operators, and at this batch size launching them takes as long "
        "as the merged tokens save"
    )
    best = max(fast, key=lambda t: t.speedup or 0, default=None)
    if best is not None:
        advice = f"use {TITLES[best.mode]} at batch {best.batch_size} ({best.speedup:.2f}x)"
    elif small:
        advice = "merging pays on larger networks, longer sequences or larger batches"
    else:
        advice = "try larger batches, a smaller --ratio, or another form (--forms)"
    return [f"No gain in {where}: {why}. What to do: {advice}."]


def _is_faster(timing: Timing) -> bool:
    """Whether the whole interval of the speed-up is above 1."""
    return timing.speedup_interval is not None and round(timing.speedup_interval[0], 2) > 1


def _speed_part(timing: Timing, *, at: bool = True) -> str:
    _, high = timing.speedup_interval or (0.0, 0.0)
    if _is_faster(timing):
        said = f"{timing.speedup:.2f}x as fast"
    elif round(high, 2) < 1:
        said = f"slower ({timing.speedup:.2f}x)"
    else:
        said = "no gain"
    return f"{said} at batch {timing.batch_size}" if at else said


def _peers(comparison: Comparison) -> list[str]:
    name = display_name(comparison.method)
    sentences: list[str] = []
    for peer, difference in comparison.lead.items():
        network = comparison.network(peer)
        if network is None or network.accuracy is None:
            continue
        reached = percent(network.accuracy.top1)
        sentences.append(
            f"{name} against {display_name(peer)} "
            f"({reached if comparison.labelled else f'agreement {reached}'} at "
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


_UNSTEADY = 0.2
"""Quartiles of times that lie this share of the median apart tell of a busy machine."""
_MOST_PREEMPTIONS = 100.0
"""An idle machine takes a core a few times a second, a busy one hundreds of times."""


def _cautions(comparison: Comparison) -> list[str]:
    found = (said(comparison) for said in (_at_chance, _untrained, _patch_features, too_busy))
    sentences = [sentence for sentence in found if sentence]
    compressed = comparison.compressed
    accuracy = None if compressed is None else compressed.accuracy
    if accuracy is not None and accuracy.num_images < _FEW_IMAGES:
        low, high = accuracy.top1_interval
        sentences.append(
            f"Only {accuracy.num_images} images were evaluated: {comparison.measure} itself is "
            f"uncertain by {50 * (high - low):.1f} points either way."
        )
    if comparison.interrupted:
        sentences.append(
            f"The run was stopped during {comparison.interrupted}. What is missing here was not "
            "measured."
        )
    return sentences


def _at_chance(comparison: Comparison) -> str:
    base = comparison.base
    found = None if base is None else base.accuracy
    if found is None or not is_at_chance(found, comparison.num_classes):
        return ""
    return (
        f"The original has {percent(found.top1)}% top-1, which guessing among "
        f"{comparison.num_classes:,} classes reaches too. Check its weights, the order of the "
        "classes and the preprocessing."
    )


def _untrained(comparison: Comparison) -> str:
    if not comparison.untrained:
        return ""
    return (
        "The masks of this network are learned, and nothing has trained them yet. Train them "
        "with --finetune-epochs or ltm finetune."
    )


def _patch_features(comparison: Comparison) -> str:
    last = comparison.blocks[-1] if comparison.blocks else None
    if last is None or last.block + 1 < comparison.num_blocks or not last.before.isdigit():
        return ""
    if 2 * int(last.after) > int(last.before):
        return ""
    return (
        f"The last block keeps {last.after} of {last.before} patch tokens. The class scores do not "
        "need them, but patch features do: take those from an earlier block."
    )


def too_busy(comparison: Comparison) -> str:
    """A sentence where the machine was too busy to time; else empty."""
    base = comparison.base
    spreads = [
        (timing.quartiles[1] - timing.quartiles[0]) / timing.milliseconds
        for timing in (() if base is None else base.timings)
        if timing.milliseconds and timing.quartiles
    ]
    if max(spreads, default=0.0) <= _UNSTEADY and comparison.preemptions <= _MOST_PREEMPTIONS:
        return ""
    return "The machine was busy with other work, so the times are unreliable. Measure them again."

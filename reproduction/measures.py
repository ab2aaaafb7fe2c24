"""From the raw values of a row to the numbers of a table.

Every number that is written anywhere goes through here, so it can be computed again from row.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

Values = dict[str, Any]
Of = str | int | None
"""What in a row is meant: a block, an entrant, a score."""


def parameters(values: Values, _of: Of) -> float:
    """Millions of parameters."""
    return values["parameters"] / 1e6


def trained(values: Values, _of: Of) -> float:
    """Thousands of parameters that trained."""
    return values["trained_parameters"] / 1e3


def gmacs(values: Values, _of: Of) -> float:
    """Billions of multiply-adds; a mean over images where tokens differ per image."""
    if "mac_share" in values:
        return values["mac_share"] * values["macs_before"] / 1e9
    return values["macs"] / 1e9


def top1(values: Values, _of: Of) -> float:
    """Per cent of the held-out images that are right."""
    return 100 * sum(correct_flags(values)) / values["num_images"]


def correct_flags(values: Values) -> list[bool]:
    """Whether each held-out image is right, in order."""
    digits = values["correct_bits"]
    bits = f"{int(digits, 16):0{4 * len(digits)}b}"
    return [bit == "1" for bit in bits[: values["num_images"]]]


def minutes(values: Values, _of: Of) -> float:
    """Minutes of training per epoch."""
    return fmean(epoch["train_seconds"] for epoch in values["history"]) / 60


def epoch_seconds(values: Values, _of: Of) -> float:
    """Seconds of an epoch of a detector, on the machine that trained it."""
    return values["seconds_per_epoch"]


def train_loss(values: Values, _of: Of) -> float:
    """Training loss of the last epoch."""
    return values["history"][-1]["train_loss"]


def loss(values: Values, _of: Of) -> float:
    """Cross-entropy on the held-out images."""
    return values["loss"]


def milliseconds(values: Values, of: Of) -> float:
    """Milliseconds per batch, the median of the rounds."""
    return 1e3 * median(_seconds(values, of))


def throughput(values: Values, of: Of) -> float:
    """Images per second, by the median of the rounds."""
    return values["batch_size"] / median(_seconds(values, of))


def rounds(measure: str, values: Values, of: Of) -> list[float]:
    """What `milliseconds` or `throughput` is in each round of a race."""
    one = MEASURES[measure]
    alone = [{**values, "seconds": {of: [second]}} for second in _seconds(values, of)]
    return [one(part, of) for part in alone]


def _seconds(values: Values, of: Of) -> list[float]:
    if of in values["errors"]:
        raise ValueError(f"did not run: {values['errors'][of]}")
    return values["seconds"][of]


def ib_loss(values: Values, of: Of) -> float:
    """Information bottleneck of a block (the last by default): `I(X~,X) - I(X~,Y)`."""
    block = _block(values, of)
    return block["input_information"] - block["label_information"]


def ib_bound(values: Values, of: Of) -> float:
    """Upper bound IBB of a block, the last by default."""
    return _block(values, of)["bound"]


def _block(values: Values, of: Of) -> dict[str, Any]:
    blocks = sorted(values["blocks"], key=lambda block: block["block"])
    return blocks[-1] if of is None else blocks[int(of)]


def box_precision(values: Values, of: Of) -> float:
    """Average precision of boxes, per cent."""
    return _precision(values["box"], of)


def mask_precision(values: Values, of: Of) -> float:
    """Average precision of masks, per cent."""
    return _precision(values["mask"], of)


def _precision(scores: dict[str, float], of: Of) -> float:
    score = scores[str(of or "ap")]
    if score < 0:
        raise ValueError("no objects to find")
    return 100 * score


def patches(values: Values, of: Of) -> float:
    """Patches that went into the target token, the mean over images."""
    return fmean(len(weights) for weights in values["weights"][of])


def evenness(values: Values, of: Of) -> float:
    """How even a target token's weights are: effective patches over patches; 1 is uniform."""
    return fmean(_evenness(weights) for weights in values["weights"][of] if weights)


def _evenness(weights: list[float]) -> float:
    total = sum(weights)
    entropy = -sum(w / total * math.log(w / total) for w in weights)
    return math.exp(entropy) / len(weights)


MEASURES: dict[str, Callable[[Values, Of], float]] = {
    measure.__name__: measure
    for measure in (
        parameters, trained, gmacs, top1, minutes, epoch_seconds, train_loss, loss, milliseconds,
        throughput, ib_loss, ib_bound, box_precision, mask_precision, patches, evenness,
    )
}  # fmt: skip
"""All measures by name."""

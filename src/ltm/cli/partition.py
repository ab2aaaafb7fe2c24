"""Which images are evaluated, and which others may be looked at before."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ltm.models import require_least

if TYPE_CHECKING:
    from ltm.data.classification import LabelledImages

_LEAST_CALIBRATION = 32
"""Fewer images than this say little about a schedule."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Partition:
    """Images to evaluate, and images for calibration: none is in both."""

    evaluation: LabelledImages
    calibration: LabelledImages | None
    reason: str = ""
    """Why there are none for calibration."""


def part_images(
    source: str, *, split: str, images: int | None, calibration_images: int
) -> Partition:
    """Open labelled images and set some aside.

    Calibration takes them from the training split; where data are not split it takes at most a
    third of all, and the rest is evaluated. What is no image is an error, lest another take its
    place unnoticed.
    """
    from ltm.data.classification import open_dataset

    require_least("images", images)
    require_least("calibration-images", calibration_images, 0)
    dataset = open_dataset(source, split=split, max_unreadable=0)
    if calibration_images == 0:
        return Partition(
            evaluation=_take(dataset, images), calibration=None, reason="it is switched off"
        )
    if dataset.split == "all":
        return _part_unsplit(dataset, images, calibration_images)
    if split == "train":
        raise ValueError("split is train: those images are for calibration; evaluate on others")
    try:
        training: Any = open_dataset(source, split="train", max_unreadable=0)
    except (ValueError, FileNotFoundError) as error:
        return Partition(
            evaluation=_take(dataset, images), calibration=None, reason=str(error).rstrip(".")
        )
    if getattr(training, "paths", None) is not None:
        reason = "tar shards are read in sequence, and a few of their images cannot be picked"
        return Partition(evaluation=_take(dataset, images), calibration=None, reason=reason)
    return Partition(
        evaluation=_take(dataset, images), calibration=_take(training, calibration_images)
    )


def _part_unsplit(dataset: Any, images: int | None, wanted: int) -> Partition:
    """Set evenly spread images aside, the same ones whatever number is evaluated."""
    number = min(wanted, len(dataset) // 3)
    if number < _LEAST_CALIBRATION or not hasattr(dataset, "indices"):
        reason = f"{len(dataset)} images are too few to set some aside"
        return Partition(evaluation=_take(dataset, images), calibration=None, reason=reason)
    calibration = dataset.take(number)
    chosen = set(calibration.indices)
    rest = copy.copy(dataset)
    rest.indices = [index for index in dataset.indices if index not in chosen]
    return Partition(evaluation=_take(rest, images), calibration=calibration)


def _take(dataset: Any, images: int | None) -> Any:
    if images is None:
        return dataset
    if not hasattr(dataset, "take"):
        raise ValueError("images: tar shards are read as a whole; leave it out")
    return dataset.take(images)

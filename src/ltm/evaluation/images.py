"""Images for measurements: opened by name, some set aside, in batches as a network expects them.

Importing this module imports neither torch nor timm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ltm.models import check_classes, require_least

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ltm.data.config import DataConfig
    from ltm.data.images import ImageDataset
    from ltm.data.transforms import ImageSpec

_LEAST_CALIBRATION = 32
"""Fewer images than this say little about a schedule."""


def open_images(source: str, split: str, images: int | None = None) -> Any:
    """The labelled images; what is no image is an error, lest another take its place unnoticed."""
    from ltm.data.datasets import open_dataset

    require_least("images", images)
    dataset = open_dataset(source, split=split, max_unreadable=0)
    return _take(dataset, images)


def expected_images(model: nn.Module, config: DataConfig) -> ImageSpec:
    """What images a model gets: of the height and width that its tokens were planned for."""
    from ltm.api import image_size_of
    from ltm.data.transforms import image_spec

    return replace(image_spec(config, model), size=image_size_of(model))


def load_batches(
    dataset: Any,
    source: str,
    model: nn.Module,
    *,
    batch_size: int,
    workers: int,
    labelled: bool = True,
    **placed: Any,
) -> Any:
    """Batches of images as the model expects them; labels must be its classes where they count."""
    from ltm.data.config import DataConfig
    from ltm.data.loading import evaluation_loader

    if labelled:
        check_classes(model, dataset.class_names, source)
    config = DataConfig(source=source, batch_size=batch_size, workers=workers)
    return evaluation_loader(dataset, expected_images(model, config), config, **placed)


def sample_images(dataset: Any, source: str, model: nn.Module, number: int) -> Tensor:
    """The same few images, spread over the data, in every process."""
    few = dataset.take(number)
    batches = load_batches(few, source, model, batch_size=number, workers=0, labelled=False)
    return next(iter(batches))[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class Partition:
    """Images to evaluate, and images for calibration: none is in both."""

    evaluation: ImageDataset
    calibration: ImageDataset | None
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
    from ltm.data.datasets import open_dataset, refuse_shared

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
        training = open_dataset(source, split="train", max_unreadable=0)
        refuse_shared(training, dataset, "train", split)
    except (ValueError, FileNotFoundError) as error:
        return Partition(
            evaluation=_take(dataset, images), calibration=None, reason=str(error).rstrip(".")
        )
    return Partition(
        evaluation=_take(dataset, images), calibration=_take(training, calibration_images)
    )


def _part_unsplit(dataset: Any, images: int | None, wanted: int) -> Partition:
    """Set evenly spread images aside, the same ones whatever number is evaluated."""
    number = min(wanted, len(dataset) // 3)
    if number < _LEAST_CALIBRATION:
        reason = f"{len(dataset)} images are too few to set some aside"
        return Partition(evaluation=_take(dataset, images), calibration=None, reason=reason)
    calibration = dataset.take(number)
    chosen = set(calibration.indices)
    rest = dataset.select(p for p, index in enumerate(dataset.indices) if index not in chosen)
    return Partition(evaluation=_take(rest, images), calibration=calibration)


def _take(dataset: Any, images: int | None) -> Any:
    return dataset if images is None else dataset.take(images)

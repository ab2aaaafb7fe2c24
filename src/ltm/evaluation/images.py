"""Images for measurements: opened by name, some set aside, in batches as a network expects them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ltm.api import image_size_of
from ltm.core.validation import require_least
from ltm.data.config import DataConfig
from ltm.data.datasets import open_dataset, refuse_shared
from ltm.data.images import ImageDataset, NoLabelsError
from ltm.data.loading import evaluation_loader
from ltm.data.transforms import ImageSpec, image_spec
from ltm.models import check_classes

MIN_IMAGES = 32
"""For calibration: fewer say more about themselves than about the network."""
_SAMPLE = 64
"""Images in a sample, and the most different images in a batch to time."""


def open_images(
    source: str, split: str, images: int | None = None, *, labelled: bool = True
) -> Any:
    """The images; an unreadable one is an error, so that no other takes its place unnoticed."""
    require_least("images", images)
    found = open_dataset(source, split=split, max_unreadable=0, labelled=labelled)
    return _take(found, images)


def expected_images(model: nn.Module, config: DataConfig) -> ImageSpec:
    """The images that a model gets; their size is the one that merging was planned for."""
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
    """Batches of images as the model expects them; if `labelled`, labels must be its classes."""
    if labelled:
        check_classes(model, dataset.class_names, source)
    config = DataConfig(source=source, batch_size=batch_size, workers=workers)
    return evaluation_loader(dataset, expected_images(model, config), config, **placed)


def read_images(dataset: Any, source: str, model: nn.Module, *, workers: int = 0) -> Tensor:
    """All images of a data set in one tensor, in every process."""
    batches = load_batches(dataset, source, model, batch_size=64, workers=workers, labelled=False)
    return torch.cat([images for images, _ in batches])


def sample_images(dataset: Any, source: str, model: nn.Module, number: int = _SAMPLE) -> Tensor:
    """A few images, spread over the data."""
    return read_images(dataset.take(number), source, model)


def repeated_images(dataset: Any, source: str, model: nn.Module, batch_size: int) -> Tensor:
    """A batch of real images, repeated if there are too few."""
    few = sample_images(dataset, source, model, min(batch_size, _SAMPLE))
    return few.repeat(-(-batch_size // len(few)), 1, 1, 1)[:batch_size]


@dataclass(frozen=True, eq=False, kw_only=True)
class Partition:
    """Images to evaluate, and images for calibration: none is in both."""

    evaluation: ImageDataset
    calibration: ImageDataset | None
    reason: str = ""
    """Why there are none for calibration."""

    @property
    def labelled(self) -> bool:
        """Whether the images to evaluate have labels."""
        return self.evaluation.num_classes > 0


def _open_any_images(source: str, split: str) -> ImageDataset:
    """Images with their labels if they have any; a single class folder says nothing either."""
    try:
        found = open_images(source, split)
    except NoLabelsError:
        found = None
    if found is None or found.num_classes == 1:
        return open_images(source, split, labelled=False)
    return found


def part_images(
    source: str, *, split: str, images: int | None, calibration_images: int
) -> Partition:
    """Open images, labelled or not, and set some aside.

    Calibration takes them from the training split. If data are not split, it takes at most a third
    of them, and the rest is evaluated.
    """
    require_least("images", images)
    require_least("calibration_images", calibration_images, 0)
    dataset, calibration, reason = _open_any_images(source, split), None, ""
    if calibration_images == 0:
        reason = "it is switched off"
    elif dataset.split == "all":
        number = min(calibration_images, len(dataset) // 3)
        if number < MIN_IMAGES:
            reason = f"{len(dataset)} images are too few to set some aside"
        else:  # evenly spread, and the same ones for any number of evaluated images
            calibration = dataset.take(number)
            chosen = set(calibration.indices)
            dataset = dataset.select(
                place for place, index in enumerate(dataset.indices) if index not in chosen
            )
    elif split == "train":
        raise ValueError("split is train: those images are for calibration; evaluate on others")
    else:
        try:
            training = _open_any_images(source, "train")
            refuse_shared(training, dataset, "train", split)
            calibration = training.take(calibration_images)
        except (ValueError, FileNotFoundError) as error:
            reason = str(error).rstrip(".")
    return Partition(evaluation=_take(dataset, images), calibration=calibration, reason=reason)


def _take(dataset: Any, images: int | None) -> Any:
    return dataset if images is None else dataset.take(images)

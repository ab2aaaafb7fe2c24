"""From `--data` to batches of images as a model expects them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ltm.models import check_classes, require_least

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ltm.data.config import DataConfig
    from ltm.data.transforms import ImageSpec


def open_images(source: str, split: str, images: int | None = None) -> Any:
    """The labelled images; what is no image is an error, lest another take its place unnoticed."""
    from ltm.data.classification import open_dataset

    require_least("images", images)
    dataset = open_dataset(source, split=split, max_unreadable=0)
    if images is None:
        return dataset
    if not hasattr(dataset, "take"):
        raise ValueError("images: tar shards are evaluated as a whole; leave it out")
    return dataset.take(images)  # pyright: ignore[reportAttributeAccessIssue]


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
    few = dataset.take(number) if hasattr(dataset, "take") else dataset
    batches = load_batches(few, source, model, batch_size=number, workers=0, labelled=False)
    return next(iter(batches))[0]

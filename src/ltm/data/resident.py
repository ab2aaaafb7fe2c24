"""Small data sets, decoded once and kept whole on the device, cropped and resized there.

A crop that is resized is two products, with a weight for every pixel of the image and of the crop:
rows times image times columns. The weights are Pillow's, and so the pixels are those of other
loaders.

Letters: b images, n pixels of an image's side, m pixels of a crop's side.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms.v2.functional import pil_to_tensor

from ltm.data.batches import Batch
from ltm.data.classification import LabelledImages
from ltm.data.config import AugmentConfig
from ltm.data.sampling import Draw, EvaluationSampler, TrainingSampler
from ltm.data.shards import TarShards
from ltm.data.transforms import ImageSpec

TRIES = 10
"""How often a crop of random area and shape is drawn anew where it is larger than the image."""

_MANY, _TOGETHER = 4000, 256
"""From so many images on, worker processes decode them, so many at a time."""


class Pixels(NamedTuple):
    """All images of a data set (8 bits, `n 3 h w`) and their labels, on a device."""

    images: Tensor
    labels: Tensor


class Resident:
    """Batches of images that are all on the device: the same ones whenever an epoch comes again.

    Random numbers belong to a batch: several processes draw other crops than one alone.
    """

    def __init__(
        self,
        dataset: Any,
        order: TrainingSampler | EvaluationSampler,
        spec: ImageSpec,
        augment: AugmentConfig | None,
        *,
        batch_size: int,
        device: torch.device,
    ) -> None:
        check_resident(dataset, spec, augment)
        self._pixels = all_pixels(dataset, device)
        self._indices: Sequence[int] = dataset.indices
        self._order, self._spec, self._augment = order, spec, augment
        self._batch_size = batch_size
        self._mean = 255 * torch.tensor(spec.mean, device=device)[:, None, None]
        self._std = 255 * torch.tensor(spec.std, device=device)[:, None, None]

    def __len__(self) -> int:
        whole, rest = divmod(len(self._order), self._batch_size)
        return whole + (rest > 0 and self._augment is None)

    def __iter__(self) -> Iterator[Batch]:
        draws: list[Draw] = [
            draw if isinstance(draw, Draw) else Draw(draw, 0) for draw in self._order
        ]
        for step in range(len(self)):
            yield self._batch(draws[step * self._batch_size : (step + 1) * self._batch_size])

    def _batch(self, draws: list[Draw]) -> Batch:
        device = self._pixels.images.device
        chosen = torch.tensor([self._indices[draw.index] for draw in draws])
        chosen = chosen.to(device, non_blocking=True)
        images = self._pixels.images[chosen]
        if self._augment is None or not self._augment.varies:
            rows, columns = _middle(images, self._spec)
        else:
            generator = torch.Generator().manual_seed(draws[0].key)
            rows, columns = _varied(images, self._spec, self._augment, generator)
        with torch.autocast(device.type, enabled=False):
            narrow = _as_bytes(images.float() @ columns.mT)
            found = (_as_bytes(rows @ narrow) - self._mean) / self._std
        return Batch(found, self._pixels.labels[chosen])


def _as_bytes(pixels: Tensor) -> Tensor:
    """What 8 bits can say, rounded as Pillow does: halves go up, however a sum came about."""
    return (pixels + (0.5 + 1e-4)).floor().clamp(0, 255)


def check_resident(dataset: LabelledImages, spec: ImageSpec, augment: AugmentConfig | None) -> None:
    """Refuse what only other loaders can do."""
    if isinstance(dataset, TarShards):
        raise ValueError("resident is set, but tar shards are read in sequence; leave it out")
    if spec.crop_mode != "center" or spec.interpolation not in _FILTERS:
        raise ValueError(
            f"resident is set, but images are to be resized by {spec.interpolation} and cropped by "
            f"{spec.crop_mode}; only {', '.join(_FILTERS)} and center can be done on the device"
        )
    if spec.size[0] != spec.size[1]:
        raise ValueError(
            f"resident is set, but the network takes {spec.size[0]}x{spec.size[1]} pixels; only "
            "square images can be cropped on the device"
        )
    for name in ("color_jitter", "auto_augment", "erase"):
        if augment is not None and getattr(augment, name):
            raise ValueError(
                f"resident is set, and so images are cropped, flipped and mixed only; {name} is "
                f"{getattr(augment, name)}: switch one of the two off"
            )


def all_pixels(dataset: Any, device: torch.device) -> Pixels:
    """All images behind a data set, of one size; decoded once, whoever asks for them again."""
    kept: dict[str, Pixels] = dataset.kept
    if str(device) not in kept:
        kept[str(device)] = _read(dataset.whole().with_transform(None), device)
    return kept[str(device)]


def _read(dataset: Any, device: torch.device) -> Pixels:
    first = pil_to_tensor(dataset[0][0])
    needed = len(dataset) * first.numel()
    if device.type == "cuda" and needed > torch.cuda.mem_get_info(device)[0]:
        raise ValueError(
            f"resident is set, but {len(dataset)} images of {first.shape[1]}x{first.shape[2]} "
            f"need {needed / 2**30:.1f} GiB, more than {device} has left"
        )
    images = torch.empty(len(dataset), *first.shape, dtype=torch.uint8)
    labels = torch.empty(len(dataset), dtype=torch.int64)
    workers = min(8, os.cpu_count() or 1) if len(dataset) >= _MANY else 0
    batches: Any = DataLoader(
        dataset, batch_size=_TOGETHER, num_workers=workers, collate_fn=_as_pixels
    )
    start = 0
    for pixels, found in batches:
        for offset, image in enumerate(pixels):
            if image.shape != first.shape:
                raise ValueError(
                    f"resident is set, but images differ in size: {dataset.name(0)} is "
                    f"{first.shape[2]}x{first.shape[1]}, {dataset.name(start + offset)} is "
                    f"{image.shape[2]}x{image.shape[1]}"
                )
            images[start + offset] = image
        labels[start : start + len(found)] = found
        start += len(found)
    if hasattr(dataset, "unreadable"):
        dataset.unreadable.report()
    return Pixels(images.to(device), labels.to(device))


def _as_pixels(items: list[tuple[Any, int]]) -> tuple[Tensor | list[Tensor], Tensor]:
    """Images as 8-bit tensors, in one piece where they have one size; and their labels."""
    pixels = [pil_to_tensor(image) for image, _ in items]
    alike = all(image.shape == pixels[0].shape for image in pixels)
    labels = torch.tensor([label for _, label in items])
    return torch.stack(pixels) if alike else pixels, labels


def _triangle(x: Tensor) -> Tensor:
    return (1 - x).clamp_min(0)


def _cubic(x: Tensor) -> Tensor:
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


_FILTERS = {"bilinear": _triangle, "bicubic": _cubic}


def resampling(
    start: Tensor, length: Tensor, num_out: int, num_in: int, interpolation: str
) -> Tensor:
    """Weights `b m n` that resize `length` of an image's pixels from `start` on to `num_out`.

    As Pillow does it: nothing outside the crop counts, and where pixels become fewer the filter
    grows with what each of them stands for.
    """
    scale = (length / num_out)[:, None, None]
    centre = (torch.arange(num_out, device=start.device) + 0.5)[None, :, None] * scale
    place = torch.arange(num_in, device=start.device)[None, None] - start[:, None, None]
    weight = _FILTERS[interpolation](((place + 0.5 - centre) / scale.clamp_min(1)).abs())
    weight = torch.where((place >= 0) & (place < length[:, None, None]), weight, 0.0)
    return weight / weight.sum(dim=2, keepdim=True)


def _middle(images: Tensor, spec: ImageSpec) -> tuple[Tensor, Tensor]:
    """Weights of rows and columns: the shorter side resized, the middle kept, as timm evaluates."""
    sides, short = images.shape[2:], math.floor(spec.size[0] / spec.crop_ratio)
    found: list[Tensor] = []
    for side, num_out in zip(sides, spec.size, strict=True):
        resized = int(short * side / min(sides))
        start = torch.zeros(1, device=images.device)
        weight = resampling(start, start + side, resized, side, spec.interpolation)
        first = round((resized - num_out) / 2)
        found.append(weight[:, None, first : first + num_out])
    return found[0], found[1]


def _varied(
    images: Tensor, spec: ImageSpec, augment: AugmentConfig, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Weights of rows and columns: random crops, some of them flipped."""
    top, left, height, width = random_crops(
        len(images), (images.shape[2], images.shape[3]), augment, generator
    )
    flips = torch.rand(len(images), generator=generator) < augment.hflip
    parts = torch.stack([top, left, height, width, flips.float()])
    top, left, height, width, flips = parts.to(images.device, non_blocking=True)
    rows = resampling(top, height, spec.size[0], images.shape[2], spec.interpolation)
    columns = resampling(left, width, spec.size[1], images.shape[3], spec.interpolation)
    columns = torch.where(flips[:, None, None] > 0, columns.flip(1), columns)
    return rows[:, None], columns[:, None]


def random_crops(
    number: int, sides: tuple[int, int], augment: AugmentConfig, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, left, height and width of crops of random area and shape, as torchvision draws them."""
    high, wide = sides

    def draw(low: float, most: float, *shape: int) -> Tensor:
        return low + (most - low) * torch.rand(*shape, generator=generator)

    area = high * wide * draw(*augment.scale, number, TRIES)
    shape = draw(math.log(augment.ratio[0]), math.log(augment.ratio[1]), number, TRIES).exp()
    width, height = (area * shape).sqrt().round(), (area / shape).sqrt().round()
    fits = (width >= 1) & (width <= wide) & (height >= 1) & (height <= high)
    chosen = fits.int().argmax(dim=1, keepdim=True)
    whole = ~fits.any(dim=1)  # none fits: the middle, as near to the allowed shapes as it can be
    limit = min(max(wide / high, augment.ratio[0]), augment.ratio[1])
    width = torch.where(whole, round(min(wide, high * limit)), width.gather(1, chosen)[:, 0])
    height = torch.where(whole, round(min(high, wide / limit)), height.gather(1, chosen)[:, 0])
    place = torch.rand(2, number, generator=generator)
    top = torch.where(whole, (high - height) // 2, (place[0] * (high - height + 1)).floor())
    left = torch.where(whole, (wide - width) // 2, (place[1] * (wide - width + 1)).floor())
    return top, left, height, width

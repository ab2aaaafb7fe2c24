"""From PIL images to network inputs: resizing, cropping, augmentation, normalisation, mixing.

Transforms end in 8-bit tensors, a quarter of the bytes to hand from process to process and to the
device, where `loading` normalises whole batches.
"""

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor, nn
from torchvision.transforms import Compose

from ltm.core.validation import first_line
from ltm.data.config import AugmentConfig, DataConfig, is_generated, require_image_settings
from ltm.data.decoding import to_rgb
from ltm.data.images import Transform
from ltm.data.sampling import make_key, random_numbers_of


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """The images a network expects: size (height, width), crop, interpolation, normalisation."""

    size: tuple[int, int] = (224, 224)
    crop_ratio: float = 0.875
    crop_mode: str = "center"
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require_image_settings(self.crop_ratio, self.interpolation, self.std)


def image_spec(config: DataConfig | None = None, model: nn.Module | None = None) -> ImageSpec:
    """Say what images a timm model expects, unless the config says otherwise.

    A model that was built for another input size than its weights (`img_size=64`) gets that size.
    Generated shapes are not cropped by default.
    """
    config = config or DataConfig()
    weights = getattr(model, "pretrained_cfg", None)
    expected = resolve_data_config(pretrained_cfg=weights or {"input_size": (3, 224, 224)})
    size = _built_size(model) or tuple(expected["input_size"][1:])
    return ImageSpec(
        size=(config.image_size, config.image_size) if config.image_size else size,
        crop_ratio=config.crop_ratio
        or (1.0 if is_generated(config.source) else expected["crop_pct"]),
        crop_mode=expected["crop_mode"],
        interpolation=config.interpolation or expected["interpolation"],
        mean=config.mean or tuple(expected["mean"]),
        std=config.std or tuple(expected["std"]),
    )


def _built_size(model: nn.Module | None) -> tuple[int, int] | None:
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return None if size is None else (int(size[0]), int(size[1]))


def evaluation_transform(spec: ImageSpec, *, normalize: bool = False) -> Transform:
    """Resize and crop as timm evaluates; 8-bit tensors, or normalised floats if asked for."""
    transform: Any = create_transform(
        input_size=(3, *spec.size),
        is_training=False,
        interpolation=spec.interpolation,
        mean=spec.mean,
        std=spec.std,
        crop_pct=spec.crop_ratio,
        crop_mode=spec.crop_mode,
        use_prefetcher=not normalize,
    )
    return transform if normalize else Compose([transform, _to_tensor])


def training_transform(spec: ImageSpec, augment: AugmentConfig) -> Transform:
    """Vary images as timm trains: random crops, flips, a policy such as RandAugment, erasing."""
    if not augment.varies:
        return evaluation_transform(spec)
    erasing = [_Erase(augment.erase, spec)] if augment.erase > 0.0 else []
    if not (augment.auto_augment or augment.color_jitter) and spec.interpolation in _SMOOTH:
        return Compose([_CropAndFlip(spec, augment), *erasing])
    try:
        transform = create_transform(
            input_size=(3, *spec.size),
            is_training=True,
            scale=augment.scale,
            ratio=augment.ratio,
            hflip=augment.hflip,
            color_jitter=augment.color_jitter or None,  # pyright: ignore[reportArgumentType]
            auto_augment=augment.auto_augment,
            interpolation=spec.interpolation,
            mean=spec.mean,
            std=spec.std,
            use_prefetcher=True,
        )
    except (AssertionError, ValueError) as error:  # all else was checked before
        raise ValueError(
            f"auto_augment is {augment.auto_augment}, which timm cannot read: {first_line(error)}"
        ) from error
    return Compose([transform, _to_tensor, *erasing])


_SMOOTH = ("bilinear", "bicubic")


class _CropAndFlip:
    """timm's random crops and flips; torch resizes 8-bit images three times as fast as Pillow."""

    def __init__(self, spec: ImageSpec, augment: AugmentConfig) -> None:
        self._spec, self._augment = spec, augment

    def __call__(self, image: Image.Image) -> Tensor:
        augment = self._augment
        top, left, height, width = RandomResizedCropAndInterpolation.get_params(
            image, augment.scale, augment.ratio
        )
        crop = to_rgb(image.crop((left, top, left + width, top + height)))
        pixels = torch.from_numpy(np.array(crop))
        resized = F.interpolate(
            pixels.permute(2, 0, 1)[None].contiguous(),  # a quarter faster than channels last
            size=self._spec.size,
            mode=self._spec.interpolation,
            antialias=True,
        )[0]
        flipped = random.random() < augment.hflip  # noqa: S311
        return (resized.flip(2) if flipped else resized).contiguous()


def _to_tensor(pixels: np.ndarray | Tensor) -> Tensor:
    return pixels if isinstance(pixels, Tensor) else torch.from_numpy(pixels)


class _Erase:
    """timm's random erasing with noise, on 8-bit images instead of normalised ones."""

    def __init__(self, probability: float, spec: ImageSpec) -> None:
        self._probability = probability
        self._erasing = RandomErasing(probability=1.0, mode="pixel", device="cpu")
        self._mean = 255.0 * torch.tensor(spec.mean)[:, None, None]
        self._std = 255.0 * torch.tensor(spec.std)[:, None, None]

    def __call__(self, image: Tensor) -> Tensor:
        if random.random() >= self._probability:  # noqa: S311
            return image
        noise = self._erasing(torch.full(image.shape, torch.nan))
        pixels = (noise * self._std + self._mean).clamp(0.0, 255.0).to(torch.uint8)
        return torch.where(noise.isnan(), image, pixels)


class Mixed(NamedTuple):
    """A mixed batch: images, and a distribution over classes for each."""

    images: Tensor
    targets: Tensor


class BatchMixup:
    """Mixup and CutMix of timm, on the device, with random numbers of its own.

    A batch is mixed the same way whenever its epoch and step come again. Images are changed in
    place; batches need an even number of them.
    """

    def __init__(
        self, augment: AugmentConfig, num_classes: int, *, seed: int = 0, rank: int = 0
    ) -> None:
        self._seeds = (seed, rank)
        self._mixup = Mixup(
            mixup_alpha=augment.mixup,
            cutmix_alpha=augment.cutmix,
            prob=augment.mix_prob if augment.mixes else 0.0,
            switch_prob=augment.switch_prob,
            label_smoothing=augment.smoothing,
            num_classes=num_classes,
        )

    def __call__(self, images: Tensor, labels: Tensor, *, epoch: int, step: int) -> Mixed:
        """Mix a batch of normalised images and give every image a distribution over classes."""
        if len(images) % 2:
            raise ValueError(f"a batch of {len(images)} cannot be mixed; use an even batch_size")
        with random_numbers_of(make_key(*self._seeds, epoch, step)):
            return Mixed(*self._mixup(images, labels))

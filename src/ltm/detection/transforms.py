"""Transforms of image, boxes and masks together, and what detectors are trained on of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.ops import clip_boxes_to_image
from torchvision.transforms import v2

from ltm.data.shapes import JointTransform

# ImageNet's mean colour, as SSD pads; what is added belongs to no mask.
_PADDING: dict[type | str, Any] = {tv_tensors.Image: (124, 116, 104), "others": 0}


def detection_transforms(
    training: bool,
    size: int | tuple[int, int] | None = None,
    *,
    crops: bool = True,
    photometric: bool = True,
    hflip: float = 0.5,
) -> JointTransform:
    """Prepare images (floats from 0 to 1) and targets for torchvision's detectors.

    Boxes that end up smaller than a pixel are dropped.

    Args:
        training: Whether to vary images; evaluation only resizes.
        size: Side, or height and width, to resize to; None leaves that to the detector.
        crops: SSD's zooming out and crops around objects; Mask R-CNN trains without.
        photometric: Random brightness, contrast, saturation and hue.
        hflip: Probability of a horizontal flip.
    """
    steps: list[nn.Module] = []
    if training:
        steps += [v2.RandomPhotometricDistort()] if photometric else []
        if crops:
            steps += [v2.RandomZoomOut(fill=_PADDING), v2.RandomIoUCrop()]
        steps += [v2.RandomHorizontalFlip(hflip)] if hflip else []
    if size is not None:
        sides = (size, size) if isinstance(size, int) else size
        steps.append(v2.Resize(sides, antialias=True))
    steps += [
        v2.ClampBoundingBoxes(),
        v2.SanitizeBoundingBoxes(min_size=1.0, labels_getter=_per_object),
        v2.ToDtype(torch.float32, scale=True),
        v2.ToPureTensor(),
        _MeasureArea(),
    ]
    return v2.Compose(steps)


def _per_object(inputs: Any) -> Sequence[Tensor]:
    """Return what has a row per object besides boxes and masks, to be dropped with them."""
    target = inputs[-1]
    return tuple(target[name] for name in ("labels", "area", "iscrowd"))


class _MeasureArea(nn.Module):
    """Bring areas up to date with the transformed boxes or masks."""

    def forward(self, image: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if "masks" in target:
            area = target["masks"].sum((1, 2)).float()
        else:
            boxes = target["boxes"]
            area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        return image, {**target, "area": area}


_SMALLEST_SIDE = 0.1
"""Pixels; a thinner box can vanish when the image is resized."""


def clean_batch(
    images: Sequence[Tensor], targets: Sequence[Mapping[str, Any]] | None
) -> tuple[list[Tensor], list[dict[str, Tensor]] | None]:
    """Images from 0 to 1, and their targets, if there are any, cleaned."""
    images = [float_image(image) for image in images]
    if targets is None:
        return images, None
    pairs = zip(images, targets, strict=True)
    return images, [clean_target(t, (i.shape[-2], i.shape[-1])) for i, t in pairs]


def clean_target(target: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Tensor]:
    """Boxes clipped to an image of size (height, width), those without area and crowds left out.

    Also whatever belongs to the boxes: labels, and masks if there are any.
    """
    boxes = torch.as_tensor(target["boxes"]).as_subclass(Tensor).float().reshape(-1, 4)
    boxes = clip_boxes_to_image(boxes, size)
    kept = (boxes[:, 2:] - boxes[:, :2] >= _SMALLEST_SIDE).all(dim=1)
    if "iscrowd" in target:
        kept &= ~target["iscrowd"].bool()
    cleaned = {"boxes": boxes[kept], "labels": target["labels"].long()[kept]}
    if "masks" in target:
        cleaned["masks"] = target["masks"].as_subclass(Tensor)[kept]
    return cleaned


def float_image(image: Tensor) -> Tensor:
    """An image with values from 0 to 1, 8-bit or not before."""
    image = image.as_subclass(Tensor)
    return image if image.is_floating_point() else image.float() / 255

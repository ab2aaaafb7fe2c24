"""What detectors are trained on: boxes that are inside the image and have an area."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import clip_boxes_to_image

SMALLEST_SIDE = 0.1
"""Pixels; a thinner box can vanish when the image is resized."""


def clean_target(target: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Tensor]:
    """Boxes clipped to an image of size (height, width), those without area and crowds left out.

    Also whatever belongs to the boxes: labels, and masks if there are any.
    """
    boxes = torch.as_tensor(target["boxes"]).as_subclass(Tensor).float().reshape(-1, 4)
    boxes = clip_boxes_to_image(boxes, size)
    kept = (boxes[:, 2:] - boxes[:, :2] >= SMALLEST_SIDE).all(dim=1)
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

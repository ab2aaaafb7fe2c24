"""What a detector is to find in an image, as torchvision's detectors and v2 transforms take it."""

from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.tv_tensors import BoundingBoxFormat


def make_target(
    *,
    boxes: Tensor,
    labels: Tensor,
    masks: Tensor | None,
    area: Tensor,
    iscrowd: Tensor,
    image_id: int,
    size: tuple[int, int],
) -> dict[str, Any]:
    """Return a target of n objects on an image of `size` (height, width).

    Boxes (n x 4) are x0, y0, x1, y1, labels count from 1, masks are n x height x width; `orig_size`
    keeps the size that results are to be scaled back to.
    """
    target: dict[str, Any] = {
        "boxes": tv_tensors.BoundingBoxes(  # pyright: ignore[reportCallIssue]
            boxes.reshape(-1, 4).float(), format=BoundingBoxFormat.XYXY, canvas_size=size
        ),
        "labels": labels.to(torch.int64),
        "area": area.float(),
        "iscrowd": iscrowd.to(torch.int64),
        "image_id": torch.tensor(image_id),
        "orig_size": torch.tensor(size),
    }
    if masks is not None:
        target["masks"] = tv_tensors.Mask(masks.to(torch.uint8))
    return target


def boxes_of(masks: Tensor) -> Tensor:
    """Return the tight box (x0, y0, x1, y1) around each of n masks (n x h x w, none empty)."""
    if len(masks) == 0:
        return torch.zeros(0, 4)
    left, right = _extent(masks.bool().any(1))
    top, bottom = _extent(masks.bool().any(2))
    return torch.stack((left, top, right, bottom), 1).float()


def _extent(profile: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and one past the last true place of each row."""
    inside = profile.to(torch.uint8)
    return inside.argmax(1), profile.shape[1] - inside.flip(1).argmax(1)

"""What a detector is to find in an image: boxes and masks, as torchvision's detectors take them.

Masks are packed and unpacked by pycocotools, which evaluation scores with as well.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.tv_tensors import BoundingBoxFormat

from ltm.extras import require

Mask = NDArray[np.bool_]


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
    # torchvision's boxes end at the last pixel, COCO's after it.
    return masks_to_boxes(masks).float() + torch.tensor([0.0, 0.0, 1.0, 1.0])


def encode_mask(mask: Tensor) -> dict[str, Any]:
    """Return a mask as COCO's compressed run lengths; probabilities count from 0.5 on."""
    flat = mask.detach().reshape(mask.shape[-2:])
    inside = flat >= 0.5 if flat.is_floating_point() else flat.bool()
    packed = require("pycocotools.mask").encode(
        np.asfortranarray(inside.cpu().numpy(), dtype=np.uint8)
    )
    return {"size": list(flat.shape), "counts": packed["counts"].decode("ascii")}


def decode_mask(segmentation: Any, height: int, width: int) -> Mask:
    """Return the mask of polygons (x, y, x, y and so on), or of run lengths, plain or compressed.

    Check run lengths from a stranger's file first, as `detection.coco` does: pycocotools
    fills up those that are too short.
    """
    tools = require("pycocotools.mask")
    if isinstance(segmentation, list):
        packed = tools.merge(tools.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation["counts"], list):
        packed = tools.frPyObjects(segmentation, height, width)
    else:
        packed = segmentation
    return tools.decode(packed).astype(bool)

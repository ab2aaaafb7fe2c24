"""Images and targets that stay on the device, for runs of minutes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ltm.data.shapes import ShapesDetection
from ltm.data.targets import boxes_of
from ltm.detection.coco import open_detection

Target = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images (3 h w, 8 bit) and targets on a device, and their truth in COCO's format."""

    images: list[Tensor]
    targets: list[Target]
    truth: dict[str, Any]
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def batch(
        self, places: Sequence[int], flips: Sequence[bool]
    ) -> tuple[list[Tensor], list[Target]]:
        """Some of them, each mirrored or not."""
        chosen = zip(places, flips, strict=True)
        pairs = [self._one(place, flip) for place, flip in chosen]
        return [image for image, _ in pairs], [target for _, target in pairs]

    def _one(self, place: int, flip: bool) -> tuple[Tensor, Target]:
        image, target = self.images[place], self.targets[place]
        if not flip:
            return image, target
        width = image.shape[-1]
        x0, y0, x1, y1 = target["boxes"].unbind(1)
        mirrored = {**target, "boxes": torch.stack((width - x1, y0, width - x0, y1), 1)}
        if "masks" in target:
            mirrored["masks"] = target["masks"].flip(-1)
        return image.flip(-1), mirrored


def read_coco(path: Path, device: torch.device, *, masks: bool, size: int | None) -> Pictures:
    """A COCO archive; with `size`, images are resized as SSDLite would do, once and for all."""
    dataset = open_detection(path, masks=masks, crowd=False)
    images: list[Tensor] = []
    targets: list[Target] = []
    for index in range(len(dataset)):
        image, target = dataset[index]
        image = image.as_subclass(Tensor).to(device)
        kept = {"boxes": target["boxes"].as_subclass(Tensor), "labels": target["labels"]}
        if masks:
            kept["masks"] = target["masks"].as_subclass(Tensor)
        kept = {name: value.to(device) for name, value in kept.items()}
        kept["image_id"] = target["image_id"]
        if size is not None:
            height, width = image.shape[-2:]
            scale = torch.tensor([size / width, size / height] * 2, device=device)
            kept["boxes"] = kept["boxes"] * scale
            resized = F.interpolate(image[None].float(), (size, size), mode="bilinear")
            image = resized[0].round().clamp(0, 255).to(torch.uint8)
        images.append(image)
        targets.append(kept)
    return Pictures(images, targets, dataset.coco_dict(), dataset.class_names, dataset.category_ids)


def paint_shapes(dataset: ShapesDetection, device: torch.device, workers: int) -> Pictures:
    """Generated shapes, painted by several processes."""
    side = dataset.image_size
    painted = _in_parallel(_Painter(dataset), len(dataset), workers)
    images: list[Tensor] = []
    targets: list[Target] = []
    for index, (pixels, packed, labels) in enumerate(painted):
        masks = np.unpackbits(packed, axis=-1, count=side * side).reshape(-1, side, side)
        inside = torch.from_numpy(masks)
        images.append(torch.from_numpy(pixels).to(device))
        targets.append(
            {
                "boxes": boxes_of(inside).to(device),
                "labels": (torch.tensor(labels, dtype=torch.int64) + 1).to(device),
                "masks": inside.to(device),
                "image_id": torch.tensor(index),
            }
        )
    truth = _truth(dataset, targets, side)
    return Pictures(images, targets, truth, dataset.class_names, dataset.category_ids)


class _Painter:
    """Paints one image of a data set; masks come packed."""

    def __init__(self, dataset: ShapesDetection) -> None:
        self.dataset = dataset

    def __call__(self, index: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        painting, labels = self.dataset.paint(index)
        flat = painting.masks.reshape(len(labels), self.dataset.image_size**2)
        return painting.image, np.packbits(flat, axis=-1), labels


def _in_parallel(work: Callable[[int], Any], count: int, workers: int) -> list[Any]:
    if workers <= 1:
        return [work(index) for index in range(count)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return pool.map(work, range(count), chunksize=16)


def _truth(dataset: ShapesDetection, targets: list[Target], side: int) -> dict[str, Any]:
    """The truth in COCO's format; what `coco_dict` gives, without painting again."""
    from ltm.data.targets import encode_mask  # noqa: PLC0415 - after the processes have forked

    annotations: list[dict[str, Any]] = []
    for index, target in enumerate(targets):
        boxes = target["boxes"].cpu()
        boxes = torch.cat((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), 1).tolist()
        masks = target["masks"].cpu()
        for place, label in enumerate(target["labels"].tolist()):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": index,
                    "category_id": dataset.category_ids[label - 1],
                    "bbox": boxes[place],
                    "area": int(masks[place].sum()),
                    "iscrowd": 0,
                    "segmentation": encode_mask(masks[place]),
                }
            )
    names = zip(dataset.category_ids, dataset.class_names, strict=True)
    return {
        "info": {},
        "images": [
            {"id": index, "height": side, "width": side, "file_name": f"{index:06d}.png"}
            for index in range(len(targets))
        ],
        "categories": [{"id": number, "name": name} for number, name in names],
        "annotations": annotations,
    }

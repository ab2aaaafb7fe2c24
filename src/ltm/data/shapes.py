"""Generated data: textured shapes in clutter, with labels, boxes and masks, and no download.

A picture depends on `(seed, split, index)` alone: not on the order of reading, the worker or the
process. The scene, though not its grain, is also the same at every image size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import tv_tensors

from ltm.core.validation import require, require_least
from ltm.data.images import ImageDataset, Transform
from ltm.data.scenes import Painting, class_names, draw_scene, paint
from ltm.data.targets import boxes_of, encode_mask, make_target
from ltm.models import read_words

_SPLITS = {"train": 0, "val": 1, "test": 2}
_TASKS = {"classification": 0, "detection": 1, "examples": 2}
_RADII = (0.22, 0.36)
_SMALL_RADII = (0.1, 0.2)
_MAX_OBJECTS = 4
_MAX_CACHED_BYTES = 256 * 2**20

JointTransform = Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]


class Picture(NamedTuple):
    """An example image and what to call it."""

    name: str
    image: Image.Image


class ShapesClassification(ImageDataset):
    """One textured shape per image; label `index % num_classes`, so every prefix is balanced.

    A shape's radius is 0.22 to 0.36 of the image side, or 0.1 to 0.2 if `small`.

    Data sets up to 256 MiB are painted once and kept; larger ones are painted anew each time.
    """

    def __init__(
        self,
        split: str = "train",
        num_images: int = 4000,
        image_size: int = 64,
        num_classes: int = 10,
        seed: int = 0,
        *,
        small: bool = False,
        transform: Transform | None = None,
    ) -> None:
        names = class_names(num_classes)
        require_least("num_images", num_images)
        require_least("image_size", image_size)
        require_least("seed", seed, 0)
        self.image_size, self.seed = image_size, seed
        labels = np.arange(num_images) % num_classes
        radii = _SMALL_RADII if small else _RADII
        images = _ShapeImages(_known_split(split), labels, image_size, seed, radii)
        super().__init__(images, labels, names, split=split, transform=transform)

    def take(self, num_images: int) -> Self:
        """Return the first `num_images` images, or all if there are fewer."""
        require_least("num_images", num_images)
        return self.select(range(min(num_images, len(self))))


class _ShapeImages:
    """Pictures of one shape each, painted when they are read."""

    def __init__(
        self,
        split: str,
        labels: np.ndarray,
        image_size: int,
        seed: int,
        radii: tuple[float, float],
    ) -> None:
        self._split, self._labels, self._image_size, self._seed = split, labels, image_size, seed
        self._radii = radii
        keeps = len(labels) * 3 * image_size**2 <= _MAX_CACHED_BYTES
        self._kept: dict[int, np.ndarray] | None = {} if keeps else None

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        return f"shapes/{self._split}/{index}"

    def read(self, index: int) -> Image.Image:
        kept = self._kept
        pixels = self._paint(index) if kept is None or index not in kept else kept[index]
        if kept is not None:
            kept[index] = pixels
        return Image.fromarray(pixels)

    def _paint(self, index: int) -> np.ndarray:
        rng = _generator(self._seed, "classification", self._split, index)
        scene = draw_scene(rng, (int(self._labels[index]),), self._radii)
        return np.ascontiguousarray(paint(scene, self._image_size).image.transpose(1, 2, 0))


class ShapesDetection(Dataset[tuple[Any, dict[str, Any]]]):
    """Several textured shapes per image, with boxes and masks of what is visible of each.

    Items are `(image, target)` as `torchvision.transforms.v2` and torchvision's detectors expect;
    labels run from 1, as 0 is the background. A share of the images has no object.
    """

    def __init__(
        self,
        split: str = "train",
        num_images: int = 500,
        image_size: int = 128,
        num_classes: int = 5,
        seed: int = 0,
        *,
        empty_ratio: float = 0.05,
        transforms: JointTransform | None = None,
    ) -> None:
        self.class_names = class_names(num_classes)
        self.split = _known_split(split)
        require_least("num_images", num_images)
        require_least("image_size", image_size)
        allowed = "at least 0 and below 1"
        require(0.0 <= empty_ratio < 1.0, "empty_ratio", empty_ratio, allowed)
        self.num_images, self.image_size = num_images, image_size
        self.empty_ratio = empty_ratio
        self.seed = seed
        self.transforms = transforms

    @property
    def num_classes(self) -> int:
        """Return the number of classes, the background not counted."""
        return len(self.class_names)

    @property
    def category_ids(self) -> tuple[int, ...]:
        """Return the COCO category of each label, from label 1 on."""
        return tuple(range(1, self.num_classes + 1))

    @property
    def image_ids(self) -> tuple[int, ...]:
        """Return the images' ids in `coco_dict`."""
        return tuple(range(self.num_images))

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        painting, labels = self.paint(index)
        image = tv_tensors.Image(torch.from_numpy(painting.image))
        masks = torch.from_numpy(painting.masks)
        target = make_target(
            boxes=boxes_of(masks),
            labels=torch.tensor(labels, dtype=torch.int64) + 1,
            masks=masks,
            area=masks.sum((1, 2)),
            iscrowd=torch.zeros(len(labels)),
            image_id=index,
            size=(self.image_size, self.image_size),
        )
        return (image, target) if self.transforms is None else self.transforms(image, target)

    def paint(self, index: int) -> tuple[Painting, list[int]]:
        """Return an image's pixels and visible masks, and the labels (from 0) of its objects."""
        if not 0 <= index < self.num_images:
            raise IndexError(f"image {index} of {self.num_images}")
        rng = _generator(self.seed, "detection", self.split, index)
        count = 0 if rng.random() < self.empty_ratio else int(rng.integers(1, _MAX_OBJECTS + 1))
        labels = tuple(rng.integers(0, self.num_classes, count).tolist())
        scene = draw_scene(rng, labels, _SMALL_RADII)
        painting = paint(scene, self.image_size)
        # On images of a few pixels a shape can vanish; an object without pixels is none.
        seen = np.flatnonzero(painting.masks.any((1, 2)))
        kept = [scene.objects[place].label for place in seen]
        return Painting(painting.image, painting.masks[seen]), kept

    def coco_dict(self) -> dict[str, Any]:
        """Return the annotations in COCO's format, for evaluators."""
        annotations: list[dict[str, Any]] = []
        for index in range(self.num_images):
            painting, labels = self.paint(index)
            boxes = boxes_of(torch.from_numpy(painting.masks))
            boxes[:, 2:] -= boxes[:, :2]
            annotations += [
                {
                    "id": len(annotations) + 1 + place,
                    "image_id": index,
                    "category_id": label + 1,
                    "bbox": boxes[place].tolist(),
                    "area": int(painting.masks[place].sum()),
                    "iscrowd": 0,
                    "segmentation": encode_mask(torch.from_numpy(painting.masks[place])),
                }
                for place, label in enumerate(labels)
            ]
        side = {"width": self.image_size, "height": self.image_size}
        names = zip(self.category_ids, self.class_names, strict=True)
        return {
            "info": {"description": "generated shapes"},
            "images": [
                {"id": index, "file_name": f"{index:06d}.png", **side}
                for index in range(self.num_images)
            ],
            "categories": [{"id": number, "name": name} for number, name in names],
            "annotations": annotations,
        }


def example_pictures(num_pictures: int = 6, image_size: int = 256) -> list[Picture]:
    """Paint a few larger pictures, of one to three objects each, for documentation and demos."""
    names = class_names(20)
    pictures = []
    require_least("num_pictures", num_pictures)
    for index in range(num_pictures):
        rng = _generator(0, "examples", "test", index)
        count = index % 3 + 1
        labels = tuple(rng.choice(len(names), count, replace=False).tolist())
        scene = draw_scene(rng, labels, (0.3, 0.38) if count == 1 else (0.16, 0.24))
        shown = ", ".join(names[item.label] for item in scene.objects)
        pixels = paint(scene, image_size).image.transpose(1, 2, 0)
        pictures.append(Picture(shown, Image.fromarray(np.ascontiguousarray(pixels))))
    return pictures


def shapes_options(source: str, defaults: dict[str, int]) -> dict[str, int]:
    """Read a source such as "shapes:size=64,seed=1": whole numbers, by known names."""
    words = filter(None, [source.partition(":")[2]])
    try:
        found = read_words(words, dict.fromkeys(defaults, int), owner="shapes")
    except ValueError as error:
        known = ",".join(f"{name}={default}" for name, default in defaults.items())
        raise ValueError(f"{error}; write shapes:{known}") from error
    for name, number in found.items():
        require_least(f"data shapes:{name}", number, 0)
    return defaults | found


def shapes_arguments(source: str, split: str, **defaults: int) -> dict[str, Any]:
    """Read a source as arguments of `ShapesClassification` or `ShapesDetection`.

    `defaults` are `classes`, `size`, `images` (to train on), `val_images` (for other splits) and,
    for data that know it, `small`.
    """
    options = shapes_options(source, defaults | {"seed": 0})
    choice = {"small": bool(options["small"])} if "small" in options else {}
    return choice | {
        "split": split,
        "num_images": options["images" if split == "train" else "val_images"],
        "image_size": options["size"],
        "num_classes": options["classes"],
        "seed": options["seed"],
    }


def _generator(seed: int, task: str, split: str, index: int) -> np.random.Generator:
    require_least("seed", seed, 0)
    return np.random.default_rng([seed, _TASKS[task], _SPLITS[split], index])


def _known_split(split: str) -> str:
    if split not in _SPLITS:
        raise ValueError(
            f"generated shapes have no split {split!r}; choose from {', '.join(_SPLITS)}"
        )
    return split

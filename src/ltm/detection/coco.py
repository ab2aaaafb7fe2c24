"""Images annotated in COCO's format: checked files, data sets, and their transforms.

Sources are folders and archives in COCO's layout, and generated shapes.
"""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from ltm.data.folders import FileImages, Files, list_images, open_files
from ltm.data.images import ImageFiles, UnreadableImages, next_readable
from ltm.data.limits import Limits, read_file, split_limits
from ltm.data.shapes import JointTransform, ShapesDetection, shapes_arguments
from ltm.data.targets import Mask, decode_mask, make_target

_MAX_UNREADABLE = 10
"""How many unreadable images are skipped, with a warning, before an error."""


@dataclass(frozen=True, slots=True)
class CocoImage:
    """An image of an annotation file."""

    id: int
    file_name: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class CocoAnnotation:
    """An object: its box (x, y, width, height) as written, and its mask as polygons or runs."""

    id: int
    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]
    area: float
    iscrowd: bool
    segmentation: Any

    def mask(self, height: int, width: int) -> Mask:
        """Return the object's mask; raise `ValueError`, naming it, where it has none."""
        if not self.segmentation:
            raise ValueError(f"annotation {self.id}: segmentation: is missing")
        return decode_mask(self.segmentation, height, width)


@dataclass(frozen=True)
class CocoAnnotations:
    """A checked annotation file; categories by id, annotations by image."""

    images: tuple[CocoImage, ...]
    categories: dict[int, str]
    by_image: dict[int, tuple[CocoAnnotation, ...]]
    where: str
    """The file, for error messages."""


def check_annotations(
    data: Any, where: str = "annotations", limits: Limits | None = None
) -> CocoAnnotations:
    """Check a parsed annotation file; raise `ValueError` naming the entry and the field."""
    limits = limits or Limits()
    if not isinstance(data, dict):
        raise ValueError(f"{where} must hold an object with images, annotations and categories")
    for section in ("images", "annotations", "categories"):
        if not isinstance(data.get(section), list):
            raise ValueError(f"{where} has no list of {section}; is it in COCO's format?")
    images = [_image(_Entry(where, "image", *item), limits) for item in enumerate(data["images"])]
    entries = [_Entry(where, "category", *item) for item in enumerate(data["categories"])]
    limits.check("most_classes", len(entries), f"{where} has {len(entries)} categories")
    categories = {entry.id(): entry.get("name", str) for entry in entries}
    _refuse_doubles(where, "image", (image.id for image in images))
    _refuse_doubles(where, "category", (entry.id() for entry in entries))
    by_id = {image.id: image for image in images}
    found: dict[int, list[CocoAnnotation]] = {image.id: [] for image in images}
    for item in enumerate(data["annotations"]):
        annotation = _annotation(_Entry(where, "annotation", *item), by_id, categories)
        found[annotation.image_id].append(annotation)
    every = (annotation.id for annotations in found.values() for annotation in annotations)
    _refuse_doubles(where, "annotation", every)
    return CocoAnnotations(
        images=tuple(images),
        categories=dict(sorted(categories.items())),
        by_image={image: tuple(annotations) for image, annotations in found.items()},
        where=where,
    )


class DetectionBatch(NamedTuple):
    """Images of any sizes, and one target each."""

    images: list[Tensor]
    targets: list[dict[str, Tensor]]


class CocoDetection(Dataset[tuple[Any, dict[str, Any]]]):
    """Images with boxes, labels and masks, from annotations in COCO's format.

    Label 0 is the background; labels from 1 on are categories in the order of their ids, so that
    `category_ids[label - 1]` is the id. Boxes are clipped to the image, and empty ones dropped.
    Without transforms, images are `tv_tensors.Image`, 8 bit.
    """

    def __init__(
        self,
        files: ImageFiles,
        annotations: CocoAnnotations,
        *,
        masks: bool = True,
        crowd: bool = True,
        transforms: JointTransform | None = None,
    ) -> None:
        self.category_ids = tuple(annotations.categories)
        self.class_names = tuple(annotations.categories.values())
        self.masks = masks
        self.crowd = crowd
        self.transforms = transforms
        self.unreadable = UnreadableImages(files, _MAX_UNREADABLE)
        self._files = files
        self._images = annotations.images
        self._by_image = annotations.by_image
        self.where = annotations.where
        self._label_of = {number: 1 + place for place, number in enumerate(self.category_ids)}

    @property
    def num_classes(self) -> int:
        """Return the number of classes, the background not counted."""
        return len(self.class_names)

    @property
    def image_ids(self) -> tuple[int, ...]:
        """Return the images' ids in the annotation file."""
        return tuple(image.id for image in self._images)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        every = range(len(self))
        picture, place = next_readable(self._files, self.unreadable, every, every[index])
        record = self._images[place]
        if picture.size != (record.width, record.height):
            raise ValueError(
                f"image {record.id}: width and height are {record.width} x {record.height}, "
                f"but {self._files.name(place)} has {picture.width} x {picture.height} pixels"
            )
        image, target = _image_tensor(picture), self._target(record)
        return (image, target) if self.transforms is None else self.transforms(image, target)

    def coco_dict(self) -> dict[str, Any]:
        """Return all annotations in COCO's format, for evaluators."""
        return {
            "info": {},
            "images": [asdict(item) for item in self._images],
            "categories": [
                {"id": number, "name": name}
                for number, name in zip(self.category_ids, self.class_names, strict=True)
            ],
            "annotations": [
                _coco_entry(item) for image in self._images for item in self._by_image[image.id]
            ],
        }

    def _target(self, image: CocoImage) -> dict[str, Any]:
        found = [item for item in self._by_image[image.id] if self.crowd or not item.iscrowd]
        boxes = np.array([item.bbox for item in found], dtype=np.float32).reshape(-1, 4)
        corners = np.concatenate((boxes[:, :2], boxes[:, :2] + boxes[:, 2:]), 1)
        limits = np.array([image.width, image.height] * 2, dtype=np.float32)
        corners = corners.clip(0.0, limits)
        kept = np.flatnonzero((corners[:, 2:] > corners[:, :2]).all(1))
        items = [found[place] for place in kept]
        return make_target(
            boxes=torch.from_numpy(corners[kept]),
            labels=torch.tensor([self._label_of[item.category_id] for item in items]),
            masks=self._masks(items, image) if self.masks else None,
            area=torch.tensor([item.area for item in items]),
            iscrowd=torch.tensor([item.iscrowd for item in items]),
            image_id=image.id,
            size=(image.height, image.width),
        )

    def _masks(self, items: list[CocoAnnotation], image: CocoImage) -> Tensor:
        masks = np.zeros((len(items), image.height, image.width), dtype=np.uint8)
        for mask, item in zip(masks, items, strict=True):
            try:
                mask[:] = item.mask(image.height, image.width)
            except ValueError as error:
                raise ValueError(f"{self.where}: {error}") from error
        return torch.from_numpy(masks)


def open_detection(
    source: str | Path = "shapes",
    *,
    split: str = "val",
    annotations: str | Path | None = None,
    transforms: JointTransform | None = None,
    masks: bool = True,
    crowd: bool = True,
) -> CocoDetection | ShapesDetection:
    """Open detection data.

    Args:
        source: A folder or .zip archive with images and annotations in COCO's format, or `shapes`,
            generated, with options such as `shapes:classes=5,size=128,images=500,val_images=100`.
            Limits may be written behind a source: `slides?most_pixels=500000000` (`data.limits`).
        split: Which split of COCO's own layout (`annotations/instances_val2017.json`), or of
            generated shapes. Other sources have only one.
        annotations: The annotation file, within the source or elsewhere. By default the first one
            with a usual name.
        transforms: Applied to image and target together, such as `detection_transforms`.
        masks: Whether targets have masks.
        crowd: Whether targets have crowd regions, which detectors are not trained on.
    """
    if str(source).partition(":")[0] == "shapes":
        counts = {"images": 500, "val_images": 100}
        arguments = shapes_arguments(str(source), split, classes=5, size=128, **counts)
        return ShapesDetection(**arguments, transforms=transforms)
    name, limits, _ = split_limits(source)
    files = open_files(name, limits)
    if files is None:
        raise FileNotFoundError(
            f"no data at {source}; give a COCO folder, a .zip archive of one, or shapes"
        )
    found = _read_annotations(files, split, annotations)
    return CocoDetection(
        FileImages(
            files,
            _image_paths(files, found.images, split),
            [(image.width, image.height) for image in found.images],
        ),
        found,
        masks=masks,
        crowd=crowd,
        transforms=transforms,
    )


def _read_annotations(files: Files, split: str, annotations: str | Path | None) -> CocoAnnotations:
    """Read the given annotation file, or the one found under a usual name, one folder deep."""
    if annotations is not None and Path(annotations).is_file():
        where = str(annotations)
        content = read_file(Path(annotations), files.limits, "most_annotation_bytes")
    else:
        usual = [str(annotations)] if annotations else _usual_names(split)
        inside = _find_annotations(files, usual)
        where, content = f"{files.path}/{inside}", files.read(inside, "most_annotation_bytes")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    return check_annotations(data, where, files.limits)


def _find_annotations(files: Files, usual: list[str]) -> str:
    names = set(files.names())
    tops = sorted({name.split("/", 1)[0] for name in names if "/" in name})
    for name in [*usual, *(f"{top}/{name}" for top in tops for name in usual)]:
        if name in names:
            return name
    known = ", ".join(usual)
    raise FileNotFoundError(f"{files.path} has none of {known}; name the annotation file")


def _usual_names(split: str) -> list[str]:
    ours = [f"annotations/instances_{split}2017.json", f"annotations/instances_{split}.json"]
    return [*ours, f"{split}/instances.json", "instances.json", "annotations/instances.json"]


def _image_paths(files: Files, images: Sequence[CocoImage], split: str) -> list[str]:
    """Find every image of an annotation file: the path that ends with its file name.

    If several do, it is the one in a folder of the split (`val`, `val2017`).
    """
    by_name: dict[str, list[str]] = {}
    for path in list_images(files).images:
        by_name.setdefault(PurePosixPath(path).name, []).append(path)
    paths = []
    for image in images:
        candidates = by_name.get(PurePosixPath(image.file_name).name, [])
        found = [path for path in candidates if f"/{path}".endswith(f"/{image.file_name}")]
        if not found:
            raise FileNotFoundError(
                f"{files.path} lacks {image.file_name:.200}, the file_name of image {image.id}"
            )
        paths.append(found[0] if len(found) == 1 else _one_of(found, image, files, split))
    return paths


def _one_of(found: list[str], image: CocoImage, files: Files, split: str) -> str:
    folders = {path: PurePosixPath(path).parent.parts for path in found}
    chosen = [path for path in found if any(part.startswith(split) for part in folders[path])]
    if image.file_name in found:
        chosen = [image.file_name]
    if len(chosen) != 1:
        raise ValueError(
            f"{files.path}: both {found[0]} and {found[1]} could be {image.file_name}, the "
            f"file_name of image {image.id}; add the folder to file_name"
        )
    return chosen[0]


# SSD pads with ImageNet's mean colour. The padding belongs to no mask.
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
        training: Whether to augment; evaluation only resizes.
        size: Side, or height and width, to resize to; None leaves that to the detector.
        crops: SSD's zooming out and crops around objects; Mask R-CNN does not use them.
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
    """Return what is to be dropped together with boxes and masks: one row per object."""
    target = inputs[-1]
    return tuple(target[name] for name in ("labels", "area", "iscrowd"))


class _MeasureArea(nn.Module):
    """Measure the areas of the transformed masks or boxes."""

    def forward(self, image: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if "masks" in target:
            area = target["masks"].sum((1, 2)).float()
        else:
            boxes = target["boxes"]
            area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        return image, {**target, "area": area}


def collate_detection(items: Sequence[tuple[Tensor, dict[str, Tensor]]]) -> DetectionBatch:
    """Make a batch of images of any sizes; the `collate` of `loading.build_loader`."""
    return DetectionBatch([image for image, _ in items], [target for _, target in items])


def _image_tensor(picture: Image.Image) -> tv_tensors.Image:
    pixels = np.array(picture)  # a copy: PIL's own memory is read-only
    return tv_tensors.Image(torch.from_numpy(pixels).permute(2, 0, 1).contiguous())


def _coco_entry(item: CocoAnnotation) -> dict[str, Any]:
    return {
        "id": item.id,
        "image_id": item.image_id,
        "category_id": item.category_id,
        "bbox": list(item.bbox),
        "area": item.area,
        "iscrowd": int(item.iscrowd),
        "segmentation": item.segmentation or [],
    }


_MOST_ID = 2**63
_MOST_SIDE = 2**31
_MOST_OUTLINE = 2**22
"""The limit of a polygon's outline in pixels, and of its coordinates. pycocotools has none, and
takes memory for every pixel of the outline."""

_KINDS = {int: "a whole number", str: "text", list: "a list", dict: "an object"}


class _Entry:
    """One entry of a section; its errors say where the fault is."""

    def __init__(self, where: str, kind: str, number: int, fields: Any) -> None:
        self.name = f"{where}: {kind} number {number}"
        if not isinstance(fields, dict):
            raise ValueError(f"{self.name} must be an object, not {type(fields).__name__}")
        self.fields = fields
        if _is_a(fields.get("id"), int):
            self.name = f"{where}: {kind} {fields['id']}"

    def get(self, field: str, kind: type) -> Any:
        if field not in self.fields:
            raise self.fault(field, "is missing")
        value = self.fields[field]
        if not _is_a(value, kind):
            raise self.fault(field, f"must be {_KINDS[kind]}, not {value!r:.40}")
        return value

    def id(self) -> int:
        value = self.get("id", int)
        if not -_MOST_ID <= value < _MOST_ID:
            raise self.fault("id", f"must fit into 64 bits, not {value!r:.40}")
        return value

    def number(self, field: str, value: Any) -> float:
        if not _is_a(value, (int, float)):
            raise self.fault(field, f"must hold numbers, not {value!r:.40}")
        if not abs(value) < math.inf or abs(value) > sys.float_info.max:
            raise self.fault(field, f"must hold finite numbers, not {value!r:.40}")
        return float(value)

    def fault(self, field: str, problem: str) -> ValueError:
        return ValueError(f"{self.name}: {field} {problem}")


def _is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Like isinstance, but true and false are no numbers."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _refuse_doubles(where: str, kind: str, ids: Iterable[int]) -> None:
    seen: set[int] = set()
    for number in ids:
        if number in seen:
            raise ValueError(f"{where}: {kind} {number}: id is used twice")
        seen.add(number)


def _image(entry: _Entry, limits: Limits) -> CocoImage:
    image = CocoImage(
        entry.id(),
        entry.get("file_name", str),
        entry.get("width", int),
        entry.get("height", int),
    )
    for field in ("width", "height"):
        if not 1 <= getattr(image, field) < _MOST_SIDE:
            raise entry.fault(field, f"must be at least 1 and below {_MOST_SIDE}")
    pixels = image.width * image.height
    limits.check("most_pixels", pixels, f"{entry.name}: width and height make {pixels} pixels")
    return image


def _annotation(
    entry: _Entry, images: dict[int, CocoImage], categories: dict[int, str]
) -> CocoAnnotation:
    number = entry.id()
    image = entry.get("image_id", int)
    if image not in images:
        raise entry.fault("image_id", f"is {image}, which no image has")
    category = entry.get("category_id", int)
    if category not in categories:
        raise entry.fault("category_id", f"is {category}, which no category has")
    bbox = [entry.number("bbox", value) for value in entry.get("bbox", list)]
    if len(bbox) != 4:
        raise entry.fault("bbox", f"must hold x, y, width and height, not {len(bbox)} numbers")
    crowd = entry.fields.get("iscrowd", 0)
    if crowd not in (0, 1):
        raise entry.fault("iscrowd", f"must be 0 or 1, not {crowd!r:.40}")
    area = entry.number("area", entry.fields.get("area", bbox[2] * bbox[3]))
    segmentation = _segmentation(entry, images[image])
    return CocoAnnotation(
        number,
        image,
        category,
        (bbox[0], bbox[1], bbox[2], bbox[3]),
        area,
        bool(crowd),
        segmentation,
    )


def _segmentation(entry: _Entry, image: CocoImage) -> Any:
    value = entry.fields.get("segmentation")
    if value is None or isinstance(value, list):
        for polygon in value or []:
            _check_polygon(entry, polygon)
        return value
    if not isinstance(value, dict):
        raise entry.fault("segmentation", f"must be polygons or run lengths, not {value!r:.40}")
    if value.get("size") != [image.height, image.width]:
        raise entry.fault(
            "segmentation",
            f"has size {value.get('size')}, but the image has [{image.height}, {image.width}]",
        )
    _check_counts(entry, value.get("counts"), image)
    return value


def _check_polygon(entry: _Entry, polygon: Any) -> None:
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        raise entry.fault("segmentation", "must hold polygons of at least three points (x, y)")
    points = np.array([entry.number("segmentation", value) for value in polygon]).reshape(-1, 2)
    if np.abs(points).max() > _MOST_OUTLINE:
        raise entry.fault("segmentation", f"must stay below {_MOST_OUTLINE} pixels")
    if np.abs(points - np.roll(points, 1, axis=0)).max(axis=1).sum() > _MOST_OUTLINE:
        raise entry.fault("segmentation", f"must have outlines of at most {_MOST_OUTLINE} pixels")


def _check_counts(entry: _Entry, counts: Any, image: CocoImage) -> None:
    """Check that run lengths fill the image."""
    if not isinstance(counts, list | str):
        raise entry.fault("segmentation", "has no counts")
    try:
        runs = counts if isinstance(counts, list) else _parse_counts(counts)
    except ValueError as error:
        raise entry.fault("segmentation", f"is malformed: {error}") from error
    if not all(_is_a(run, int) and run >= 0 for run in runs):
        raise entry.fault("segmentation", "has counts that are no whole numbers from 0 on")
    if sum(runs) != image.width * image.height:
        raise entry.fault(
            "segmentation", f"has counts that do not fill {image.width} x {image.height} pixels"
        )


def _parse_counts(text: str) -> list[int]:
    """Return the run lengths of COCO's compressed form; raise `ValueError` if it is damaged.

    pycocotools does not check: it reads past the end of a text that ends within a number. Each
    character holds five bits of a number, the lowest first; a sixth bit says that more follow. From
    the fourth number on, what is stored is the difference from the number before the last.
    """
    counts: list[int] = []
    value = shift = 0
    for letter in text:
        bits = ord(letter) - 48
        if not 0 <= bits < 64:
            raise ValueError(f"compressed run lengths contain {letter!r}")
        value |= (bits & 31) << shift
        shift += 5
        if shift > 60:
            raise ValueError("compressed run lengths contain a number of more than 60 bits")
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("compressed run lengths end in the middle of a number")
    return counts

"""Annotation files in COCO's format, checked in full before anything is made of them."""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ltm.data.targets import Mask, decode_mask

_KINDS = {int: "a whole number", str: "text", list: "a list", dict: "an object"}


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


def check_annotations(data: Any, where: str = "annotations") -> CocoAnnotations:
    """Check a parsed annotation file; raise `ValueError` naming the entry and the field."""
    if not isinstance(data, dict):
        raise ValueError(f"{where} must hold an object with images, annotations and categories")
    for section in ("images", "annotations", "categories"):
        if not isinstance(data.get(section), list):
            raise ValueError(f"{where} has no list of {section}; is it in COCO's format?")
    images = [_image(_Entry(where, "image", *item)) for item in enumerate(data["images"])]
    entries = [_Entry(where, "category", *item) for item in enumerate(data["categories"])]
    categories = {entry.get("id", int): entry.get("name", str) for entry in entries}
    _refuse_doubles(where, "image", (image.id for image in images))
    _refuse_doubles(where, "category", (entry.get("id", int) for entry in entries))
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
    )


class _Entry:
    """One entry of a section, for messages that say where the fault is."""

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


def _image(entry: _Entry) -> CocoImage:
    image = CocoImage(
        entry.get("id", int),
        entry.get("file_name", str),
        entry.get("width", int),
        entry.get("height", int),
    )
    for field in ("width", "height"):
        if getattr(image, field) < 1:
            raise entry.fault(field, "must be at least 1")
    return image


def _annotation(
    entry: _Entry, images: dict[int, CocoImage], categories: dict[int, str]
) -> CocoAnnotation:
    number = entry.get("id", int)
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
    for value in polygon:
        entry.number("segmentation", value)


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

    pycocotools trusts its input: it reads on behind a text that ends in the middle of a number.
    Five bits a character, low ones first, the sixth saying that more follow; from the fourth
    number on, differences to the last but one.
    """
    counts: list[int] = []
    value = shift = 0
    for code in text.encode("ascii", "replace"):
        bits = code - 48
        if not 0 <= bits < 64:
            raise ValueError(f"compressed run lengths contain {chr(code)!r}")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("compressed run lengths end in the middle of a number")
    return counts

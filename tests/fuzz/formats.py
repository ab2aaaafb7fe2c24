"""The formats that are fuzzed. To add one, append a `Format`: how to write a good file, and how
the library reads it.
"""

import io
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fuzz.mutations import Mutation, mutate_bytes, mutate_json, mutate_text
from ltm.data.datasets import open_dataset
from ltm.data.decoding import decode_array, read_image
from ltm.data.limits import split_limits
from ltm.data.shapes import ShapesClassification, ShapesDetection
from ltm.data.sources import ImageRef, Part, find_images
from ltm.deployment.tables import Tables
from ltm.detection.coco import open_detection
from written import write_archive, write_coco_folder, write_shards


@dataclass(frozen=True, kw_only=True)
class Format:
    """A kind of file that strangers may give us."""

    name: str
    make: Callable[[Path], Path]
    """Write a good file into an empty folder, with whatever it needs beside it; return its path."""
    read: Callable[[Path], object]
    """Read the file at this path as the library does."""
    mutate: Mutation = mutate_bytes
    raises: tuple[type[Exception], ...] = (ValueError, OSError)
    """What reading a damaged file may raise, as documented: one line that names the file."""
    seconds: float = 10.0
    """How long reading one may take."""
    share: float = 1.0
    """Of the cases; less where one takes long."""


def _pictures() -> ShapesClassification:
    return ShapesClassification("val", num_images=4, image_size=16, num_classes=2)


def _read_all(path: Path) -> object:
    dataset = open_dataset(path, max_unreadable=0)
    return [dataset[index] for index in range(min(len(dataset), 8))]


def _make_shard(folder: Path) -> Path:
    return write_shards(_pictures(), folder)[0]


def _make_classes(folder: Path) -> Path:
    return _make_shard(folder).parent / "classes.txt"


def _make_annotations(folder: Path) -> Path:
    scenes = ShapesDetection("val", num_images=3, image_size=32, num_classes=3)
    return write_coco_folder(scenes, folder) / "instances.json"


def _read_annotations(path: Path) -> object:
    dataset = open_detection(path.parent)
    return [dataset[index] for index in range(min(len(dataset), 8))], dataset.coco_dict()


def _make_image(kind: str, mode: str, folder: Path) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    image = Image.fromarray(noise).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"exif": exif} if kind in ("JPEG", "PNG", "WEBP", "TIFF") else {}))
    path = folder / f"picture.{kind.lower()}"
    path.write_bytes(buffer.getvalue())
    return path


def _encoded(index: int) -> bytes:
    buffer = io.BytesIO()
    _pictures()[index][0].save(buffer, "PNG")
    return buffer.getvalue()


def _make_parquet(folder: Path) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": _encoded(index), "path": None} for index in range(4)]
    table = pyarrow.table({"id": list("abcd"), "image": images})
    parquet.write_table(table, folder / "pictures.parquet", row_group_size=2)
    return folder / "pictures.parquet"


def _read_references(path: Path) -> object:
    """What `ltm embed` and `ltm predict` read; an image may be damaged, by any error."""
    return [_read_reference(image) for image in find_images([str(path)])]


def _read_reference(image: ImageRef) -> object:
    try:
        return image.open()
    except Exception as error:  # noqa: BLE001 - becomes a line of the output
        return error


def _make_embeddings(folder: Path) -> Path:
    """A file of an `ltm embed`, which `--resume` looks at."""
    batch = {"part": [0], "place": [0], "part_rows": [1], "id": ["a"], "error": [None]}
    with closing(Tables(folder, {"model": "small"})) as tables:
        tables.add({name: np.array(values) for name, values in batch.items()})
        return tables.path(0)


def _read_embeddings(path: Path) -> object:
    return Tables(path.parent.parent, {"model": "small"}).has(0, Part("", tuple))


def _make_array(folder: Path) -> Path:
    np.save(folder / "picture.npy", np.zeros((24, 32, 3), np.uint8))
    return folder / "picture.npy"


def _make_words(folder: Path) -> Path:
    path = folder / "words.txt"
    path.write_text("pictures?most_pixels=100,most_classes=10,most_bytes=1000")
    return path


def _read_words(path: Path) -> object:
    try:
        return split_limits(path.read_bytes().decode("utf-8", "surrogateescape"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


FORMATS = (
    Format(
        name="archive",
        make=lambda folder: write_archive([_pictures()], folder / "pictures.zip"),
        read=_read_all,
    ),
    Format(name="shard", make=_make_shard, read=_read_all),
    Format(
        name="classes",
        make=_make_classes,
        read=lambda path: _read_all(path.parent),
        mutate=mutate_text,
    ),
    Format(
        name="annotations",
        make=_make_annotations,
        read=_read_annotations,
        mutate=mutate_json,
    ),
    Format(name="parquet", make=_make_parquet, read=_read_references),
    Format(name="embeddings", make=_make_embeddings, read=_read_embeddings),
    Format(
        name="array",
        make=_make_array,
        read=lambda path: decode_array(path.read_bytes(), str(path)),
    ),
    Format(name="limits", make=_make_words, read=_read_words, mutate=mutate_text),
    *(
        Format(name=f"{kind}-{mode}", make=partial(_make_image, kind, mode), read=read_image)
        for kind, mode in (
            ("PNG", "RGB"),
            ("PNG", "P"),
            ("JPEG", "RGB"),
            ("JPEG", "CMYK"),
            ("WEBP", "RGB"),
            ("GIF", "P"),
            ("TIFF", "RGB"),
            ("TIFF", "I;16"),
            ("BMP", "RGB"),
            ("PPM", "L"),
        )
    ),
)

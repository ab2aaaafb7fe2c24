"""Generated data sets as files: class folders, archives, tar shards, COCO folders."""

import io
import json
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from ltm.data.shapes import ShapesClassification, ShapesDetection


class _File(NamedTuple):
    """A file to write: its path below the root, and its content."""

    path: str
    data: bytes


def write_image_folder(datasets: Iterable[ShapesClassification], root: str | Path) -> Path:
    """Write each data set as `root/split/class name/number.png`."""
    root = Path(root)
    for file in _class_files(datasets):
        path = root / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
    return root


def write_archive(datasets: Iterable[ShapesClassification], path: str | Path) -> Path:
    """Write each data set into one .zip archive, in the layout of `write_image_folder`."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in _class_files(datasets):
            archive.writestr(file.path, file.data)
    return Path(path)


def write_shards(
    dataset: ShapesClassification, folder: str | Path, *, images_per_shard: int = 1000
) -> list[Path]:
    """Write `split-000.tar` and so on, with `classes.txt` beside them, as webdataset lays out."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in dataset.class_names))
    paths = []
    for number, start in enumerate(range(0, len(dataset), images_per_shard)):
        paths.append(folder / f"{dataset.split}-{number:03d}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for index in range(start, min(start + images_per_shard, len(dataset))):
                image, label = dataset[index]
                _add(tar, f"{index:06d}.png", _png(image))
                _add(tar, f"{index:06d}.cls", str(label).encode())
    return paths


def write_coco_folder(dataset: ShapesDetection, root: str | Path) -> Path:
    """Write `root/images/*.png` and `root/instances.json` in COCO's format."""
    images = Path(root) / "images"
    images.mkdir(parents=True, exist_ok=True)
    coco = dataset.coco_dict()
    for record in coco["images"]:
        pixels = dataset.paint(record["id"])[0].image.transpose(1, 2, 0)
        Image.fromarray(np.ascontiguousarray(pixels)).save(images / record["file_name"])
    (Path(root) / "instances.json").write_text(json.dumps(coco))
    return Path(root)


def _class_files(datasets: Iterable[ShapesClassification]) -> Iterator[_File]:
    for dataset in datasets:
        for index in range(len(dataset)):
            image, label = dataset[index]
            folder = f"{dataset.split}/{dataset.class_names[label]}"
            yield _File(f"{folder}/{index:06d}.png", _png(image))


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))

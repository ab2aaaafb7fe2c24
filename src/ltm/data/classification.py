"""The door to labelled images: folders, .zip archives, tar shards, Hugging Face, generated shapes.

`open_dataset` tells them apart by the source's form; everything it returns has `class_names`,
`num_classes`, `split`, `len`, and `(image, label)` items, images in RGB.
"""

from collections.abc import Callable, Sequence
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from ltm.data.config import DataConfig
from ltm.data.folders import StoredImages, label_paths, list_images
from ltm.data.images import ImageFiles, OnDevices, UnreadableImages, next_readable, to_rgb
from ltm.data.shapes import ShapesClassification, Transform, shapes_options
from ltm.data.shards import TarShards, expand_shards
from ltm.data.stores import open_store


class ImageDataset(Dataset[tuple[Any, int]]):
    """Labelled image files, by index; PIL images where there is no transform.

    An unreadable image is reported by its path and replaced by the next readable one, label
    included; the `max_unreadable + 1`-th raises `UnreadableImagesError` with all the paths.
    """

    def __init__(
        self,
        files: ImageFiles,
        labels: np.ndarray,
        class_names: tuple[str, ...],
        *,
        split: str = "all",
        transform: Transform | None = None,
        max_unreadable: int = 10,
    ) -> None:
        if len(files) != len(labels):
            raise ValueError(f"{len(files)} images have {len(labels)} labels")
        self.class_names = class_names
        self.split = split
        self.transform = transform
        self.unreadable = UnreadableImages(len(files), max_unreadable, files.name)
        self._files = files
        self._labels = np.asarray(labels, dtype=np.int64)
        self.indices: Sequence[int] = range(len(files))
        self.kept = OnDevices()
        """All images by device, where they are kept there; shared by all views of these files."""

    @property
    def num_classes(self) -> int:
        """Return the number of classes, including those without images."""
        return len(self.class_names)

    @property
    def labels(self) -> np.ndarray:
        """Return every image's label, without reading the images."""
        return self._labels[np.asarray(self.indices)]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        start = range(len(self))[index]
        image, file = next_readable(self._files, self.unreadable, self.indices, start)
        return image if self.transform is None else self.transform(image), int(self._labels[file])

    def name(self, index: int) -> str:
        """Return an image's path."""
        return self._files.name(self.indices[index])

    def with_transform(self, transform: Transform | None) -> "ImageDataset":
        """Return the same images under another transform."""
        changed = copy(self)
        changed.transform = transform
        return changed

    def whole(self) -> "ImageDataset":
        """Return all images of the files."""
        changed = copy(self)
        changed.indices = range(len(self._files))
        return changed

    def take(self, num_images: int) -> "ImageDataset":
        """Return `num_images` images spread evenly over all (all of them if there are fewer)."""
        if num_images < 1:
            raise ValueError(f"num_images is {num_images}, but must be at least 1")
        count = min(num_images, len(self))
        taken = copy(self)
        taken.indices = [self.indices[place * len(self) // count] for place in range(count)]
        return taken


LabelledImages = ImageDataset | ShapesClassification | TarShards


class Splits(NamedTuple):
    """What a training run reads."""

    train: LabelledImages
    val: LabelledImages


def open_dataset(
    source: str | Path = "shapes",
    *,
    split: str = "val",
    transform: Transform | None = None,
    max_unreadable: int = 10,
    holdout_ratio: float = 0.0,
) -> LabelledImages:
    """Open labelled images.

    Args:
        source: A folder of class folders (or of `train` and `val` folders with class folders), a
            .zip archive of the same layout, tar shards (`name-{000..123}.tar`, `*.tar`, a folder
            of them), `hf:NAME` or `hf:NAME:CONFIG` of Hugging Face, or `shapes`, generated, with
            options such as `shapes:classes=10,size=64,images=4000,val_images=1000,seed=0`.
        split: `train`, `val` or `test`; without meaning where the data are not split.
        transform: Applied to each PIL image; None leaves PIL images.
        max_unreadable: How many unreadable images are skipped, with a warning, before an error.
        holdout_ratio: For class folders that are not split: the share of each class that is
            `val`, the rest being `train`. With 0 every split is the whole.
    """
    source = str(source)
    for recognises, open_source in _SOURCES:
        if recognises(source):
            return open_source(source, split, transform, max_unreadable, holdout_ratio)
    raise FileNotFoundError(
        f"no data at {source}; give a folder, a .zip archive, tar shards, hf:NAME or shapes"
    )


def open_splits(config: DataConfig) -> Splits:
    """Open what a training run needs; unsplit class folders are split by `holdout_ratio`."""
    train, val = (
        open_dataset(
            config.source,
            split=split,
            max_unreadable=config.max_unreadable,
            holdout_ratio=config.holdout_ratio,
        )
        for split in (config.train_split, config.val_split)
    )
    if isinstance(train, TarShards) and isinstance(val, TarShards):
        _refuse_shared(train, val, config)
    # Shards without names know their classes by the highest label only.
    if train.class_names[: val.num_classes] != val.class_names:
        raise ValueError(
            f"{config.source} has {train.num_classes} classes in {config.train_split} but "
            f"{val.num_classes} others in {config.val_split}; both need the same classes"
        )
    return Splits(train, val)


def _refuse_shared(train: TarShards, val: TarShards, config: DataConfig) -> None:
    shared = sorted(set(train.paths) & set(val.paths))
    if shared:
        raise ValueError(
            f"{shared[0]} is a shard of both {config.train_split} and {config.val_split}; nothing "
            "is held out of tar shards: write {split} where their names differ"
        )


def _open_files(
    source: str, split: str, transform: Transform | None, max_unreadable: int, holdout_ratio: float
) -> ImageDataset:
    store = open_store(source)
    assert store is not None, "recognised before"
    found = label_paths(list_images(store), split, holdout_ratio)
    return ImageDataset(
        StoredImages(store, found.paths),
        found.labels,
        found.class_names,
        split=found.split,
        transform=transform,
        max_unreadable=max_unreadable,
    )


def _open_shards(
    source: str, split: str, transform: Transform | None, max_unreadable: int, _: float
) -> TarShards:
    paths = expand_shards(source, split)
    return TarShards(paths, split=split, transform=transform, max_unreadable=max_unreadable)


def _open_shapes(
    source: str, split: str, transform: Transform | None, _: int, __: float
) -> ShapesClassification:
    defaults = {"classes": 10, "size": 64, "images": 4000, "val_images": 1000, "seed": 0}
    options = shapes_options(source, defaults)
    return ShapesClassification(
        split,
        options["images" if split == "train" else "val_images"],
        options["size"],
        options["classes"],
        options["seed"],
        transform=transform,
    )


_SPLIT_ALIASES = {"val": ("val", "validation", "valid")}


class _HuggingFaceImages:
    """Images of a Hugging Face data set, decoded by it."""

    def __init__(self, rows: Any, column: str, where: str) -> None:
        self._rows = rows
        self._column = column
        self._where = where

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, index: int) -> str:
        return f"{self._where}[{index}]"

    def read(self, index: int) -> Image.Image:
        return to_rgb(self._rows[index][self._column])


def _open_hugging_face(
    source: str, split: str, transform: Transform | None, max_unreadable: int, _: float
) -> ImageDataset:
    try:
        datasets = import_module("datasets")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{source} needs the package datasets; install it with: pip install datasets"
        ) from error
    name, _colon, config = source.removeprefix("hf:").partition(":")
    known = datasets.get_dataset_split_names(name, config or None)
    chosen = next((alias for alias in _SPLIT_ALIASES.get(split, (split,)) if alias in known), None)
    if chosen is None:
        raise ValueError(f"{source} has no split {split!r}; choose from {', '.join(known)}")
    rows = datasets.load_dataset(name, config or None, split=chosen)
    image = _column(rows.features, "Image", source)
    label = _column(rows.features, "ClassLabel", source)
    return ImageDataset(
        _HuggingFaceImages(rows, image, f"{source}/{split}"),
        np.asarray(rows[label]),
        tuple(rows.features[label].names),
        split=split,
        transform=transform,
        max_unreadable=max_unreadable,
    )


def _column(features: dict[str, Any], kind: str, source: str) -> str:
    """Find the one column of a kind; the first, where a data set has several labels."""
    for name, feature in features.items():
        if type(feature).__name__ == kind:
            return name
    raise ValueError(f"{source} has no {kind} column among {', '.join(features)}")


def _is_archive(source: str) -> bool:
    return source.lower().endswith(".zip") and Path(source).is_file()


def _is_folder_of_shards(source: str) -> bool:
    folder = Path(source)
    return (
        folder.is_dir()
        and not any(path.is_dir() for path in folder.iterdir())
        and any(folder.glob("*.tar"))
    )


_Open = Callable[[str, str, Transform | None, int, float], LabelledImages]

# The first that recognises a source opens it. A folder named "shapes" is written ./shapes.
_SOURCES: tuple[tuple[Callable[[str], bool], _Open], ...] = (
    (lambda source: source.partition(":")[0] == "shapes", _open_shapes),
    (lambda source: source.startswith("hf:"), _open_hugging_face),
    (lambda source: source.endswith(".tar") or _is_folder_of_shards(source), _open_shards),
    (lambda source: Path(source).is_dir() or _is_archive(source), _open_files),
)

"""Open labelled images: folders, .zip archives, tar shards, Hugging Face, generated shapes."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ltm.core.validation import first_line
from ltm.data.config import DataConfig, is_generated
from ltm.data.decoding import decode
from ltm.data.folders import label_images, open_files
from ltm.data.images import ImageDataset, LabelledFiles, NoLabelsError, Transform
from ltm.data.limits import Limits, read_file, split_limits
from ltm.data.shapes import ShapesClassification, shapes_arguments
from ltm.data.shards import ShardImages, expand_shards, open_shards
from ltm.extras import require


class Splits(NamedTuple):
    """What a training run reads."""

    train: ImageDataset
    val: ImageDataset


def open_dataset(
    source: str | Path = "shapes",
    *,
    split: str = "val",
    transform: Transform | None = None,
    max_unreadable: int = 10,
    holdout_ratio: float = 0.0,
    labelled: bool = True,
) -> ImageDataset:
    """Open labelled images.

    Args:
        source: A folder of class folders (or of `train` and `val` folders with class folders), a
            .zip archive of the same layout, tar shards (`name-{000..123}.tar`, `*.tar`, a folder
            of them), `hf:NAME` or `hf:NAME:CONFIG` of Hugging Face, or `shapes`, generated, with
            options such as `shapes:classes=10,size=64,images=4000,val_images=1000,seed=0`. Limits
            may be written behind a source: `slides?most_pixels=500000000` (`data.limits`).
        split: `train`, `val` or `test`; ignored if the data are not split.
        transform: Applied to each PIL image; None leaves PIL images.
        max_unreadable: How many unreadable images are skipped, with a warning, before an error.
        holdout_ratio: For class folders that are not split: the share of each class that is
            `val`, the rest being `train`. With 0 every split is the whole.
        labelled: Whether every image needs a class; images without classes are then a
            `NoLabelsError`. If not, a folder or .zip may also hold images without class folders,
            tar shards may lack .cls files, and data of Hugging Face a column of classes. The data
            set then has no class names.
    """
    source = str(source)
    if is_generated(source):
        counts = {"images": 4000, "val_images": 1000}
        arguments = shapes_arguments(source, split, classes=10, size=64, small=0, **counts)
        return ShapesClassification(**arguments, transform=transform)
    found = _find_images(source, split, holdout_ratio, labelled=labelled)
    return ImageDataset(
        found.files,
        found.labels,
        found.class_names,
        split=found.split,
        transform=transform,
        max_unreadable=max_unreadable,
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
    refuse_shared(train, val, config.train_split, config.val_split)
    # Shards without names know their classes by the highest label only.
    if train.class_names[: val.num_classes] != val.class_names:
        raise ValueError(
            f"{config.source} has {train.num_classes} classes in {config.train_split} but "
            f"{val.num_classes} others in {config.val_split}; both need the same classes"
        )
    return Splits(train, val)


def refuse_shared(one: ImageDataset, other: ImageDataset, *splits: str) -> None:
    """Refuse two splits that have a tar shard in common."""
    if isinstance(one.files, ShardImages) and isinstance(other.files, ShardImages):
        shared = sorted(set(one.files.paths) & set(other.files.paths))
        if shared:
            raise ValueError(
                f"{shared[0]} is a shard of both {' and '.join(splits)}; nothing is held out of "
                "tar shards: write {split} where their names differ"
            )


def _find_images(source: str, split: str, holdout_ratio: float, *, labelled: bool) -> LabelledFiles:
    """Open a source by the form of its name."""
    source, limits, _ = split_limits(source)
    if source.startswith("hf:"):
        return _find_on_hugging_face(source, split, limits, labelled=labelled)
    if source.endswith(".tar") or is_folder_of(".tar", Path(source)):
        paths = expand_shards(source, split)
        is_split = any(expand_shards(source, other) != paths for other in ("train", "val"))
        found = open_shards(paths, limits, labelled=labelled)
        return found._replace(split=split if is_split else "all")
    files = open_files(source, limits)
    if files is None:
        raise FileNotFoundError(
            f"no data at {source}; give a folder, a .zip archive, tar shards, hf:NAME or shapes"
        )
    return label_images(files, split, holdout_ratio, labelled=labelled)


def is_folder_of(suffix: str, folder: Path) -> bool:
    """Say whether a folder holds shards (files with this suffix) and no folders."""
    return (
        folder.is_dir()
        and not any(path.is_dir() for path in folder.iterdir())
        and any(folder.glob(f"*{suffix}"))
    )


_SPLIT_ALIASES = {"val": ("val", "validation", "valid")}


class _HuggingFaceImages:
    """Images of a Hugging Face data set, which gives bytes or the path of a file."""

    def __init__(self, rows: Any, column: str, where: str, limits: Limits) -> None:
        self._rows = rows
        self._column = column
        self._where = where
        self._limits = limits

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, index: int) -> str:
        return f"{self._where}[{index}]"

    def read(self, index: int) -> Image.Image:
        stored = self._rows[index][self._column]
        content = stored["bytes"] or read_file(Path(stored["path"]), self._limits)
        return decode(content, self.name(index), self._limits)


class _HuggingFace(NamedTuple):
    """A split of a Hugging Face data set, its images undecoded."""

    files: _HuggingFaceImages
    rows: Any


def open_hugging_face(source: str, split: str, limits: Limits) -> _HuggingFace:
    """Open a split of `hf:NAME` or `hf:NAME:CONFIG`; its images need no labels."""
    datasets = require("datasets")
    name, _, config = source.removeprefix("hf:").partition(":")
    try:
        known = datasets.get_dataset_split_names(name, config or None)
    except Exception as error:  # hubs and networks fail in ways of their own
        raise ValueError(
            f"{source} cannot be opened ({first_line(error)}): check its name and the network"
        ) from error
    chosen = next((alias for alias in _SPLIT_ALIASES.get(split, (split,)) if alias in known), None)
    if chosen is None:
        raise ValueError(f"{source} has no split {split!r}; choose from {', '.join(known)}")
    rows = datasets.load_dataset(name, config or None, split=chosen)
    image = _column(rows.features, "Image")
    if image is None:
        raise ValueError(f"{source} has no Image column among {', '.join(rows.features)}")
    undecoded = rows.cast_column(image, datasets.Image(decode=False))
    return _HuggingFace(_HuggingFaceImages(undecoded, image, f"{source}/{split}", limits), rows)


def _find_on_hugging_face(
    source: str, split: str, limits: Limits, *, labelled: bool
) -> LabelledFiles:
    files, rows = open_hugging_face(source, split, limits)
    label = _column(rows.features, "ClassLabel")
    if label is None and labelled:
        raise NoLabelsError(f"{source} has no ClassLabel column among {', '.join(rows.features)}")
    if label is None:
        return LabelledFiles(files, np.zeros(len(files), dtype=np.int64), (), split)
    return LabelledFiles(files, np.asarray(rows[label]), tuple(rows.features[label].names), split)


def _column(features: dict[str, Any], kind: str) -> str | None:
    """Find the column of a kind; the first, if there are several."""
    return next((name for name, found in features.items() if type(found).__name__ == kind), None)

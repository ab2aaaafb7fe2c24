"""The three scales by name, on the data that the user gives."""

import dataclasses
import json
from pathlib import Path, PurePath

from ltm.files import write_text
from reproduction.rows import Store
from reproduction.scales.base import Scale, ScaleName, Sources
from reproduction.scales.paper import paper_scale
from reproduction.scales.small import small_scale
from reproduction.scales.smoke import smoke_scale

_SCALES = {"paper": paper_scale, "small": small_scale, "smoke": smoke_scale}


def make_scale(name: ScaleName, sources: Sources) -> Scale:
    """A scale on the data given; a ValueError says what is missing."""
    return _SCALES[name](sources)


def remembered(store: Store, scale: ScaleName, given: Sources, *, runs: bool) -> Sources:
    """What the user gives; where nothing runs, what the rows were made with, by name.

    A call that runs leaves the names, never the folders, of its data beside the rows.
    """
    path = store.output / "sources.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if runs:
        names = {k: v and _name(v) for k, v in dataclasses.asdict(given).items()}
        if known.get(scale) != names:
            write_text(path, json.dumps({**known, scale: names}, indent=1) + "\n")
        return given
    return given if any(dataclasses.astuple(given)) else Sources(**known.get(scale, {}))


def check(scale: ScaleName, given: Sources) -> None:
    """Refuse data that cannot be opened, before anything is run."""
    if scale == "smoke":
        return
    from ltm.data.datasets import open_dataset  # noqa: PLC0415 - imports torch
    from ltm.detection.coco import open_detection  # noqa: PLC0415

    for source in (given.data, given.imagenet, given.transfer):
        if source is not None:
            open_dataset(source, split="val", holdout_ratio=0.1)
    if given.coco is not None:
        open_detection(given.coco, split="val", masks=False)
    if given.weights is not None and not Path(given.weights).is_file():
        raise FileNotFoundError(f"weights is {given.weights}: there is no such file")


def _name(source: str) -> str:
    return source if source.startswith(("hf:", "shapes")) else PurePath(source).name

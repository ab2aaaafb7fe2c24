"""The three scales by name, on the data that the user gives."""

import dataclasses
import json
from pathlib import PurePath

from ltm.experiments.scales.base import Scale, ScaleName, Sources
from ltm.experiments.scales.paper import paper_scale
from ltm.experiments.scales.small import small_scale
from ltm.experiments.scales.smoke import smoke_scale
from ltm.experiments.store import Store, read_json, write_text

SCALES = {"paper": paper_scale, "small": small_scale, "smoke": smoke_scale}


def make_scale(name: ScaleName, sources: Sources) -> Scale:
    """A scale on the data given; a ValueError says what is missing."""
    return SCALES[name](sources)


def remembered(store: Store, scale: ScaleName, given: Sources, *, runs: bool) -> Sources:
    """What the user gives; where nothing runs, what the rows were made with, by name.

    A call that runs leaves the names, never the folders, of its data beside the rows.
    """
    path = store.output / "sources.json"
    known = read_json(path) or {}
    if runs:
        names = {k: v and _name(v) for k, v in dataclasses.asdict(given).items()}
        if known.get(scale) != names:
            write_text(path, json.dumps({**known, scale: names}, indent=1) + "\n")
        return given
    return given if any(dataclasses.astuple(given)) else Sources(**known.get(scale, {}))


def _name(source: str) -> str:
    return source if source.startswith(("hf:", "shapes")) else PurePath(source).name

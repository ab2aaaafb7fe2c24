"""`ltm.visualize`: what is merged with what, and with which weights, over images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL.Image import Image
from torch import nn

from ltm.api import (
    conversion_of,
    image_size_of,
    is_merging,
    merge_tokens_,
    merging_copy,
    report,
)
from ltm.core.schedule import Grid
from ltm.data.config import DataConfig
from ltm.evaluation.images import expected_images
from ltm.files import results_in, write_bytes, write_metrics
from ltm.models import Network, Say, changed, method_config, name_of, open_model, silent
from ltm.processes import local_device
from ltm.report.curves import display_name
from ltm.report.pictures import (
    figure_bytes,
    film_bytes,
    generated_pictures,
    groups_figure,
    layer_frames,
    merging_blocks,
    prepare,
    read_pictures,
    target_tokens,
    weights_figure,
)
from ltm.report.settings import VisualizeSettings
from ltm.report.tracing import Traces, last_attended_block, trace_models

_PER_SHEET = 6
_FILES = ("weights-block-*.png", "groups-block-*.png", "film-*.gif")


@dataclass(frozen=True, kw_only=True, repr=False)
class VisualizeResult:
    """Pictures by file name, and the numbers in them."""

    model: str
    methods: tuple[str, ...]
    pictures: dict[str, bytes]
    tokens: tuple[dict[str, Any], ...]
    """Tokens left, and the weights of the target's token: for each image, block and method."""

    def save(self, folder: Path | str) -> list[Path]:
        """Write the pictures and metrics.json into a folder; returns the pictures' paths."""
        folder = Path(folder)
        found = {"model": self.model, "methods": list(self.methods), "tokens": list(self.tokens)}
        with results_in(folder, replaced=_FILES) as aside:
            for name, content in self.pictures.items():
                write_bytes(aside / name, content)
            write_metrics(aside, found)
        return [folder / name for name in self.pictures]

    def __repr__(self) -> str:
        return f"{self.model}, {' and '.join(self.methods)}: {', '.join(self.pictures)}"

    def _repr_png_(self) -> bytes:
        """What a notebook shows: the first sheet."""
        return next(iter(self.pictures.values()))


def visualize(
    model: Network,
    images: Sequence[str | Path | Image] = (),
    settings: VisualizeSettings = VisualizeSettings(),
    *,
    say: Say = silent,
    **changes: Any,
) -> VisualizeResult:
    """Draw which patches merge into which token, and with which weights.

    Args:
        model: a network, a saved folder, a timm name, or a `ModelSource`. If it merges already, it
            is drawn with its own method and schedule.
        images: images, image files and folders; generated pictures if there are none.
        settings: what to draw.
        say: called with each line of progress.
        changes: fields of the settings to change, such as `sites="all"`.
    """
    settings = changed(settings, changes)
    device = local_device(settings.device)
    named = read_pictures(images, settings.limit) if images else generated_pictures(_PER_SHEET)
    models = _converted(open_model(model, device, merges=True, say=say), settings)
    last = list(models.values())[-1]
    spec = expected_images(last, DataConfig())
    targets = _targets(settings.targets, len(named))
    pictures: dict[str, bytes] = {}
    tokens: list[dict[str, Any]] = []
    for first in range(0, len(named), _PER_SHEET):
        sheet = named[first : first + _PER_SHEET]
        names, drawn = zip(*sheet, strict=True)
        scenes = prepare(drawn, names, spec)
        traces = trace_models(models, scenes.inputs)
        marks = targets[first : first + len(sheet)]
        ending = f"-{first // _PER_SHEET + 1}" if len(named) > _PER_SHEET else ""
        for block in _blocks(settings.sites, traces, last_attended_block(last)):
            figures = {
                "weights": weights_figure(scenes, traces, block, marks),
                "groups": groups_figure(scenes, traces, block),
            }
            for kind, figure in figures.items():
                name = f"{kind}-block-{block:02d}{ending}.png"
                pictures[name] = figure_bytes(figure, dpi=140)
            tokens += target_tokens(scenes, traces, block, marks)
        for index in range(len(scenes) if settings.gif else 0):
            film = film_bytes(layer_frames(scenes, traces, index))
            pictures[f"film-{first + index + 1:02d}.gif"] = film
    return VisualizeResult(
        model=name_of(model),
        methods=tuple(models),
        pictures=pictures,
        tokens=tuple(tokens),
    )


def _converted(model: nn.Module, settings: VisualizeSettings) -> dict[str, nn.Module]:
    """The networks to draw, by title; the method to compare with first, as in the paper."""
    method, ratio = settings.method, settings.ratio
    if is_merging(model):
        if method is not None:
            raise ValueError("method: a saved run merges already; leave --method out")
        method = conversion_of(model).config.name
        ratio = conversion_of(model).config.ratio or min(1.0, report(model).share)
    else:
        method = method or "ltm"
        merge_tokens_(model, method_config(method, ratio))
    found: dict[str, nn.Module] = {}
    if settings.against not in ("none", method):
        against = method_config(settings.against, ratio)
        found[display_name(settings.against)] = merging_copy(model, against, image_size_of(model))
    return {**found, display_name(method): model}


def _targets(texts: Sequence[str], num_images: int) -> list[Grid]:
    """A patch for each image; none if they are to be chosen."""
    chosen = [_target(text) for text in texts]
    if len(chosen) > 1 and len(chosen) != num_images:
        raise ValueError(
            f"targets: got {len(chosen)} for {num_images} images; give one, or one for each"
        )
    return chosen if len(chosen) > 1 else chosen * num_images


def _target(text: str) -> Grid:
    row, comma, column = text.partition(",")
    if not (comma and row.isdigit() and column.isdigit()):
        raise ValueError(f"targets: {text!r} is not a patch; write row,column, such as 7,7")
    return int(row), int(column)


def _blocks(sites: str, traces: Traces, attended: int | None) -> list[int]:
    """The blocks to draw."""
    own = merging_blocks(dict([list(traces.items())[-1]]))
    if not own:
        raise ValueError("nothing merges at this ratio: give a smaller one")
    if sites == "last":
        return [attended] if attended in own else own[-1:]
    if sites == "all":
        return own
    asked = sites.split(",")
    known = merging_blocks(traces)
    if not all(text.isdigit() and int(text) in known for text in asked):
        listed = ", ".join(map(str, known))
        raise ValueError(f"sites is {sites}: give last, all, or blocks that merge: {listed}")
    return [int(text) for text in asked]

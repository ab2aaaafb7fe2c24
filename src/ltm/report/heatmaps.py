"""Merge weights over images, in the layout of the paper's figure.

One column per image: the target patch marked, then one row per method with the weights of the
token that the target went into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from ltm.core.schedule import Grid
from ltm.report.pictures import (
    TARGET_COLOUR,
    Pixels,
    Scenes,
    enlarge,
    paint_groups,
    paint_weights,
    spread_cells,
    weight_colours,
)
from ltm.report.tracing import DROPPED, SiteMap, at_block

_CELL = 1.75
"""Inches per picture."""
_RED = tuple(value / 255 for value in TARGET_COLOUR)

Traces = Mapping[str, Sequence[SiteMap]]
"""The maps of each method by the name to show."""


def choose_target(pixels: Pixels, groups: NDArray[np.int64]) -> Grid:
    """A telling patch: of the group that stands out from the image, the most typical one.

    Without any group it is the patch in the middle.
    """
    values, counts = np.unique(groups[groups != DROPPED], return_counts=True)
    merged = values[counts > 1]
    if len(merged) == 0:
        return groups.shape[0] // 2, groups.shape[1] // 2
    cells = spread_cells(np.arange(groups.size).reshape(groups.shape), pixels.shape[:2])
    sums = np.zeros((groups.size, 3))
    np.add.at(sums, cells.ravel(), pixels.reshape(-1, 3))
    colours = sums / np.bincount(cells.ravel(), minlength=groups.size)[:, None]
    typical = np.median(colours, axis=0)

    def salience(group: int) -> float:
        members = colours[groups.ravel() == group]
        return float(np.linalg.norm(members.mean(0) - typical) * min(len(members), 8) ** 0.5)

    group = max(merged.tolist(), key=salience)
    members = np.flatnonzero(groups.ravel() == group)
    distance = np.linalg.norm(colours[members] - colours[members].mean(0), axis=1)
    row, column = divmod(int(members[distance.argmin()]), groups.shape[1])
    return row, column


def weights_figure(
    scenes: Scenes, traces: Traces, block: int, targets: Sequence[Grid] | None = None
) -> Figure:
    """The paper's figure for one block.

    Targets are patches (row, column) on the last method's grid; by default telling ones of its
    groups.
    """
    maps = maps_at(traces, block, len(scenes))
    reference = list(maps.values())[-1]
    chosen = targets or default_targets(scenes, reference)
    figure, axes = _sheet(len(scenes), 1 + len(maps))
    for column, (pixels, target) in enumerate(zip(scenes.pixels, chosen, strict=True)):
        _show(axes[0][column], enlarge(pixels))
        _mark(axes[0][column], target, reference.grid, enlarge(pixels).shape)
        for row, site in enumerate(maps.values(), 1):
            weights = site.of_target(column, rescale(target, reference.grid, site.grid))
            _show(axes[row][column], enlarge(paint_weights(pixels, weights)))
            axes[row][column].set_title(_weights_line(weights), fontsize=7)
        axes[-1][column].set_xlabel(scenes.names[column], fontsize=8)
    _label_rows(axes, ["target", *maps])
    bar = figure.colorbar(
        ScalarMappable(Normalize(0, 1), weight_colours()), ax=axes, fraction=0.02, pad=0.01
    )
    bar.set_label("weight / largest", fontsize=7)
    bar.ax.tick_params(labelsize=6)
    return figure


def groups_figure(scenes: Scenes, traces: Traces, block: int) -> Figure:
    """Which patches are one token after a block: images above, one row per method."""
    maps = maps_at(traces, block, len(scenes))
    figure, axes = _sheet(len(scenes), 1 + len(maps))
    for column, pixels in enumerate(scenes.pixels):
        _show(axes[0][column], enlarge(pixels))
        for row, site in enumerate(maps.values(), 1):
            _show(axes[row][column], paint_groups(enlarge(pixels), site.group_grid(column)))
            line = f"{site.num_tokens(column)} of {site.grid[0] * site.grid[1]} tokens"
            axes[row][column].set_title(line, fontsize=7)
        axes[-1][column].set_xlabel(scenes.names[column], fontsize=8)
    _label_rows(axes, ["image", *maps])
    return figure


def maps_at(traces: Traces, block: int, num_images: int) -> dict[str, SiteMap]:
    """Every method's tokens as they leave a block."""
    grids = [site.grid for maps in traces.values() for site in maps if site.block <= block]
    if not grids:
        raise ValueError(f"block {block}: no method has merged anything by then")
    return {name: at_block(maps, block, grids[0], num_images) for name, maps in traces.items()}


def default_targets(scenes: Scenes, site: SiteMap) -> list[Grid]:
    """A telling target for every image, among the groups of one method."""
    return [
        choose_target(pixels, site.group_grid(index)) for index, pixels in enumerate(scenes.pixels)
    ]


def rescale(target: Grid, before: Grid, after: Grid) -> Grid:
    """A patch of one grid on another: stages of grid networks shrink by different amounts."""
    return target[0] * after[0] // before[0], target[1] * after[1] // before[1]


def _weights_line(weights: NDArray[np.float32]) -> str:
    count = int((weights > 0).sum())
    if count == 0:
        return "dropped"
    return "alone" if count == 1 else f"{count} patches, up to {weights.max():.2f}"


def _sheet(columns: int, rows: int) -> tuple[Figure, NDArray]:
    size = (_CELL * columns + 0.35, (_CELL + 0.2) * rows + 0.25)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _show(axes: Axes, pixels: Pixels) -> None:
    axes.imshow(pixels, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def _mark(axes: Axes, target: Grid, grid: Grid, shape: tuple[int, ...]) -> None:
    height, width = shape[0] / grid[0], shape[1] / grid[1]
    corner = (target[1] * width - 0.5, target[0] * height - 0.5)
    axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=_RED, linewidth=2))


def _label_rows(axes: NDArray, labels: Sequence[str]) -> None:
    for row, label in zip(axes, labels, strict=True):
        row[0].set_ylabel(label, fontsize=9)

"""Plots of tables, from saved rows alone."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ltm.experiments.reading import Reader
from ltm.experiments.store import read_json
from ltm.experiments.table import Experiment, Picture, Row, Table
from ltm.visual.pictures import figure_bytes

_COLOURS = ("#222222", "#d55e00", "#0072b2", "#009e73", "#aa4499", "#e69f00", "#56b4e9", "#999933")


def draw(experiment: Experiment, table: Table, reader: Reader) -> dict[str, bytes]:
    """All plots of a table by file name; those without anything to show are left out."""
    drawn: dict[str, bytes] = {}
    for picture in table.pictures:
        content = _KINDS[picture.kind](experiment, table, picture, reader)
        if content is not None:
            drawn[f"{picture.name}.png"] = content
    return drawn


def _bars(experiment: Experiment, table: Table, picture: Picture, reader: Reader) -> bytes | None:
    """One bar per row; rows without the column show the first number of the same kind."""
    bars = []
    kind = picture.column.partition(" @")[0]
    for row in table.rows:
        names = [picture.column, *(c.name for c in table.columns if c.name.startswith(kind))]
        found = [reader.read(row.cells[name]).estimate for name in names if name in row.cells]
        value = next((estimate for estimate in found if estimate is not None), None)
        if value is not None:
            bars.append((row.label, value))
    if not bars:
        return None
    figure = Figure(figsize=(6.5, 0.9 + 0.32 * len(bars)), layout="constrained")
    axes = figure.subplots()
    means = [value.mean for _, value in bars]
    axes.barh(
        [name for name, _ in bars],
        means,
        xerr=[value.reach or 0.0 for _, value in bars],
        color=["#d55e00" if name.startswith("LTM-") else "#8a9aa8" for name, _ in bars],
        error_kw={"linewidth": 1.0, "capsize": 2.5},
    )
    axes.invert_yaxis()
    spread = max(means) - min(means)
    if min(means) > 0 and spread < 0.3 * max(means):
        axes.set_xlim(min(means) - max(spread, 0.5), max(means) + max(spread, 0.5) / 2)
    return _finished(figure, axes, experiment.title, picture.column)


def _lines(experiment: Experiment, table: Table, picture: Picture, reader: Reader) -> bytes | None:
    """A line per row over columns of one kind, or one line over the rows of one column."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    if any(column.name == picture.column for column in table.columns):
        _over_rows(axes, table, picture.column, reader)
    else:
        for place, row in enumerate(table.rows):
            _over_columns(axes, table, row, picture.column, reader=reader, colour=_colour(place))
    if not axes.lines:
        return None
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
    return _finished(figure, axes, "", experiment.title)


def _over_rows(axes: Axes, table: Table, column: str, reader: Reader) -> None:
    points = []
    for row in table.rows:
        cell, cost = row.cells.get(column), row.cells.get("GMACs")
        if cell is None or cost is None:
            continue
        value, macs = reader.read(cell).estimate, reader.read(cost).estimate
        if value is not None and macs is not None:
            points.append((macs.mean, value.mean, value.reach or 0.0))
    if points:
        x, y, reach = zip(*sorted(points), strict=True)
        axes.errorbar(x, y, yerr=reach, marker="o", capsize=2.5, color="#d55e00")
    axes.set(xlabel="GMACs", ylabel=f"top-1, {column}")


def _over_columns(
    axes: Axes, table: Table, row: Row, kind: str, *, reader: Reader, colour: str
) -> None:
    points = []
    for column in table.columns:
        cell = row.cells.get(column.name)
        value = None if cell is None else reader.read(cell).estimate
        if column.name.startswith(f"{kind} ") and value is not None:
            points.append((float(column.name.rpartition(" ")[2]), value.mean))
    if points:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker="o", markersize=4, label=row.label, color=colour)
    axes.set(xlabel="batch" if kind == "batch" else "layer", ylabel=kind)
    if kind == "batch":
        axes.set(xscale="log", yscale="log", ylabel="images per second")


def _history(
    _experiment: Experiment, table: Table, picture: Picture, reader: Reader
) -> bytes | None:
    """A loss by epoch, the mean over the seeds, for every row."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(table.rows):
        jobs = next(iter(row.cells.values())).jobs
        histories = [v["history"] for job in jobs if (v := reader.values(job)) is not None]
        epochs = list(zip(*histories, strict=False))
        if epochs:
            x = [epoch[0]["epoch"] for epoch in epochs]
            y = [fmean(seed[picture.column] for seed in epoch) for epoch in epochs]
            axes.plot(x, y, marker=".", label=row.label, color=_colour(place))
    if not axes.lines:
        return None
    axes.legend(frameon=False, fontsize=8)
    axes.set(ylabel=picture.name.replace("-", " "))
    return _finished(figure, axes, "", "epoch")


def _copy(_experiment: Experiment, table: Table, _picture: Picture, reader: Reader) -> bytes | None:
    """A picture that a job left beside its row."""
    for job in table.jobs():
        folder = reader.store.row_folder(job)
        row = read_json(folder / "row.json")
        if row is not None and "picture" in row["values"]:
            file = folder / row["values"]["picture"]
            return file.read_bytes() if file.is_file() else None
    return None


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def _finished(figure: Figure, axes: Axes, title: str, xlabel: str) -> bytes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10)
    if not axes.get_xlabel():
        axes.set_xlabel(xlabel)
    axes.tick_params(labelsize=8)
    return figure_bytes(figure, dpi=110)


_KINDS: dict[str, Callable[[Experiment, Table, Picture, Reader], bytes | None]] = {
    "bars": _bars,
    "lines": _lines,
    "history": _history,
    "copy": _copy,
}

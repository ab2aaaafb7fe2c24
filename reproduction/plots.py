"""Plots of tables, from saved rows alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ltm.report.pictures import figure_bytes
from reproduction.estimates import Estimate, Reader
from reproduction.tables.base import Cell, Experiment, Picture, Row, Table

_COLOURS = ("#222222", "#d55e00", "#0072b2", "#009e73", "#aa4499", "#e69f00", "#56b4e9", "#999933")


def draw(experiment: Experiment, table: Table, reader: Reader) -> dict[str, bytes]:
    """All plots of a table by file name; those without anything to show are left out."""
    drawn: dict[str, bytes] = {}
    for picture in table.pictures:
        content = _KINDS[picture.kind](experiment, table, picture, reader)
        if content is not None:
            drawn[f"{picture.name}.png"] = content
    return drawn


def _points(experiment: Experiment, table: Table, picture: Picture, reader: Reader) -> bytes | None:
    """One point per row."""
    points = points_of(table, picture.column, reader)
    if not points:
        return None
    figure = Figure(figsize=(6.5, 0.9 + 0.3 * len(points)), layout="constrained")
    axes = figure.subplots()
    for place, (name, value) in enumerate(points):
        axes.errorbar(
            value.mean,
            place,
            xerr=value.reach,
            fmt="o",
            capsize=2.5,
            color="#d55e00" if name.startswith("LTM (") else "#44545f",
        )
    axes.set_yticks(range(len(points)), [name for name, _ in points])
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    figure.suptitle(experiment.title, fontsize=10, wrap=True)
    return _finished(figure, [axes], picture.column)


def points_of(table: Table, column: str, reader: Reader) -> list[tuple[str, Estimate]]:
    """Rows and their numbers; those without the column have the first of the same kind, and say so.

    A row that nobody trains is labelled `ToMe-ViT-Ti @0` where the column is that of ten epochs.
    """
    points: list[tuple[str, Estimate]] = []
    kind = column.partition(" @")[0]
    for row in table.rows:
        names = [column, *(c.name for c in table.columns if c.name.startswith(kind))]
        found = {n: reader.read(row.cells[n]).estimate for n in names if n in row.cells}
        for name, value in found.items():
            if value is not None:
                other = "" if name == column else name.removeprefix(kind)
                points.append((f"{row.label}{other}", value))
                break
    return points


def _cost(_experiment: Experiment, table: Table, picture: Picture, reader: Reader) -> bytes | None:
    """A column of the rows against their GMACs."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    groups = [group for group in dict.fromkeys(row.group for row in table.rows) if group]
    for place, group in enumerate(groups or [""]):
        # A row without a group, the untouched network, belongs to every line.
        rows = [row for row in table.rows if row.group in ("", group)]
        series = [(_cost_of(row, reader), row.cells.get(picture.column)) for row in rows]
        known = sorted(((x, cell) for x, cell in series if x is not None), key=lambda pair: pair[0])
        _series(axes, group, known, reader=reader, colour=_colour(place + 1))
    axes.set_ylabel(f"top-1, {picture.column}")
    return _legended(figure, [axes], "GMACs")


def _cost_of(row: Row, reader: Reader) -> float | None:
    cost = row.cells.get("GMACs")
    found = None if cost is None else reader.read(cost).estimate
    return None if found is None else found.mean


def _lines(_experiment: Experiment, table: Table, picture: Picture, reader: Reader) -> bytes | None:
    """A line per row over the columns of one kind; a panel per group of rows that were run."""
    columns = [c.name for c in table.columns if c.name.startswith(f"{picture.column} ")]
    groups = _groups(table, columns, reader)
    if not groups:
        return None
    figure = Figure(figsize=(1 + 4.2 * len(groups), 3.6), layout="constrained")
    panels = list(figure.subplots(1, len(groups), squeeze=False)[0])
    for axes, group in zip(panels, groups, strict=True):
        for place, row in enumerate(row for row in table.rows if row.group == group):
            series = [(float(n.rpartition(" ")[2]), row.cells.get(n)) for n in columns]
            _series(axes, row.label, series, reader=reader, colour=_colour(place))
        axes.set_title(group, fontsize=10)
    panels[0].set_ylabel(picture.column)
    if picture.column == "batch":
        panels[0].set_ylabel("images per second")
        batches = [int(name.rpartition(" ")[2]) for name in columns]
        for axes in panels:
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(batches, map(str, batches))
            axes.set_xticks([], minor=True)
    return _legended(figure, panels, "batch" if picture.column == "batch" else "layer")


def _groups(table: Table, columns: Sequence[str], reader: Reader) -> list[str]:
    """The groups of rows that have a number in one of the columns."""
    return list(
        dict.fromkeys(
            row.group
            for row in table.rows
            for name in columns
            if name in row.cells and reader.read(row.cells[name]).estimate is not None
        )
    )


def _rows(_experiment: Experiment, table: Table, picture: Picture, reader: Reader) -> bytes | None:
    """A line per column of one kind over the rows, which are numbered; a panel per group."""
    columns = [c.name for c in table.columns if c.name.startswith(f"{picture.column} ")]
    groups = _groups(table, columns, reader)
    if not groups:
        return None
    figure = Figure(figsize=(1 + 4.2 * len(groups), 3.6), layout="constrained")
    panels = list(figure.subplots(1, len(groups), squeeze=False)[0])
    for axes, group in zip(panels, groups, strict=True):
        rows = [row for row in table.rows if row.group == group]
        for place, name in enumerate(columns):
            series = [(float(row.label.rpartition(" ")[2]), row.cells.get(name)) for row in rows]
            _series(axes, name.rpartition(" ")[2], series, reader=reader, colour=_colour(place))
        axes.set_title(group, fontsize=10)
    panels[0].set_ylabel(picture.column)
    return _legended(figure, panels, "layer")


def _series(
    axes: Axes,
    name: str,
    series: Sequence[tuple[float, Cell | None]],
    *,
    reader: Reader,
    colour: str,
) -> None:
    """Draw the numbers that are there."""
    points = []
    for x, cell in series:
        value = None if cell is None else reader.read(cell).estimate
        if value is not None:
            points.append((x, value.mean, value.reach or 0.0))
    if points:
        x, y, reach = zip(*points, strict=True)
        axes.errorbar(
            x, y, yerr=reach, marker="o", markersize=4, capsize=2, label=name, color=colour
        )


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
    axes.set_ylabel(picture.name.replace("-", " "))
    return _legended(figure, [axes], "epoch")


def _copy(_experiment: Experiment, table: Table, _picture: Picture, reader: Reader) -> bytes | None:
    """A picture that a job drew; None where its work folder is gone."""
    for job in table.jobs():
        values = reader.values(job)
        if values is not None and "picture" in values:
            file = reader.store.work_folder(job) / values["picture"]
            return file.read_bytes() if file.is_file() else None
    return None


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def _legended(figure: Figure, panels: Sequence[Axes], xlabel: str) -> bytes | None:
    if not any(axes.lines for axes in panels):
        return None
    for axes in panels:
        if axes.lines:
            axes.legend(frameon=False, fontsize=7)
    return _finished(figure, panels, xlabel)


def _finished(figure: Figure, panels: Sequence[Axes], xlabel: str) -> bytes:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(xlabel)
        axes.tick_params(labelsize=8)
    return figure_bytes(figure, dpi=110)


_KINDS: dict[str, Callable[[Experiment, Table, Picture, Reader], bytes | None]] = {
    "points": _points,
    "cost": _cost,
    "lines": _lines,
    "rows": _rows,
    "history": _history,
    "copy": _copy,
}

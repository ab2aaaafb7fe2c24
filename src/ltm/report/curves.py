"""Curves: accuracy against cost, tokens and the information bottleneck by block."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from ltm.evaluation.bottleneck import SiteBottleneck
from ltm.evaluation.latency import BASE
from ltm.methods import methods

# Colours that colour-blind readers can tell apart (Okabe and Ito); markers say it again.
_ORIGINAL = ("#222222", "s")
_BESIDE = ((6, -12), (6, 6), (-6, 6), (-6, -12), (12, -3), (-12, -3), (6, 16), (6, -22))
"""Where the name of a point may stand, in typographic points; the first is the usual place."""
_OTHERS = (("#e69f00", "P"), ("#56b4e9", "X"), ("#999933", "*"))


@dataclass(frozen=True, kw_only=True)
class Point:
    """One network: what it costs and how right it is."""

    method: str
    cost: float
    accuracy: float
    interval: tuple[float, float] | None = None
    """95% interval of the accuracy."""
    cost_interval: tuple[float, float] | None = None


def display_name(method: str) -> str:
    """The name to print: that of the paper where there is one."""
    if method == BASE:
        return "original"
    known = methods().get(method)
    return method if known is None else known.title


def accuracy_figure(points: Iterable[Point], cost: str, measure: str = "top-1") -> Figure:
    """Accuracy against a cost; points of one method are joined, intervals are drawn as lines."""
    figure, (axes,) = _canvas()
    by_method: dict[str, list[Point]] = {}
    for point in points:
        by_method.setdefault(point.method, []).append(point)
    for method, (colour, marker) in _styles(by_method).items():
        members = sorted(by_method[method], key=lambda point: point.cost)
        costs = [point.cost for point in members]
        shares = [100 * point.accuracy for point in members]
        axes.errorbar(
            costs,
            shares,
            xerr=_reaches([(point.cost, point.cost_interval) for point in members]),
            yerr=_reaches([(point.accuracy, point.interval) for point in members], 100),
            color=colour,
            marker=marker,
            markersize=7,
            linewidth=1.4 if len(members) > 1 else 0,
            elinewidth=1.0,
            capsize=2.5,
            label=display_name(method),
        )
    axes.set_xlabel(cost)
    axes.set_ylabel(f"{measure}, per cent")
    axes.margins(x=0.12, y=0.12)
    _legend(axes)
    return figure


def ratios_figure(
    drawn: Sequence[tuple[float, float, float, bool]],
    allowed: float | None,
    where: str,
    measure: str = "top-1",
) -> Figure:
    """Change of accuracy against time over ratios: `(time, points, ratio, chosen)` of each."""
    figure, (axes,) = _canvas()
    colour, _ = _OTHERS[0]
    drawn = sorted(drawn)
    times, changes = [1.0, *(d[0] for d in drawn[::-1])], [0.0, *(d[1] for d in drawn[::-1])]
    (curve,) = axes.plot(times, changes, color=colour, marker="o", markersize=5, linewidth=1.4)
    axes.plot(1.0, 0.0, color=_ORIGINAL[0], marker=_ORIGINAL[1], markersize=7)
    for time, change, _, chosen in drawn:
        if chosen:
            axes.plot(time, change, "o", markersize=13, markerfacecolor="none", color="#222222")
    if allowed is not None:
        axes.axhline(-allowed, color="#666666", linestyle="--", linewidth=1.0)
    axes.set_xlabel(f"share of the original's time, {where}")
    axes.set_ylabel(f"change of {measure}, points")
    axes.margins(x=0.12, y=0.18)
    names = {(time, change): f"{ratio:g}" for time, change, ratio, _ in drawn}
    _name_points(figure, curve, {(1.0, 0.0): "original", **names})
    return figure


def _name_points(figure: Figure, curve: Line2D, names: Mapping[tuple[float, float], str]) -> None:
    """Write a name beside each point of a curve, so that it hides no point and no other name."""
    figure.draw_without_rendering()  # it settles where points are
    axes = figure.axes[0]
    centres = axes.transData.transform(list(names))
    taken = [Bbox.from_extents(*(centre - 8), *(centre + 8)) for centre in centres]
    line, inside = curve.get_path().transformed(axes.transData), axes.get_window_extent()

    def disturbs(box: Bbox) -> tuple[int, bool, bool]:
        outside = not (inside.containsx(box.x0) and inside.containsx(box.x1))
        return box.count_overlaps(taken), outside, bool(line.intersects_bbox(box, filled=False))

    for point, name in names.items():
        options = [
            axes.annotate(
                name,
                point,
                xytext=(right, up),
                textcoords="offset points",
                ha="left" if right > 0 else "right",
            )
            for right, up in _BESIDE
        ]
        best = min(options, key=lambda option: disturbs(Bbox(option.get_window_extent())))
        taken.append(best.get_window_extent())
        for option in options:
            if option is not best:
                option.remove()


def tokens_figure(tokens: Mapping[str, Mapping[int, float]]) -> Figure:
    """Tokens that leave each block, by method."""
    figure, (axes,) = _canvas()
    for method, style in _styles(tokens).items():
        _draw_by_block(axes, method, sorted(tokens[method].items()), style)
    axes.set_ylabel("tokens after the block")
    axes.set_ylim(bottom=0)
    _number_blocks(axes)
    _legend(axes)
    return figure


def bottleneck_figure(rows: Sequence[SiteBottleneck]) -> Figure:
    """IB loss and its bound by block: lower keeps less of the input and more of the label."""
    figure, (upper, lower) = _canvas(rows=2)
    methods = list(dict.fromkeys(row.model for row in rows))
    for axes, label, field in (
        (upper, "IB loss, nats", "loss"),
        (lower, "IB bound, nats", "bound"),
    ):
        for method, style in _styles(methods).items():
            series = [(row.block, getattr(row, field)) for row in rows if row.model == method]
            _draw_by_block(axes, method, sorted(series), style)
        axes.set_ylabel(label)
        _number_blocks(axes)
    _legend(upper)
    upper.set_xlabel("")
    return figure


def _draw_by_block(
    axes: Axes, method: str, series: Sequence[tuple[int, float]], style: tuple[str, str]
) -> None:
    blocks, values = zip(*series, strict=True)
    axes.plot(
        blocks,
        values,
        color=style[0],
        marker=style[1],
        markersize=4.5,
        linewidth=1.6,
        linestyle="--" if method == BASE else "-",
        label=display_name(method),
    )


def _number_blocks(axes: Axes) -> None:
    axes.set_xlabel("block, counted from 0")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _legend(axes: Axes) -> None:
    """Above the data, where nothing can hide behind it; markers without their intervals."""
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        [h.lines[0] if isinstance(h, ErrorbarContainer) else h for h in handles],
        labels,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=min(5, len(labels)),
        frameon=False,
        fontsize=9,
        handletextpad=0.4,
        columnspacing=1.0,
    )


def _styles(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for every method; variants get some of their own."""
    others, known = itertools.cycle(_OTHERS), methods()
    own = {n: (c.colour, c.marker or "o") for n, c in known.items() if c.colour is not None}
    own[BASE] = _ORIGINAL
    return {name: own.get(name) or next(others) for name in names}


def _reaches(
    values: Sequence[tuple[float, tuple[float, float] | None]], scale: float = 1.0
) -> list[list[float]]:
    """How far intervals reach below and above their values."""
    ends = [(value, *(interval or (value, value))) for value, interval in values]
    return [
        [max(0.0, scale * (value - low)) for value, low, _ in ends],
        [max(0.0, scale * (high - value)) for value, _, high in ends],
    ]


def _canvas(rows: int = 1) -> tuple[Figure, list[Axes]]:
    height = 3.4 if rows == 1 else 1.7 * 3.4
    figure = Figure(figsize=(5.0, height), layout="constrained", facecolor="white")
    found = list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
    return figure, found

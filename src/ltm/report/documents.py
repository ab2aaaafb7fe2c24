"""The documents of a comparison: `report.html`, and the model card `README.md`.

The report is one file without scripts; its styles and pictures are inside. The card has the layout
of the Hugging Face hub.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from matplotlib.figure import Figure

from ltm.evaluation.latency import BASE, Timing
from ltm.evaluation.measurement import Measurement
from ltm.evaluation.modes import TITLES
from ltm.evaluation.records import percent, points
from ltm.files import write_text
from ltm.report.comparison import Comparison, verdicts
from ltm.report.curves import (
    Point,
    accuracy_figure,
    bottleneck_figure,
    display_name,
    ratios_figure,
    tokens_figure,
)
from ltm.report.pictures import (
    Scenes,
    data_uri,
    figure_bytes,
    film_bytes,
    groups_figure,
    layer_frames,
    weights_figure,
)
from ltm.report.tracing import Traces


@dataclass(frozen=True, kw_only=True)
class Illustration:
    """A picture of the report: its address (a data URI), a text in its place, a caption."""

    address: str
    alt: str
    caption: str
    wide: bool = False
    """On a narrow screen it is scrolled, not shrunk."""


def write_report(
    comparison: Comparison, folder: Path, pictures: Sequence[Illustration] = ()
) -> Path:
    """Write the report of a comparison into a folder."""
    path = folder / "report.html"
    write_text(path, render_report(comparison, pictures))
    return path


def render_report(comparison: Comparison, pictures: Sequence[Illustration] = ()) -> str:
    """The report as HTML."""
    batches = _batch_sizes(comparison)
    return _templates().get_template("report.html").render(
        comparison=comparison,
        environment=comparison.environment,
        base=BASE,
        verdicts=verdicts(comparison),
        batches=batches,
        forms=forms_table(comparison),
        form=TITLES[comparison.form],
        points=_curve_rows(comparison),
        rows=[_row(network, comparison, batches) for network in comparison.networks],
        curves=curves(comparison),
        pictures=pictures,
        num_images=_num_images(comparison),
        method=display_name(comparison.method),
    )  # fmt: skip


def table_of(comparison: Comparison) -> list[list[str]]:
    """The main columns as short text, the header first; empty columns are left out."""
    batches = _batch_sizes(comparison)
    measured = [comparison.measure, "against original", "labels changed"]
    table = [["network", *measured, "GMACs", "share"]]
    table[0] += [f"batch {batch}" for batch in batches]
    for network in comparison.networks:
        row = _row(network, comparison, batches)
        cells = [row["name"], row["top1"].partition(" ")[0], row["difference"], row["changed"]]
        cells += [f"{network.gmacs:.3f}", f"{network.share:.2f}"]
        times = [network.timing(batch, comparison.form) for batch in batches]
        table.append(cells + [_factor(timing) for timing in times])
    filled = [index for index in range(len(table[0])) if any(row[index] for row in table[1:])]
    return [[row[index] for index in filled] for row in table]


def forms_table(comparison: Comparison) -> list[list[str]]:
    """The compressed network against the original in each form, as short text, header first."""
    name = display_name(comparison.method)
    table = [["form", "batch", "original ms", f"{name} ms", "original images/s", "images/s", ""]]
    deployed = comparison.deployment
    for form, batch in _forms_timed(comparison):
        base, own = (comparison.timing(m, batch, form) for m in (BASE, comparison.method))
        if base is None or own is None:
            continue
        advised = deployed is not None and (form, batch) == (deployed.form, deployed.batch_size)
        table.append(
            [
                f"{TITLES[form]}{' (recommended)' if advised else ''}",
                str(batch),
                *(_number(timing.milliseconds) for timing in (base, own)),
                *(_number(timing.images_per_second, 1) for timing in (base, own)),
                _factor(own) or f"did not run: {own.error or base.error}",
            ]
        )
    return table


def _forms_timed(comparison: Comparison) -> list[tuple[str, int]]:
    """Forms and batch sizes, in the order of measurement."""
    compressed = comparison.compressed
    timed = [] if compressed is None else compressed.timings
    forms = list(dict.fromkeys(timing.mode for timing in timed))
    return sorted({(t.mode, t.batch_size) for t in timed}, key=lambda p: (p[1], forms.index(p[0])))


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _factor(timing: Timing | None) -> str:
    if timing is None or not timing.speedup:
        return ""
    return "no gain" if timing.verdict == "no gain here" else f"{timing.speedup:.2f}x"


@cache
def _templates() -> Environment:
    """The templates of this package; everything put into HTML is escaped."""
    return Environment(
        loader=PackageLoader("ltm.report", "templates"),
        autoescape=select_autoescape(("html",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def curves(comparison: Comparison) -> list[Illustration]:
    """All curves that the measurements allow."""
    measured = [network for network in comparison.networks if network.accuracy is not None]
    found: list[Illustration] = []
    if measured:
        found.append(_against_macs(measured, comparison.measure))
    found += [_against_time(measured, batch, comparison) for batch in _batch_sizes(comparison)]
    if comparison.curve:
        found.insert(0, _over_ratios(comparison))
    tokens = {network.method: network.tokens for network in comparison.networks if network.tokens}
    if tokens:
        final = ", ".join(
            f"{display_name(method)} {counts[max(counts)]:.0f}" for method, counts in tokens.items()
        )
        found.append(
            Illustration(
                address=_vector(tokens_figure(tokens)),
                alt=f"Tokens by block; after the last block: {final}.",
                caption="Tokens that leave each block, class and other prefix tokens not counted.",
            )
        )
    sites = [site for network in comparison.networks for site in network.bottleneck]
    if sites:
        found.append(
            Illustration(
                address=_vector(bottleneck_figure(sites)),
                alt="Information-bottleneck loss and its upper bound by block, for each network.",
                caption=(
                    "Information bottleneck by block, on "
                    f"{sites[0].num_images:,} images: the loss, and the bound on it. Lower means "
                    f"less about the input and more about {_label(comparison)}."
                ),
            )
        )
    return found


def _label(comparison: Comparison) -> str:
    return "the label" if comparison.labelled else "the original's prediction"


def _against_macs(networks: Sequence[Measurement], measure: str) -> Illustration:
    drawn = [_point(network, network.gmacs) for network in networks]
    against = f"{measure.capitalize()} against multiply-adds"
    return Illustration(
        address=_vector(accuracy_figure(drawn, "GMACs per image", measure)),
        alt=f"{against}: {_spoken(drawn, 'GMACs')}.",
        caption=f"{against} (billions an image); lines are 95% intervals.",
    )


def _curve_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """The ratios that were tried, as text."""
    return [
        {
            "ratio": f"{point.ratio:g}",
            "share": f"{point.share:.3f}",
            "top1": percent(point.top1),
            "difference": points(point.loss.difference),
            "changed": _changed(point.num_changed, point.loss.num_images),
            "time": _speed(point.timing),
            "rate": _number(point.timing.images_per_second, 1),
            "chosen": point.chosen,
        }
        for point in comparison.curve
    ]


def _over_ratios(comparison: Comparison) -> Illustration:
    """The curve on which the ratio was chosen: change of accuracy against time."""
    first = comparison.curve[0]
    timing = first.timing
    drawn = [
        (1 / point.timing.speedup, 100 * point.loss.difference, point.ratio, point.chosen)
        for point in comparison.curve
        if point.timing.speedup
    ]
    where = f"{TITLES[timing.mode]}, batches of {timing.batch_size}"
    spoken = "; ".join(f"{ratio:g}: {y:.2f} points at {x:.2f}" for x, y, ratio, _ in drawn)
    return Illustration(
        address=_vector(ratios_figure(drawn, comparison.max_loss, where, comparison.measure)),
        alt=f"Accuracy against time over ratios ({where}): {spoken}.",
        caption=(
            f"Change of {comparison.measure} against measured time ({where}) over the ratios, on "
            f"the {first.loss.num_images:,} images to choose on. The ring marks the chosen ratio, "
            "the dashed line the allowed loss."
        ),
    )


def _against_time(
    networks: Sequence[Measurement], batch_size: int, comparison: Comparison
) -> Illustration:
    """Accuracy against time, as a share of the original's in the same rounds."""
    form, measure = comparison.form, comparison.measure.capitalize()
    drawn = [
        _point(network, 1 / timing.speedup, (1 / high, 1 / low))
        for network in networks
        if (timing := network.timing(batch_size, form)) and timing.speedup
        for low, high in [timing.speedup_interval or (timing.speedup, timing.speedup)]
    ]
    unit = "of the original's time"
    cost = f"share {unit}, batches of {batch_size}"
    figure = accuracy_figure(drawn, cost, comparison.measure)
    return Illustration(
        address=_vector(figure),
        alt=f"{measure} against time at batch {batch_size}: {_spoken(drawn, unit)}.",
        caption=(
            f"{measure} against measured time in {TITLES[form]}, as a share {unit}, in batches of "
            f"{batch_size}."
        ),
    )


def _point(
    network: Measurement, cost: float, cost_interval: tuple[float, float] | None = None
) -> Point:
    assert network.accuracy is not None
    return Point(
        method=network.method,
        cost=cost,
        accuracy=network.accuracy.top1,
        interval=network.accuracy.top1_interval,
        cost_interval=cost_interval,
    )


def _spoken(drawn: Sequence[Point], unit: str) -> str:
    return "; ".join(
        f"{display_name(point.method)} {percent(point.accuracy)} per cent at "
        f"{point.cost:.3g} {unit}"
        for point in drawn
    )


def _vector(figure: Figure) -> str:
    return data_uri(figure_bytes(figure, "svg"), "image/svg+xml")


def _row(network: Measurement, comparison: Comparison, batches: Sequence[int]) -> dict[str, Any]:
    """One network in the headline table, as text."""
    is_base, accuracy, against = network.method == BASE, network.accuracy, network.against_base
    top1 = difference = changed = ""
    if accuracy is not None and (comparison.labelled or not is_base):
        low, high = accuracy.top1_interval
        top1 = f"{percent(accuracy.top1)} ±{percent((high - low) / 2)}"
        if accuracy.agreement is not None and not is_base:
            number = accuracy.num_images
            changed = _changed(round((1 - accuracy.agreement) * number), number)
    if against is not None and not is_base and comparison.labelled:
        low, high = points(against.low), points(against.high)
        difference = f"{points(against.difference)} ({low} to {high})"
    return {
        "name": display_name(network.method),
        "top1": top1,
        "difference": difference,
        "changed": changed,
        "macs": f"{network.gmacs:.3f} G ({network.share:.2f})",
        "parameters": f"{network.parameters / 1e6:.2f} M",
        "speeds": [_speed(network.timing(batch, comparison.form)) for batch in batches],
        "note": network.note,
        "emphasis": network.method == comparison.method,
    }


def _changed(number: int, total: int) -> str:
    return f"{number:,} ({percent(number / total)}%)"


def _speed(timing: Timing | None) -> str:
    if timing is None:
        return ""
    if timing.milliseconds is None:
        return f"did not run: {timing.error}"
    said = "" if timing.method == BASE else f", {timing.verdict}"
    return f"{_number(timing.milliseconds)} ms{said}"


def _batch_sizes(comparison: Comparison) -> list[int]:
    return sorted({t.batch_size for network in comparison.networks for t in network.timings})


def _num_images(comparison: Comparison) -> int:
    return max((n.accuracy.num_images for n in comparison.networks if n.accuracy), default=0)


def illustrate(scenes: Scenes, traces: Traces, block: int) -> list[Illustration]:
    """The report's pictures: merge weights, groups, and a film through the blocks."""
    names = " and ".join(traces)
    shown = "; ".join(name.replace("\n", " ") for name in scenes.names)
    weights = figure_bytes(weights_figure(scenes, traces, block))
    groups = figure_bytes(groups_figure(scenes, traces, block))
    film = film_bytes(layer_frames(scenes, traces, 0))
    return [
        Illustration(
            address=data_uri(weights, "image/png"),
            alt=f"Merge weights of one target patch per picture ({shown}), by {names}.",
            caption=(
                f"Merge weights after block {block}: how much each patch weighs in the token that "
                "the patch in the red box went into."
            ),
            wide=True,
        ),
        Illustration(
            address=data_uri(groups, "image/png"),
            alt=f"Which patches are one token after block {block} ({shown}), by {names}.",
            caption=(
                f"Groups after block {block}: patches that became one token are painted in their "
                "mean colour; patches still alone keep their pixels; blank ones were dropped."
            ),
            wide=True,
        ),
        Illustration(
            address=data_uri(film, "image/gif"),
            alt=f"Film: the groups of the first picture, block after block, by {names}.",
            caption="The first picture through the blocks.",
        ),
    ]


def write_card(
    comparison: Comparison, folder: Path, *, origin: Mapping[str, str] | None = None
) -> Path:
    """Write the card of a compressed model; `origin` may name a `base_model` and a `license`.

    Of absolute paths only the last name is written, as the readers have other machines.
    """
    given: set[str] = set()

    def shorten(word: str) -> str:
        path = _path_in(word)
        given.update({path} if path else ())
        return _shortened(word, given)

    command = _rewritten(comparison.command, shorten)
    data = shorten(comparison.data).rstrip("/")
    comparison = dataclasses.replace(comparison, command=command, data=data)
    text = _templates().get_template("card.md").render(
        comparison=comparison,
        origin=origin or {},
        compressed=comparison.compressed,
        base=comparison.base,
        verdicts=verdicts(comparison),
        name=display_name,
        method=display_name(comparison.method),
    )  # fmt: skip
    path = folder / "README.md"
    write_text(path, _shortened(text.strip(), given) + "\n")
    return path


def _rewritten(command: str, change: Callable[[str], str]) -> str:
    """A shell command with its words changed, or a Python call with its strings changed."""
    try:
        call = ast.parse(command, mode="eval")
    except SyntaxError:
        return shlex.join(map(change, shlex.split(command)))
    for node in ast.walk(call):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = change(node.value)
    return ast.unparse(call)


def _path_in(word: str) -> str | None:
    """The absolute path in a word of a command, such as `/path`, `name=/path` or `kind:/path`."""
    for text in (word, re.sub(r"^[^/\\]*?[=:](?=/[^/])", "", word)):
        absolute = PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()
        if absolute or text.startswith("~/"):
            return text.rstrip("/\\") or None
    return None


def _shortened(text: str, paths: set[str]) -> str:
    """The text with each of the paths replaced by its last name."""
    for path in sorted(paths, key=len, reverse=True):
        name = re.split(r"[/\\]" if "\\" in path else "/", path)[-1]
        text = re.sub(rf"(?<![\w.~/]){re.escape(path)}(?!\w)", lambda _, name=name: name, text)
    return text

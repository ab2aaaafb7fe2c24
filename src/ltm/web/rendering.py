"""What the page shows of an inspection: pictures as pixels, numbers as small tables of HTML."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ltm.core.schedule import Grid
from ltm.report.pictures import (
    TARGET_COLOUR,
    Pixels,
    choose_target,
    enlarge,
    paint_groups,
    paint_weights,
)
from ltm.web.inspection import Inspection, Layer

LEAST_SIDE = 448
"""Pixels of a picture on the page, so that single patches can be clicked."""

CSS = """
.ltm-table { width: 100%; border: none !important; border-collapse: collapse; }
.ltm-table tr { border: none !important; }
.ltm-table th, .ltm-table td {
  padding: 2px 8px !important; text-align: right !important; border: none !important;
  white-space: nowrap; font-variant-numeric: tabular-nums;
}
.ltm-table th { font-weight: 600; opacity: 0.75; }
.ltm-table th:first-child, .ltm-table td:first-child { text-align: left !important; }
.ltm-table .ltm-bar { width: 55%; }
.ltm-bar div { height: 8px; border-radius: 2px; background: #9aa5b1; margin: 1px 0; }
.ltm-bar div.after { background: #d9480f; }
.ltm-figures { display: flex; flex-wrap: wrap; gap: 8px 28px; }
.ltm-figures b { display: block; font-size: 1.35em; font-variant-numeric: tabular-nums; }
.ltm-note { opacity: 0.75; }
#groups img { cursor: crosshair; image-rendering: pixelated; }
#heatmap img { image-rendering: pixelated; }
#examples .grid-wrap { overflow: hidden; height: auto; max-height: none; min-height: 0; }
#examples button { aspect-ratio: 1; height: auto; }
#examples .grid-container {
  grid-template: none / repeat(3, minmax(0, 1fr)); grid-auto-rows: auto; gap: 8px;
}
@media (max-width: 640px) {
  .ltm-table th, .ltm-table td { padding: 2px 4px !important; font-size: 0.9em; }
  .ltm-table .ltm-bar { width: 35%; }
}
#ratio input[type="number"], #block input[type="number"] { width: 60px; }
footer { display: none !important; }
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenView:
    """One token of one block: its patches and their weights, over the picture."""

    pixels: Pixels
    caption: str


def draw_groups(seen: Inspection, block: int) -> Pixels:
    """The picture with merged patches in one colour, a line around every token."""
    return paint_groups(enlarge(seen.pixels, LEAST_SIDE), seen.tokens[block].group_grid(0))


def share_of(seen: Inspection, x: int, y: int) -> tuple[float, float]:
    """A pixel of the drawn groups as shares of height and width."""
    height, width = enlarge(seen.pixels, LEAST_SIDE).shape[:2]
    return y / height, x / width


def draw_token(seen: Inspection, block: int, point: tuple[float, float] | None) -> TokenView:
    """The weights of the token under a point, given as shares of height and width.

    Without a point, a token is chosen that stands out from the picture.
    """
    site = seen.tokens[block]
    rows, columns = site.grid
    if point is None:
        patch = choose_target(seen.pixels, site.group_grid(0))
    else:
        patch = min(int(point[0] * rows), rows - 1), min(int(point[1] * columns), columns - 1)
    weights = site.of_target(0, patch)
    pixels = enlarge(paint_weights(seen.pixels, weights), LEAST_SIDE)
    _mark_(pixels, patch, site.grid)
    number = int((weights > 0).sum())
    where = f"After block {block}, the patch in row {patch[0] + 1}, column {patch[1] + 1}"
    if number == 0:
        return TokenView(pixels=pixels, caption=f"{where} was dropped.")
    if number == 1:
        return TokenView(pixels=pixels, caption=f"{where} is a token of its own.")
    shares = [float(w) for w in weights.ravel() if w > 0]
    ends = [f"{100 * share:.1f}%" for share in (min(shares), max(shares))]
    span = f"of {ends[0]} each" if ends[0] == ends[1] else f"from {ends[0]} to {ends[1]}"
    return TokenView(
        pixels=pixels, caption=f"{where} shares a token of {number} patches, weights {span}."
    )


def _mark_(pixels: Pixels, patch: Grid, grid: Grid) -> None:
    """A frame around a patch, in place."""
    top, bottom = (pixels.shape[0] * (patch[0] + end) // grid[0] for end in (0, 1))
    left, right = (pixels.shape[1] * (patch[1] + end) // grid[1] for end in (0, 1))
    width = 3
    pixels[top:bottom, left : left + width] = TARGET_COLOUR
    pixels[top:bottom, right - width : right] = TARGET_COLOUR
    pixels[top : top + width, left:right] = TARGET_COLOUR
    pixels[bottom - width : bottom, left:right] = TARGET_COLOUR


def summary(seen: Inspection) -> str:
    """The few numbers that matter."""
    last = seen.layers[-1]
    figures = {
        "tokens in the last block": f"{last.tokens_before} → {last.tokens_after}",
        "million multiply-adds": (
            f"{_short(seen.mmacs_before)} → {_short(seen.mmacs_after)} "
            f"({100 * seen.mmacs_after / seen.mmacs_before:.0f}%)"
        ),
    }
    if seen.timing is not None:
        figures["milliseconds on this machine"] = (
            f"{seen.timing.before:.1f} → {seen.timing.after:.1f} ({escape(seen.timing.verdict)})"
        )
    cells = "".join(f"<span><b>{value}</b>{name}</span>" for name, value in figures.items())
    return f'<div class="ltm-figures">{cells}</div>'


def layer_table(seen: Inspection) -> str:
    """Tokens and MACs of every block, with bars."""
    largest = max((layer.mmacs_before for layer in seen.layers), default=1) or 1
    rows = "".join(_row(layer, largest) for layer in seen.layers)
    return (
        '<table class="ltm-table"><thead><tr><th>block</th><th>tokens</th>'
        f'<th>MMACs</th><th class="ltm-bar"></th></tr></thead><tbody>{rows}</tbody></table>'
        '<p class="ltm-note">Bars: multiply-adds before (grey) and after merging.</p>'
    )


def _row(layer: Layer, largest: float) -> str:
    def change(before: str, after: str) -> str:
        return before if before == after else f"{before} → {after}"

    tokens = change(str(layer.tokens_before), str(layer.tokens_after))
    macs = change(_short(layer.mmacs_before), _short(layer.mmacs_after))
    bars = "".join(
        f'<div class="{kind}" style="width:{100 * value / largest:.1f}%"></div>'
        for kind, value in (("before", layer.mmacs_before), ("after", layer.mmacs_after))
    )
    return (
        f"<tr><td>{layer.block}</td><td>{tokens}</td><td>{macs}</td>"
        f'<td class="ltm-bar">{bars}</td></tr>'
    )


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"

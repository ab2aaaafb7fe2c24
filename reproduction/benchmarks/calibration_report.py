"""The table and the figure of `calibration_imagenet.py`, from its saved rows."""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLUMNS = (
    "| share of MACs | method | top-1 | against the original | against ToMe | agreement "
    "| divergence |"
)
STYLES = {"tome": "s--", "tofu": "^--", "ltmp": "v:", "ltm": "o-", "ltm calibrated": "D-"}


def write_report(path: Path) -> None:
    """Write the Markdown table and the curves beside the rows."""
    rows = json.loads(path.read_text())["rows"]
    titles = {"curves": "Every method at every budget", "ablation": "One thing changed at a time"}
    lines: list[str] = []
    for part, title in titles.items():
        chosen = [row for row in rows if row["part"] == part]
        if chosen:
            lines += [f"## {title}", "", COLUMNS, "|---" * COLUMNS.count(" | ") + "|---|"]
            chosen.sort(key=lambda row: -row["budget"])
            lines += [_line(row) for row in chosen] + [""]
    path.with_suffix(".md").write_text("\n".join(lines))
    _curves([row for row in rows if row["part"] == "curves"]).savefig(
        path.with_suffix(".png"), dpi=130
    )


def _line(row: dict[str, Any]) -> str:
    share = sum(row["shares"]) / len(row["shares"])
    cells = [
        f"{share:.3f}",
        row["method"],
        f"{100 * row['top1']:.2f}",
        _difference(row.get("against_base")),
        _difference(row.get("against_tome")),
        f"{100 * row['agreement']:.2f}",
        f"{row['divergence']:.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def _difference(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    difference, low, high = (100 * found[key] for key in ("difference", "low", "high"))
    return f"{difference:+.2f} ({low:+.2f} to {high:+.2f})"


def _curves(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for method, style in STYLES.items():
        chosen = sorted((r for r in rows if r["method"] == method), key=lambda r: r["budget"])
        if not chosen:
            continue
        shares = [sum(row["shares"]) / len(row["shares"]) for row in chosen]
        losses = [100 * row["against_base"]["difference"] for row in chosen]
        reach = [
            [100 * (r["against_base"]["difference"] - r["against_base"]["low"]) for r in chosen],
            [100 * (r["against_base"]["high"] - r["against_base"]["difference"]) for r in chosen],
        ]
        axes.errorbar(shares, losses, reach, fmt=style, capsize=2, label=method, markersize=4)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_ylim(bottom=-12)
    axes.set_xlabel("share of the original's multiply-adds")
    axes.set_ylabel("top-1, points from the original (paired 95%)")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure

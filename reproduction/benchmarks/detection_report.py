"""What was measured, on what, as text, Markdown and pictures.

python reproduction/benchmarks/detection_report.py LOG [LOG ...] PICTURE       # losses of some logs
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision

_HEAD = "| detector | seed | GMACs | share | box AP | AP50 | AP75 | mask AP | AP50 | steps |"


def machine(device: torch.device) -> dict[str, str]:
    """What the numbers were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
    }


def table(folder: Path) -> str:
    """All parts that are there, as Markdown."""
    lines = ["# Detection with and without token merging", ""]
    for path in sorted(folder.glob("*.json")):
        known = json.loads(path.read_text())
        if not isinstance(known, dict) or "runs" not in known:
            continue
        lines += [f"## {known['part']}", "", ", ".join(known["machine"].values()), ""]
        lines.append(_HEAD)
        lines += ["|---|---|---|---|---|---|---|---|---|---|"]
        whole = next((r["gmacs"] for r in known["runs"] if r["variant"] == "original"), None)
        for row in known["runs"]:
            share = "" if whole is None else f"{row['gmacs'] / whole:.3f}"
            box, mask = row["box"], row.get("mask")
            cells = [f"{row['variant']} {row['backbone']}", str(row["seed"]), f"{row['gmacs']:.3f}"]
            cells += [share, *(f"{100 * box[key]:.1f}" for key in ("ap", "ap50", "ap75"))]
            cells += ["", ""] if mask is None else [f"{100 * mask[k]:.1f}" for k in ("ap", "ap50")]
            lines.append(f"| {' | '.join([*cells, str(row['steps'])])} |")
        lines.append("")
    return "\n".join(lines)


def text_of(found: dict[str, Any]) -> str:
    """Scores in one line."""
    parts = [
        f"{kind} AP {100 * found[kind]['ap']:.1f} AP50 {100 * found[kind]['ap50']:.1f}"
        for kind in ("box", "mask")
        if kind in found
    ]
    return ", ".join(parts)


def draw_losses(logs: list[Path], picture: Path) -> None:
    """The losses that logs tell of, step by step, as a picture without any image in it."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(6, 3.5))
    for log in logs:
        found = re.findall(r"step (\d+): loss ([\d.]+)", log.read_text())
        axes.plot([int(s) for s, _ in found], [float(loss) for _, loss in found], label=log.stem)
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    axes.legend()
    figure.savefig(picture, bbox_inches="tight", dpi=110)


def main() -> None:
    """Draw the losses of some logs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="what a run printed")
    parser.add_argument("picture", type=Path, metavar="PICTURE", help="where to draw to (.png)")
    arguments = parser.parse_args()
    draw_losses(arguments.logs, arguments.picture)


if __name__ == "__main__":
    main()

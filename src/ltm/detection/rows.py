"""What a detector's training says: one row per epoch, on disk and on the console."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from ltm.detection.score import DetectionScores
from ltm.training.log import duration


@dataclass(frozen=True, kw_only=True)
class DetectionRow:
    """One epoch. Scores are between 0 and 1, and None where the epoch was not evaluated."""

    epoch: int
    """Epochs finished, from 1."""
    merging: bool
    lr: float
    noise: float
    train_loss: float
    losses: str
    """The parts of the loss, by name."""
    box_ap: float | None = None
    box_ap50: float | None = None
    box_ap75: float | None = None
    mask_ap: float | None = None
    mask_ap50: float | None = None
    mask_ap75: float | None = None
    train_seconds: float = 0.0
    val_seconds: float = 0.0
    images_per_second: float = 0.0

    @property
    def score(self) -> float | None:
        """What the best epoch is chosen by: masks where there are any, boxes otherwise."""
        return self.box_ap if self.mask_ap is None else self.mask_ap

    def line(self, epochs: int, seconds_left: float) -> str:
        """The epoch in one line."""
        parts = [f"epoch {self.epoch}/{epochs}", f"loss {self.train_loss:.4f}", self.losses]
        for kind, ap, ap50 in (
            ("box", self.box_ap, self.box_ap50),
            ("mask", self.mask_ap, self.mask_ap50),
        ):
            if ap is not None and ap50 is not None:
                parts.append(f"{kind} AP {100 * ap:.1f} AP50 {100 * ap50:.1f}")
        parts += [] if self.merging else ["not merging"]
        parts += [f"{self.images_per_second:.1f} images/s", f"{duration(seconds_left)} left"]
        return "  ".join(parts)


def score_columns(scores: DetectionScores | None) -> dict[str, float | None]:
    """An evaluation as columns of a row."""
    if scores is None:
        return {}
    columns: dict[str, float | None] = {
        "box_ap": scores.box.ap,
        "box_ap50": scores.box.ap50,
        "box_ap75": scores.box.ap75,
    }
    if scores.mask is not None:
        mask = scores.mask
        columns |= {"mask_ap": mask.ap, "mask_ap50": mask.ap50, "mask_ap75": mask.ap75}
    return columns


class DetectionLog:
    """The log of a run in its folder: `log.csv`, and curves at the end."""

    def __init__(
        self, folder: Path, history: Sequence[dict[str, Any]], console: Console, *, writes: bool
    ) -> None:
        self.folder, self.console, self._writes = folder, console, writes
        self.rows = [DetectionRow(**row) for row in history]

    @property
    def history(self) -> list[dict[str, Any]]:
        """All rows as plain values."""
        return [asdict(row) for row in self.rows]

    def add(self, row: DetectionRow, epochs: int) -> None:
        """Log an epoch; the whole table is written, as a resumed run drops rows it repeats."""
        self.rows.append(row)
        recent = self.rows[-5:]
        seconds = sum(r.train_seconds + r.val_seconds for r in recent) / len(recent)
        self.console.print(row.line(epochs, (epochs - row.epoch) * seconds))
        if self._writes:
            text = StringIO()
            names = [column.name for column in fields(DetectionRow)]
            writer = csv.DictWriter(text, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.history)
            (self.folder / "log.csv").write_text(text.getvalue(), encoding="utf-8")

    def draw_curves(self) -> None:
        """Loss and average precision by epoch."""
        from matplotlib.figure import Figure  # noqa: PLC0415 - takes a second that most runs lack

        figure = Figure(figsize=(9, 3.5), layout="constrained")
        loss, precision = figure.subplots(1, 2)
        loss.plot([row.epoch for row in self.rows], [row.train_loss for row in self.rows])
        loss.set(xlabel="epoch", ylabel="training loss")
        for name in ("box_ap", "box_ap50", "mask_ap", "mask_ap50"):
            points = [(row.epoch, getattr(row, name)) for row in self.rows]
            points = [(epoch, 100 * value) for epoch, value in points if value is not None]
            if points:
                precision.plot(*zip(*points, strict=True), marker=".", label=name.replace("_", " "))
        precision.set(xlabel="epoch", ylabel="average precision (%)")
        precision.legend(frameon=False)
        for axes in (loss, precision):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(self.folder / "curves.png", dpi=120)

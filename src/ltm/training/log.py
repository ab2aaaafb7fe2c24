"""The log of a run: one row per epoch, as a table, as curves, and as a line on the console."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ltm.files import write_text
from ltm.models import Say


class Panel(NamedTuple):
    """One diagram of the curves: its axis, and the columns that it shows, by label."""

    axis: str
    columns: Mapping[str, str]
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One epoch. Shares and scores are between 0 and 1; what does not apply is None."""

    epoch: int
    """Epochs finished, from 1."""
    merging: bool
    lr: float
    noise: float
    train_loss: float
    train_seconds: float = 0.0
    statistics_seconds: float = 0.0
    val_seconds: float = 0.0
    images_per_second: float = 0.0
    """Training images of all processes."""

    panels: ClassVar[Sequence[Panel]] = ()

    @property
    def score(self) -> float | None:
        """What the best epoch is chosen by; None where the epoch has no part in that."""
        raise NotImplementedError

    @property
    def remark(self) -> str:
        """What the next epoch's progress bar says about this one."""
        return ""

    def numbers(self) -> list[str]:
        """What the console shows of the epoch."""
        raise NotImplementedError

    def line(self, epochs: int, seconds_left: float) -> str:
        """The epoch in one line."""
        speed = self.images_per_second
        parts = [f"epoch {self.epoch}/{epochs}", f"loss {self.train_loss:.4f}", *self.numbers()]
        parts += [] if self.merging else ["not merging"]
        parts.append(f"{speed:.0f} images/s" if speed >= 100 else f"{speed:.1f} images/s")
        return "  ".join([*parts, f"{_duration(seconds_left)} left"])


class RunLog:
    """The rows of a run; with a folder also `log.csv`, and TensorBoard's files where installed."""

    def __init__(self, rows: Sequence[EpochRow], say: Say, folder: Path | None) -> None:
        self.rows, self.say = list(rows), say
        self._folder = folder
        self._board: Any = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """All rows as plain values."""
        return [asdict(row) for row in self.rows]

    def add(self, row: EpochRow, epochs: int) -> None:
        """Log an epoch."""
        self.rows.append(row)
        if self._folder is not None:
            write_rows(self.rows, self._folder / "log.csv")
            self._write_board(row, self._folder)
        recent = self.rows[-5:]
        seconds = sum(r.train_seconds + r.statistics_seconds + r.val_seconds for r in recent)
        self.say(row.line(epochs, (epochs - row.epoch) * seconds / len(recent)))

    def close(self) -> None:
        """Close files."""
        if self._board is not None:
            self._board.close()

    def _write_board(self, row: EpochRow, folder: Path) -> None:
        if self._board is None:
            with suppress(ImportError):
                from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional

                self._board = SummaryWriter(str(folder / "tensorboard"))
        if self._board is None:
            return
        for name, value in asdict(row).items():
            if isinstance(value, float) and math.isfinite(value):
                self._board.add_scalar(name.replace("_", "/", 1), value, row.epoch)
        self._board.flush()


def write_rows(rows: Sequence[EpochRow], path: Path) -> None:
    """Write the whole table: a resumed run drops the rows that it repeats."""
    text = StringIO()
    names = [column.name for column in fields(rows[0])]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_text(path, text.getvalue())


def draw_curves(rows: Sequence[EpochRow], path: Path) -> None:
    """Losses and scores by epoch."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - takes a second that most runs lack

    panels = rows[0].panels
    figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
    first = next((row.epoch for row in rows if row.merging), rows[0].epoch)
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for label, column in panel.columns.items():
            points = [(row.epoch, getattr(row, column)) for row in rows]
            points = [(epoch, panel.scale * value) for epoch, value in points if value is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="." * (len(points) < 50), label=label)
        axes.set(xlabel="epoch", ylabel=panel.axis)
        axes.spines[["top", "right"]].set_visible(False)
        if first > rows[0].epoch:
            axes.axvline(first, linewidth=0.8, linestyle=":", color="grey")
        if len(axes.lines) and len(panel.columns) > 1:
            axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}"

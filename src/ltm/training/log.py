"""What a run says: a table and curves on disk, one line per epoch, a bar on a terminal."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One epoch. Shares and accuracies are between 0 and 1; what does not apply is None."""

    epoch: int
    """Epochs finished, from 1."""
    merging: bool
    lr: float
    noise: float
    train_loss: float
    train_top1: float | None
    """None where batches are mixed."""
    val_loss: float
    val_top1: float
    ib_loss: float | None
    ib_bound: float | None
    mac_share: float | None
    """Share of the original MACs; the mean of the epoch where it differs between images."""
    tokens: str
    """Tokens after each merging site."""
    train_seconds: float = 0.0
    statistics_seconds: float = 0.0
    val_seconds: float = 0.0
    images_per_second: float = 0.0
    """Training images of all processes."""


def plain_console() -> Console:
    """A console that prints text as it is."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def epoch_line(row: EpochRow, epochs: int, seconds_left: float) -> str:
    """An epoch in one line."""
    parts = [
        f"epoch {row.epoch}/{epochs}",
        f"loss {row.train_loss:.4f}",
        f"val loss {row.val_loss:.4f}",
        f"top-1 {100 * row.val_top1:.2f}",
    ]
    if row.ib_loss is not None:
        parts.append(bottleneck_text(row))
    if not row.merging:
        parts.append("not merging")
    elif row.mac_share is not None:
        parts.append(f"MACs {row.mac_share:.3f}")
    parts += [f"{row.images_per_second:.0f} images/s", f"{duration(seconds_left)} left"]
    return "  ".join(parts)


def bottleneck_text(row: EpochRow) -> str:
    """The information bottleneck of an epoch; empty where nothing merged."""
    if row.ib_loss is None or row.ib_bound is None:
        return ""
    return f"IB {row.ib_loss:.3f} bound {row.ib_bound:.3f}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}"


class RunLog:
    """The log of a run in its folder: `log.csv`, TensorBoard where installed, curves at the end."""

    def __init__(
        self,
        folder: Path,
        history: Sequence[dict[str, Any]] = (),
        *,
        console: Console | None = None,
        writes: bool = True,
    ) -> None:
        self.folder = folder
        self.console = console or plain_console()
        self.rows = [EpochRow(**row) for row in history]
        self._writes = writes
        """Of several processes one writes; all keep the rows."""
        self._board: Any = None
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            self._write_csv()

    @property
    def history(self) -> list[dict[str, Any]]:
        """All rows as plain values."""
        return [asdict(row) for row in self.rows]

    def add(self, row: EpochRow, epochs: int) -> None:
        """Log an epoch."""
        self.rows.append(row)
        if self._writes:
            self._write_csv()
            self._write_board(row)
        recent = self.rows[-5:]
        seconds = sum(r.train_seconds + r.statistics_seconds + r.val_seconds for r in recent)
        self.console.print(epoch_line(row, epochs, (epochs - row.epoch) * seconds / len(recent)))

    def close(self) -> None:
        """Draw the curves and close files."""
        if self.rows:
            draw_curves(self.rows, self.folder / "curves.png")
        if self._board is not None:
            self._board.close()

    def _write_csv(self) -> None:
        """Write the whole table: a resumed run drops the rows that it repeats."""
        text = StringIO()
        writer = csv.DictWriter(text, list(EpochRow.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.history)
        (self.folder / "log.csv").write_text(text.getvalue(), encoding="utf-8")

    def _write_board(self, row: EpochRow) -> None:
        if self._board is None:
            with suppress(ImportError):
                from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional

                self._board = SummaryWriter(str(self.folder / "tensorboard"))
        if self._board is None:
            return
        for name, value in asdict(row).items():
            if isinstance(value, float) and math.isfinite(value):
                self._board.add_scalar(name.replace("_", "/", 1), value, row.epoch)
        self._board.flush()


def draw_curves(rows: Sequence[EpochRow], path: Path) -> None:
    """Training and validation loss, and accuracy, by epoch."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - takes a second that most runs lack

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    losses, accuracy = figure.subplots(1, 2)
    epochs = [row.epoch for row in rows]
    losses.plot(epochs, [row.train_loss for row in rows], label="training")
    losses.plot(epochs, [row.val_loss for row in rows], label="validation")
    losses.set(xlabel="epoch", ylabel="cross-entropy")
    losses.legend(frameon=False)
    accuracy.plot(epochs, [100 * row.val_top1 for row in rows])
    accuracy.set(xlabel="epoch", ylabel="validation top-1 (%)")
    first = next((row.epoch for row in rows if row.merging), epochs[0])
    for axes in (losses, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
        if first > epochs[0]:
            axes.axvline(first, linewidth=0.8, linestyle=":", color="grey")
    figure.savefig(path, dpi=120)


def write_json(path: Path, values: Any) -> None:
    """Write plain values as JSON."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

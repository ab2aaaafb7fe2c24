"""The timings of `ltm benchmark` in a file, metrics.json, and as a table, table.md.

Several runs share the file. Each notes its machine and versions: without them a time means nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ltm.evaluation.latency import BASE, Timing
from ltm.evaluation.records import Environment
from ltm.files import locked, results_in, write_text

_IDENTITY = ("model", "method", "ratio", "image_size", "batch_size", "dtype", "mode", "scope")


class TimingFile:
    """The timings of several runs. Ratios hold within a run, so each run has its own base.

    Every `add` replaces the file in one step and keeps rows that other processes have added.
    Without a path, rows are only held in memory. Without `keep`, the first write drops the rows
    that the file held.
    """

    def __init__(self, path: Path | None, *, keep: bool = True) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self._run: dict[str, Any] = {}
        self._replaces = not keep
        self.read()

    def read(self) -> None:
        """Read the file, so that other processes' rows are kept."""
        path = self.path
        if path is None or self._replaces or not path.exists():
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            self.runs, self.rows = list(content["runs"]), list(content["rows"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} holds no timings that could be added to; choose another folder or "
                "use --overwrite"
            ) from error

    def start_run(self, environment: Environment, settings: Mapping[str, object]) -> None:
        """Note hardware and settings of the next rows; the first one numbers the run."""
        self._run = {"environment": dataclasses.asdict(environment), "settings": dict(settings)}

    def add(self, rows: Iterable[Timing]) -> None:
        """Add rows of the run, and write the file."""
        with self._locked():
            self.read()
            if "run" not in self._run:
                self._run = {"run": len(self.runs) + 1, **self._run}
                self.runs.append(self._run)
            number = self._run["run"]
            self.rows.extend({"run": number, **dataclasses.asdict(row)} for row in rows)
            if self.path is not None:
                write_text(self.path, self._text())
            self._replaces = False

    def _locked(self) -> AbstractContextManager[object]:
        if self.path is None:
            return nullcontext()
        return locked(self.path.with_suffix(".lock"))

    def _text(self) -> str:
        return json.dumps({"runs": self.runs, "rows": self.rows}, indent=1) + "\n"

    def holds(self, row: Timing, device_name: str) -> bool:
        """Whether such a row was measured before on such a device."""
        wanted = _identity(dataclasses.asdict(row))
        runs = {r["run"] for r in self.runs if r["environment"]["device"] == device_name}
        return any(_identity(known) == wanted for known in self.rows if known["run"] in runs)

    def markdown(self) -> str:
        """All rows, one table per model, precision and scope, and what they were measured on."""
        groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for row in self.rows:
            size = "x".join(str(side) for side in row["image_size"])
            groups.setdefault((row["model"], size, row["dtype"], row["scope"]), []).append(row)
        lines = [_LEGEND, "", *_describe_runs(self.runs)]
        for (model, size, dtype, scope), members in groups.items():
            lines += ["", f"### {model} at {size}, {dtype}, {scope}", ""]
            lines += [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
            ordered = sorted(members, key=lambda row: (row["run"], row["batch_size"], row["mode"]))
            lines += [_line(_cells(row, ordered)) for row in ordered]
        return "\n".join(lines) + "\n"

    def save(self, folder: Path) -> None:
        """Write all rows into another folder, as metrics.json and table.md."""
        with results_in(folder) as aside:
            write_text(aside / "table.md", self.markdown())
            write_text(aside / "metrics.json", self._text())

    def write_table(self) -> None:
        """Write all rows of the file, of every process, as table.md beside it."""
        if self.path is None or not self.path.exists():
            return
        with self._locked():
            self.read()
            if self.rows:
                write_text(self.path.with_name("table.md"), self.markdown())


def _identity(row: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(
        tuple(value) if isinstance(value := row[name], list | tuple) else value
        for name in _IDENTITY
    )


_LEGEND = (
    "Times are medians of interleaved rounds; ratios are medians within rounds with 95% intervals "
    "(with fewer than six rounds, their range), "
    "above 1 is faster than the original with fused attention and patches embedded by a product."
)
_COLUMNS = (
    "batch",
    "mode",
    "method",
    "MACs",
    "ms/batch (quartiles)",
    "images/s",
    "against base, same mode",
    "against base, its best mode",
    "verdict",
    "peak MiB",
    "run",
    "note",
)


def _describe_runs(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The machines of the runs: one line for each environment."""
    alike: dict[str, list[int]] = {}
    for run in runs:
        alike.setdefault(_on_what(run["environment"]), []).append(run["run"])
    return [f"- {_numbered(numbers)}: {environment}" for environment, numbers in alike.items()]


def _on_what(environment: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {found}" for name, found in environment["packages"].items())
    cuda = f", CUDA {environment['cuda']}" if environment["cuda"] else ""
    return (
        f"{environment['device']}, {environment['cores']} cores "
        f"({environment['threads']} threads), Python {environment['python']}, {packages}{cuda}."
    )


def _numbered(numbers: Sequence[int]) -> str:
    """Such as `Runs 1 to 3, 7`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(low) if low == high else f"{low} to {high}" for low, high in spans]
    return f"{'Run' if len(numbers) == 1 else 'Runs'} {', '.join(texts)}"


def _cells(row: Mapping[str, Any], members: Sequence[Mapping[str, Any]]) -> list[str]:
    base = next((m for m in members if m["method"] == BASE and m["gmacs"]), None)
    share = "" if base is None or not row["gmacs"] else f"{row['gmacs'] / base['gmacs']:.3f}"
    start = [str(row["batch_size"]), row["mode"], name_with_ratio(row), share]
    end = [str(row["run"]), row["note"]]
    if row["milliseconds"] is None:
        return [*start, "", "", "", "", f"did not run: {row['error']}", "", *end]
    low, high = row["quartiles"]
    memory = row["peak_memory_mib"]
    return [
        *start,
        f"{row['milliseconds']:.3g} ({low:.3g}-{high:.3g})",
        f"{row['images_per_second']:.0f}",
        _ratio(row["speedup"], row["speedup_interval"]),
        _ratio(row["best_speedup"], row["best_speedup_interval"]),
        row["verdict"],
        "" if memory is None else f"{memory:.0f}",
        *end,
    ]


def name_with_ratio(row: Mapping[str, Any]) -> str:
    """Such as `ltm 0.7`."""
    return row["method"] if row["ratio"] is None else f"{row['method']} {row['ratio']:g}"


def _ratio(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None or interval is None:
        return ""
    return f"{value:.2f} ({interval[0]:.2f}-{interval[1]:.2f})"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"

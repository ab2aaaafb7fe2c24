"""Tables as CSV and Markdown, from saved rows alone."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path

from ltm.files import write_bytes, write_text
from reproduction.estimates import Found, Reader
from reproduction.jobs import Bottleneck, Classifier, Job, identity
from reproduction.plots import draw
from reproduction.tables.base import Column, Experiment, Table

_FIELDS = ("row", "column", "value", "low", "high", "seeds", "values", "paper", "problem", "jobs")


def write_table(experiment: Experiment, table: Table, reader: Reader, scale: str) -> Path:
    """Write CSV, Markdown and plots of a table into its folder; returns the folder."""
    folder = reader.store.output / experiment.name
    write_text(folder / "table.csv", to_csv(table, reader))
    write_text(folder / "table.md", to_markdown(experiment, table, reader, scale))
    for name, content in draw(experiment, table, reader).items():
        write_bytes(folder / name, content)
    return folder


def to_csv(table: Table, reader: Reader) -> str:
    """One line per cell, with every seed's value and the rows that it comes from."""
    text = StringIO()
    writer = csv.DictWriter(text, _FIELDS, lineterminator="\n")
    writer.writeheader()
    for row in table.rows:
        for column in table.columns:
            cell = row.cells.get(column.name)
            if cell is None:
                continue
            found = reader.read(cell)
            value = found.estimate
            writer.writerow(
                {
                    "row": row.label,
                    "column": column.name,
                    "value": "" if value is None else value.mean,
                    "low": "" if value is None or value.low is None else value.low,
                    "high": "" if value is None or value.high is None else value.high,
                    "seeds": 0 if value is None else len(value.values),
                    "values": "" if value is None else " ".join(map(repr, value.values)),
                    "paper": row.paper.get(column.name, ""),
                    "problem": found.problem,
                    "jobs": " ".join(identity(job) for job in cell.jobs),
                }
            )
    return text.getvalue()


def to_markdown(experiment: Experiment, table: Table, reader: Reader, scale: str) -> str:
    """The table as people read it: means and 95% intervals, the paper's number in brackets."""
    lines = [f"# {experiment.item}: {experiment.title}", "", f"Scale `{scale}`.", ""]
    lines += [line(["", *(column.name for column in table.columns)])]
    lines += [line(["---"] * (1 + len(table.columns)))]
    problems: list[str] = []
    for row in table.rows:
        cells = [row.label]
        for column in table.columns:
            cell = row.cells.get(column.name)
            found = None if cell is None else reader.read(cell)
            cells.append("-" if found is None else show(found, column))
            if found is not None and found.problem.startswith("failed"):
                problems.append(f"- {row.label}, {column.name}: {found.problem}")
        lines.append(line(cells))
    several = any(len(cell.jobs) > 1 for row in table.rows for cell in row.cells.values())
    means = "Values are means over seeds, with 95% intervals (Student's t)."
    lines += ["", means if several else "One value each: there is one seed."]
    lines += list(table.notes)
    lines += _settings(table, reader)
    if problems:
        lines += ["", "What failed:", "", *dict.fromkeys(problems)]
    return "\n".join(lines) + "\n"


def _settings(table: Table, reader: Reader) -> list[str]:
    """How each row was made: where it merges, what trains, on how many images."""
    lines = []
    for row in table.rows:
        jobs = [job for cell in row.cells.values() for job in cell.jobs]
        classifiers = [found for job in jobs if (found := _classifier(job)) is not None]
        if classifiers:
            last = max(classifiers, key=_images_seen)
            lines.append(line([row.label, *_setting(last, reader)]))
    if not lines:
        return []
    heading = ["", "merges in blocks (tokens left)", "trains", "images seen in training"]
    return ["", "How each row was made:", "", line(heading), line(["---"] * 4), *lines]


def _classifier(job: Job) -> Classifier | None:
    if isinstance(job, Classifier):
        return job
    return job.of if isinstance(job, Bottleneck) else None


def _images_seen(job: Classifier) -> int:
    """Images per epoch times epochs; without a number of its own, an epoch counts as one."""
    return job.settings.optim.epochs * max(1, job.settings.data.epoch_images) if job.trains else 0


def _setting(job: Classifier, reader: Reader) -> list[str]:
    settings, values = job.settings, reader.values(job)
    if settings.merge.method == "none":
        sites = "none"
    elif values is None:
        sites = "not run"
    else:
        sites = ", ".join(f"{block} ({left})" for block, left in values["sites"])
    if not job.trains:
        return [sites, "nothing", "none"]
    what = {"mergers": "mask modules", "all": "all weights", "norms": "mask modules and norms"}
    trains = what[settings.tune.trainable] + (" and LoRA" if settings.tune.lora_rank else "")
    drawn = settings.data.epoch_images
    images = f"{settings.optim.epochs} x {f'{drawn:,}' if drawn else 'all'}"
    return [sites, trains, images]


def show(found: Found, column: Column) -> str:
    """A cell in a few characters."""
    if found.estimate is None:
        return "failed" if found.problem.startswith("failed") else found.problem
    mean = found.estimate.mean
    small = 0 < abs(mean) < 10**-column.digits
    text = f"{mean:.2g}" if small else f"{mean:.{column.digits}f}"
    if found.estimate.reach is not None:
        text += f" ± {found.estimate.reach:.{column.digits}f}"
    return text + (f" ({found.missing} missing)" if found.missing else "")


def line(cells: list[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"

"""What a table is: rows of cells that name jobs and a measure, and the claims it is there for.

Below the types are the short forms that declarations are written in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from reproduction.jobs import Job
from reproduction.measures import Of
from reproduction.paper_numbers import paper_numbers
from reproduction.scales.base import Network, Scale

Better = Literal["higher", "lower"]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: its heading, how numbers are written, and which are better, if any."""

    name: str
    digits: int = 2
    better: Better | None = None
    points: bool = False
    """Its differences are percentage points, which the paper's can be measured against."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A number: the mean of a measure over jobs that differ in their seed."""

    jobs: tuple[Job, ...]
    measure: str
    of: Of = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row: its label, its cells by column, and the paper's numbers where it has any."""

    label: str
    cells: Mapping[str, Cell]
    paper: Mapping[str, float] = field(default_factory=dict)
    paper_label: str = ""
    """The paper's row that stands beside this one."""
    group: str = ""
    """Rows of one group are drawn together."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper says of two rows: in this column the one is higher or lower than the other."""

    row: str
    other: str
    column: str
    other_column: str | None = None
    """The other row's column, where it is not the same."""
    expected: Better
    paper: float | None = None
    """The paper's difference."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A plot of a table: how it is drawn, of which column."""

    kind: Literal["points", "cost", "lines", "rows", "history", "copy"]
    column: str = ""
    name: str = "plot"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table at one scale."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()
    pictures: tuple[Picture, ...] = ()
    notes: tuple[str, ...] = ()

    def jobs(self) -> list[Job]:
        """All jobs behind the table."""
        cells = [cell for row in self.rows for cell in row.cells.values()]
        return list(dict.fromkeys(job for cell in cells for job in cell.jobs))

    def row(self, label: str) -> Row | None:
        """The row of a label."""
        return next((row for row in self.rows if row.label == label), None)

    def column(self, name: str) -> Column:
        """The column of a name."""
        return next(column for column in self.columns if column.name == name)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper, and how to declare it at a scale."""

    name: str
    item: str
    """The paper's table or figure."""
    title: str
    declare: Callable[[Scale], Table]


def experiment(
    name: str, *, item: str, title: str
) -> Callable[[Callable[[Scale], Table]], Experiment]:
    """Make the function below the declaration of an experiment."""
    return partial(Experiment, name, item, title)


PARAMETERS = Column(name="params (M)")
GMACS = Column(name="GMACs", digits=3)


def top1(name: str = "top-1") -> Column:
    """A column of accuracies."""
    return Column(name=name, better="higher", points=True)


def informations(name: str) -> Column:
    """A column of bottleneck losses or bounds."""
    return Column(name=name, digits=4, better="lower")


def cell(measure: str, jobs: Iterable[Job], of: Of = None) -> Cell:
    """A cell over the jobs of all seeds."""
    return Cell(jobs=tuple(dict.fromkeys(jobs)), measure=measure, of=of)


def gmacs(jobs: Sequence[Job]) -> dict[str, Cell]:
    """MACs, which all seeds share."""
    return {GMACS.name: cell("gmacs", jobs[:1])}


def sizes(jobs: Sequence[Job], *, macs_vary: bool = False) -> dict[str, Cell]:
    """Parameters, and MACs: the mean over the seeds where they vary."""
    macs = {GMACS.name: cell("gmacs", jobs)} if macs_vary else gmacs(jobs)
    return {PARAMETERS.name: cell("parameters", jobs[:1])} | macs


def row(table: str, label: str, paper_label: str, cells: Mapping[str, Cell]) -> Row:
    """A row with the paper's numbers beside it."""
    numbers = paper_numbers(table).get(paper_label, {})
    return Row(label=label, cells=cells, paper=numbers, paper_label=paper_label)


def claim(
    rows: Sequence[Row],
    first: str,
    other: str,
    column: str,
    expected: Better,
    *,
    other_column: str | None = None,
) -> Claim:
    """A claim, with the paper's own difference where it prints both numbers."""
    found = {row.label: row.paper for row in rows}
    ours = found.get(first, {}).get(column)
    theirs = found.get(other, {}).get(other_column or column)
    printed = None if ours is None or theirs is None else ours - theirs
    return Claim(
        row=first,
        other=other,
        column=column,
        other_column=other_column,
        expected=expected,
        paper=printed,
    )


def number_of_epochs(number: int) -> str:
    """A number of epochs in words."""
    return f"{number} epoch" if number == 1 else f"{number} epochs"


def epoch_notes(*networks: Network) -> tuple[str, ...]:
    """What an epoch of fine-tuning is, where it is not all images."""
    drawn = {n.label: n.tune.data.epoch_images for n in networks if n.tune.data.epoch_images}
    if not drawn:
        return ()
    images = ", ".join(f"{number:,} ({label})" for label, number in drawn.items())
    return (f"Training images in an epoch of fine-tuning: {images}.",)

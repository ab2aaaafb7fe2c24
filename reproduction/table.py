"""What a table is: rows of cells that name jobs and a measure, and the claims it is there for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from reproduction.jobs import Job
from reproduction.measures import Of
from reproduction.scales.base import Scale

Better = Literal["higher", "lower"]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: its heading, how numbers are written, and which are better, if any."""

    name: str
    digits: int = 2
    better: Better | None = None


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


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or figure of the paper, and how to declare it at a scale."""

    name: str
    item: str
    """The paper's table or figure."""
    title: str
    declare: Callable[[Scale], Table]

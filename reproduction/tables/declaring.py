"""Small words that declarations are written in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from reproduction.jobs import Job
from reproduction.measures import Of
from reproduction.paper import paper_numbers
from reproduction.scales.base import Network
from reproduction.table import Better, Cell, Claim, Column, Row

PARAMETERS = Column(name="params (M)")
GMACS = Column(name="GMACs", digits=3)


def top1(name: str = "top-1") -> Column:
    """A column of accuracies."""
    return Column(name=name, better="higher")


def informations(name: str) -> Column:
    """A column of bottleneck losses or bounds."""
    return Column(name=name, digits=4, better="lower")


def cell(measure: str, jobs: Iterable[Job], of: Of = None) -> Cell:
    """A cell over the jobs of all seeds."""
    return Cell(jobs=tuple(dict.fromkeys(jobs)), measure=measure, of=of)


def row(experiment: str, label: str, paper_label: str, cells: Mapping[str, Cell]) -> Row:
    """A row with the paper's numbers beside it."""
    numbers = paper_numbers(experiment).get(paper_label, {})
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


def epoch_notes(network: Network) -> tuple[str, ...]:
    """What an epoch of fine-tuning is, where it is not all images."""
    drawn = network.tune.data.epoch_images
    return (f"An epoch of fine-tuning draws {drawn:,} of the training images.",) if drawn else ()

"""The rows that the project keeps: each is still known, and the tables follow from them."""

from pathlib import Path

import pytest

from reproduction.estimates import Reader
from reproduction.jobs import identity, in_order
from reproduction.rows import Store, read_lines
from reproduction.scales import make_scale, remembered
from reproduction.scales.base import Sources
from reproduction.table_files import to_csv, to_markdown
from reproduction.tables import EXPERIMENTS

STORE = Store(Path(__file__).parents[2] / "results/paper")
SMALL = make_scale("small", remembered(STORE, "small", Sources(), runs=False))


def test_every_row_is_found_by_its_job() -> None:
    jobs = in_order([job for made in EXPERIMENTS.values() for job in made.declare(SMALL).jobs()])
    found = {identity(job) for job in jobs if STORE.values(job) is not None}
    assert found == read_lines(STORE.output / "rows.jsonl").keys()


def test_rows_are_sorted_one_a_line() -> None:
    lines = (STORE.output / "rows.jsonl").read_text().splitlines()
    assert lines == sorted(lines)
    assert all(line.startswith('{"id": "') for line in lines)


@pytest.mark.parametrize("name", [p.parent.name for p in STORE.output.glob("*/table.md")])
def test_tables_follow_from_the_rows(name: str) -> None:
    experiment, folder = EXPERIMENTS[name], STORE.output / name
    table, reader = experiment.declare(SMALL), Reader(STORE)
    assert to_csv(table, reader) == (folder / "table.csv").read_text()
    assert to_markdown(experiment, table, reader, "small") == (folder / "table.md").read_text()

"""The rows that the project keeps: each is still known, and the tables follow from them."""

from pathlib import Path

import pytest

from reproduction.comparison import beside
from reproduction.estimates import Reader
from reproduction.jobs import identity, in_order
from reproduction.measures import correct_flags
from reproduction.provenance import provenance, tree_of
from reproduction.rows import Store, read_lines
from reproduction.scales import make_scale, remembered
from reproduction.scales.base import Sources
from reproduction.table_files import to_csv, to_markdown
from reproduction.tables import EXPERIMENTS

STORE = Store(Path(__file__).parents[2] / "results/paper")
SMALL = make_scale("small", remembered(STORE, "small", Sources(), runs=False))
ROWS = read_lines(STORE.output / "rows.jsonl")
TABLES = {name: made.declare(SMALL) for name, made in EXPERIMENTS.items()}


def test_every_row_is_found_by_its_job() -> None:
    jobs = in_order([job for table in TABLES.values() for job in table.jobs()])
    found = {identity(job) for job in jobs if STORE.values(job) is not None}
    assert found == ROWS.keys()


def test_rows_are_sorted_one_a_line() -> None:
    lines = (STORE.output / "rows.jsonl").read_text().splitlines()
    assert lines == sorted(lines)
    assert all(line.startswith('{"id": "') for line in lines)


def test_rows_are_of_one_commit_and_its_code() -> None:
    sources = STORE.sources()
    assert len(sources) <= 1
    for commit, tree in sources:
        assert commit is not None
        assert not commit.endswith("-dirty")
        known = tree_of(commit)
        if known is None:
            pytest.skip("the history is not here to check the commit against")
        assert known == tree


def test_code_is_hashed_alike_by_us_and_by_git() -> None:
    here = provenance()
    if here.commit is None:
        pytest.skip("no git folder")
    assert here.is_clean == (tree_of(here.commit.removesuffix("-dirty")) == here.tree)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tables_follow_from_the_rows(name: str) -> None:
    experiment, folder = EXPERIMENTS[name], STORE.output / name
    table, reader = TABLES[name], Reader(STORE)
    if not reader.has_any(table):
        assert not folder.exists()
        return
    assert to_csv(table, reader) == (folder / "table.csv").read_text()
    assert to_markdown(experiment, table, reader, "small") == (folder / "table.md").read_text()


def test_the_paper_beside_ours_follows_from_the_rows() -> None:
    section = beside([(EXPERIMENTS[n], TABLES[n]) for n in EXPERIMENTS], STORE, "small")
    assert section == (STORE.output / "beside.md").read_text()


def test_accuracies_are_counts_of_the_images_that_rows_hold() -> None:
    """By counting bits here, not by the package's own measure."""
    for row in ROWS.values():
        values = row["values"]
        if "correct_bits" in values:
            ones = f"{int(values['correct_bits'], 16):b}".count("1")
            assert ones == values["correct"] == sum(correct_flags(values))

"""The paper's own numbers, as printed: one file per table."""

import csv
from functools import cache
from importlib.resources import files

Numbers = dict[str, dict[str, float]]


@cache
def paper_numbers(name: str) -> Numbers:
    """The paper's table of an experiment: numbers by row and column; empty where it prints none."""
    file = files(__name__) / f"{name}.csv"
    if not file.is_file():
        return {}
    rows = csv.DictReader(file.read_text(encoding="utf-8").splitlines())
    return {
        row["row"]: {
            column: float(value) for column, value in row.items() if column != "row" and value
        }
        for row in rows
    }


def printed_shares(network: str) -> dict[str, float]:
    """What each method leaves of a network's MACs in the paper, whose one ratio means many."""
    printed = paper_numbers("scratch") | paper_numbers("finetune")
    whole = printed[network]["GMACs"]
    return {
        method.lower(): round(printed[f"{method}-{network}"]["GMACs"] / whole, 3)
        for method in ("LTM", "ToMe", "ToFu", "LTMP")
    }

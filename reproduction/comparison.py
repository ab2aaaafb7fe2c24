"""The paper beside ours: every number and claim of the paper, what we found, and a verdict.

Networks and data of the smaller scales are not the paper's, so absolute numbers cannot agree; what
can is the direction of a difference. A claim is confirmed when our 95% interval lies on its side
of zero, and not confirmed otherwise. Where the paper's own numbers lie on the other side, what it
claims is to be no worse than that. Percentage points are compared by size, too: a difference of
more than three times the paper's, or of less than a third, is not the paper's difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ltm.files import write_text
from reproduction.estimates import Found, Reader
from reproduction.paper_numbers import paper_numbers
from reproduction.rows import Store
from reproduction.table_files import line, show
from reproduction.tables.base import Claim, Experiment, Row, Table

FAR = 3.0
"""So many times the paper's difference is another difference."""
BEGIN, END = "<!-- paper beside ours: begin -->", "<!-- paper beside ours: end -->"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One line: what the paper says, what we found."""

    what: str
    paper: str
    ours: str
    verdict: str


def beside(tables: Iterable[tuple[Experiment, Table]], store: Store, scale: str) -> str:
    """The section as Markdown."""
    lines = [
        "## The paper beside ours",
        "",
        (
            f"Scale `{scale}`, written by `ltm table beside` from the saved rows. Each claim is a "
            "difference between two rows. It is confirmed if the 95% interval of our difference "
            "lies on the side of zero that the paper claims. If the paper's own numbers lie on the "
            "other side, ours must be no worse than they are. A difference in percentage points "
            "must also have the paper's size, within a factor of three. Intervals are taken over "
            "seeds; with one seed, over images; for times, over the rounds of timing."
        ),
    ]
    if scale == "smoke":
        lines += ["", "Here everything is seen to run; the numbers say nothing about the paper."]
    reader = Reader(store)
    absent = []
    for experiment, table in tables:
        if not reader.has_any(table):
            absent.append(f"{experiment.item} (`{experiment.name}`)")
            continue
        lines += ["", f"### {experiment.item}: {experiment.title} (`{experiment.name}`)", ""]
        verdicts = [judge(table, claim, reader) for claim in table.claims]
        lines += [line(["claim", "paper", "ours", "verdict"]), line(["---"] * 4)]
        lines += [line([v.what, v.paper, v.ours, v.verdict]) for v in verdicts]
        lines += ["", *table.notes] if table.notes else []
        lines += _numbers(experiment, table, reader)
    if absent:
        lines += ["", "### Not run", "", f"No row has been run of: {', '.join(absent)}."]
    return "\n".join(lines) + "\n"


def judge(table: Table, claim: Claim, reader: Reader) -> Verdict:
    """Compare a claim of the paper with our rows."""
    digits = table.column(claim.column).digits
    found = reader.compare(table, claim)
    sized = table.column(claim.column).points
    return Verdict(
        what=_sentence(claim),
        paper="stated" if claim.paper is None else f"{claim.paper:+.{max(digits, 2)}f}",
        ours=_difference(found, digits),
        verdict=_verdict(claim, found, digits, sized=sized),
    )


def _sentence(claim: Claim) -> str:
    left, right, how = claim.row, claim.other, claim.expected
    if _allowance(claim):
        how = f"at most {_allowance(claim):g} {'lower' if how == 'higher' else 'higher'}"
    if claim.other_column not in (None, claim.column):
        return f"{left} {claim.column} is {how} than {right} {claim.other_column}"
    return f"{left} is {how} than {right} in {claim.column}"


def _allowance(claim: Claim) -> float:
    """How much worse the paper's own numbers are than what is expected."""
    given = (claim.paper or 0.0) * (1 if claim.expected == "higher" else -1)
    return round(max(0.0, -given), 6)


def _difference(found: Found, digits: int) -> str:
    value = found.estimate
    if value is None:
        return ""
    text = f"{value.mean:+.{digits}f}"
    if value.low is not None and value.high is not None:
        text += f" ({value.low:+.{digits}f} to {value.high:+.{digits}f})"
    return text


def _size(claim: Claim, mean: float) -> str:
    """How our difference compares with the paper's, where that is far from it."""
    if not claim.paper or _allowance(claim):
        return ""
    times = mean / claim.paper
    if 1 / FAR <= times <= FAR:
        return ""
    return f"{abs(times):.1f} times the paper's" if times > FAR else "less than a third of it"


def _verdict(claim: Claim, found: Found, digits: int, *, sized: bool) -> str:
    value = found.estimate
    if value is None:
        return f"not tested: {found.problem}"
    if value.low is None or value.high is None:
        mean, allowed = value.mean if claim.expected == "higher" else -value.mean, _allowance(claim)
        # A difference that the table does not show is none.
        agrees = mean > -allowed if allowed else round(mean, digits) > 0
        return f"{'seen' if agrees else 'not seen'} in one run, not tested over seeds"
    low, high = (value.low, value.high) if claim.expected == "higher" else (-value.high, -value.low)
    allowed = _allowance(claim)
    if low > -allowed:
        size = _size(claim, value.mean) if sized else ""
        return f"direction confirmed, size not: {size}" if size else "confirmed"
    if high < -allowed:
        return f"not confirmed: {'the difference is larger' if allowed else 'the opposite'}"
    return "not confirmed: no clear difference"


def _numbers(experiment: Experiment, table: Table, reader: Reader) -> list[str]:
    """The paper's rows, number by number, with ours where a row stands beside it."""
    printed = paper_numbers(experiment.name)
    if not printed:
        return []
    ours: dict[str, list[Row]] = {}
    for row in table.rows:
        ours.setdefault(row.paper_label, []).append(row)
    if not ours.keys() & printed.keys():
        return ["", "None of these rows stands beside one of the paper's, which are left out."]
    columns = [c for c in table.columns if any(c.name in numbers for numbers in printed.values())]
    lines = ["", "Paper / ours:", "", line(["paper's row", "ours", *(c.name for c in columns)])]
    lines.append(line(["---"] * (2 + len(columns))))
    for name, numbers in printed.items():
        for row in ours.get(name, []):
            cells = [name, row.label]
            for column in columns:
                cell = row.cells.get(column.name)
                shown = "-" if cell is None else show(reader.read(cell), column)
                number = numbers.get(column.name)
                cells.append(f"{'-' if number is None else f'{number:g}'} / {shown}")
            lines.append(line(cells))
    absent = [name for name in printed if name not in ours]
    if absent:
        lines += ["", f"Rows of the paper that this scale does not have: {', '.join(absent)}."]
    return lines


def write_section(readme: Path, section: str) -> None:
    """Put the section between its marks in a page; at its end where it has none."""
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and not end:
        raise ValueError(f"{readme} has {BEGIN!r} but not {END!r}; add it, or remove both")
    before = before if begin else (text.rstrip("\n") + "\n\n" if text else "")
    after = after if begin else "\n"
    write_text(readme, f"{before}{BEGIN}\n\n{section}\n{END}{after}")

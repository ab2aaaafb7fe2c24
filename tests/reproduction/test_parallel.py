"""Rows in several processes: the same rows, and what is timed after all others."""

from pathlib import Path

import pytest

from ltm.cli import main
from reproduction.jobs import identity, in_order
from reproduction.rows import read_lines
from reproduction.scales import make_scale
from reproduction.scales.base import Sources
from reproduction.tables import EXPERIMENTS


def rows_of(folder: Path) -> dict[str, dict]:
    return read_lines(folder / "rows.jsonl")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_processes_do_what_one_does(
    tmp_path: Path, smoke: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["table", "throughput", "--scale", "smoke", "--output"]
    assert main([*arguments, str(tmp_path / "two"), "--processes", "2"]) == 0
    assert "2 processes at work" in capsys.readouterr().out
    two, one = rows_of(tmp_path / "two"), rows_of(smoke)
    declared = EXPERIMENTS["throughput"].declare(make_scale("smoke", Sources()))
    assert two.keys() == {identity(job) for job in in_order(declared.jobs())}
    for name, row in two.items():
        if row["job"]["kind"] == "classifier":
            assert row["values"]["correct_bits"] == one[name]["values"]["correct_bits"]
    ends = {kind: [r["finished"] for r in two.values() if (r["job"]["kind"] == "race") == kind]
            for kind in (True, False)}  # fmt: skip
    assert min(ends[True]) >= max(ends[False])
    logs = [(tmp_path / "two" / "work" / f"process-{n}.log").read_text() for n in range(2)]
    assert all("race-" not in log for log in logs)
    assert any("running classifier-" in log for log in logs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "0"], "processes is 0, but must be at least 1"),
        (["--processes", "2", "--devices", "2"], "give one of them"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["table", "lora", "--output", str(tmp_path / "out"), *options]) != 0
    assert message in capsys.readouterr().err

"""Benchmarks: each is cited beside its results, has help, and writes rows and a table."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from reproduction.benchmarks import recording

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    path.stem
    for path in (ROOT / "reproduction/benchmarks").glob("*.py")
    if "__main__" in path.read_text()
)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_is_cited_and_has_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [p for folder in ("docs", "results") for p in (ROOT / folder).rglob("*.md")]
    assert any(f"reproduction.benchmarks.{name}" in page.read_text() for page in pages)
    module = importlib.import_module(f"reproduction.benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    assert f"python -m reproduction.benchmarks.{name}" in capsys.readouterr().out


def test_rows_and_their_table_are_written_side_by_side(tmp_path: Path) -> None:
    recording.write_page(
        tmp_path / "new" / "speed",
        title="Speed",
        command="python -m x",
        about={"seed": 0},
        columns={"model": "model", "ms": "ms"},
        rows=[{"model": "vit", "ms": 1.234, "more": 1}],
    )
    kept = json.loads((tmp_path / "new/speed.json").read_text())
    assert kept["rows"] == [{"model": "vit", "ms": 1.234, "more": 1}]
    assert kept["environment"]["packages"]["torch"]
    assert "| vit | 1.23 |" in (tmp_path / "new/speed.md").read_text()

"""Benchmarks: each is cited beside its results, has help, and writes rows and a table."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from reproduction.benchmarks import recording, training_parity

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


def test_networks_that_train_for_one_epoch_merge_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--epochs 1 --families vit --images 16 --val-images 16 --batch-size 8 --device cpu"
    monkeypatch.setattr(sys, "argv", ["", "--output", str(tmp_path), *words.split()])
    training_parity.main()
    assert "failed" not in capsys.readouterr().out
    rows = json.loads((tmp_path / "training_parity.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["none", "ltm"]
    assert rows[1]["mac_share"] == pytest.approx(0.7, abs=0.05)
    assert f"| {rows[1]['mac_share']:.3f} | 1 |" in (tmp_path / "training_parity.md").read_text()


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

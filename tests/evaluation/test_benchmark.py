"""`ltm.benchmark` from Python: networks of one's own, rows, and files."""

import json
from pathlib import Path

import pytest

import ltm
from evaluation_worker import small_vit


def test_networks_are_timed_against_themselves(tmp_path: Path) -> None:
    merging = small_vit()
    ltm.merge_tokens_(merging, ltm.ToMe(ratio=0.9))
    quick = ltm.BenchmarkSettings(batch_sizes=("1,2",), rounds=2, warmup=0, ratio=0.9)
    lines: list[str] = []
    result = ltm.benchmark([small_vit(), merging], "tome", quick, say=lines.append)
    found = [(row.batch_size, row.method) for row in result.rows]
    assert found == [(1, "base"), (1, "tome"), (2, "base"), (2, "tome")] + [
        (size, method) for size in (1, 2) for method in ("base", "saved")
    ]
    assert repr(result).count("images/s") == 8
    assert any("tome 0.9" in line for line in lines)
    result.save(tmp_path)
    assert len(json.loads((tmp_path / "metrics.json").read_text())["rows"]) == 8
    assert "### vit_" in (tmp_path / "table.md").read_text()


def test_methods_are_values_or_words() -> None:
    given = [ltm.ToMe(ratio=0.8), "tofu", ltm.LTM(ratio=0.9, weights="uniform"), ltm.ToMe()]
    result = ltm.benchmark(small_vit(), given, batch_sizes=1, rounds=1, warmup=0, ratio=0.8)
    assert [(row.method, row.ratio) for row in result.rows] == [
        ("base", None),
        ("tome", 0.8),
        ("tofu", 0.8),
        ("ltm:ratio=0.9,weights=uniform", 0.9),
        ("tome:ratio=0.7", 0.7),
    ]
    assert len(ltm.benchmark(small_vit(), ltm.ToMe(), batch_sizes=1, rounds=1).rows) == 2


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="modes: warp is not known; choose from eager"):
        ltm.benchmark(small_vit(), modes="warp")
    with pytest.raises(ValueError, match="models: there is none"):
        ltm.benchmark([])

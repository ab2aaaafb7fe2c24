"""`ltm benchmark` on a network too small to matter: rows, resuming, and its manners."""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ltm
from ltm.cli import main
from ltm.evaluation import benchmark, latency
from ltm.evaluation.benchmark import (  # pyright: ignore[reportPrivateUsage]
    _Candidates,
    _few_threads,
    _merging_candidate,
    _Run,
)
from ltm.evaluation.latency import TimingLock
from ltm.models import ModelSource

pytestmark = pytest.mark.slow

SMALL = ["--model-args", "depth=3", "embed_dim=24", "num_heads=2", "num_classes=4"]
QUICK = ["--models", "test_vit", "--image-size", "96", "--rounds", "2", "--warmup", "1", *SMALL]


def rows_of(output: Path) -> list[dict[str, Any]]:
    return json.loads((output / "metrics.json").read_text())["rows"]


def test_all_methods_race_the_untouched_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ["tome", "tofu", "ltmp", "ltm", "ltm-static", "tome-reference", "ltm:ratio=0.9"]
    options = ["--methods", ",".join(methods), "--ratio", "0.85", "--batch-sizes", "1,3"]
    assert main(["benchmark", *QUICK, *options, "--output", str(tmp_path)]) == 0
    rows = rows_of(tmp_path)
    for batch_size in (1, 3):
        found = [row for row in rows if row["batch_size"] == batch_size]
        assert [row["method"] for row in found] == ["base", *methods]
        assert all(row["milliseconds"] > 0 and row["verdict"] for row in found)
        base = found[0]
        assert base["speedup"] == 1
        for row in found[1:]:
            ratio = 0.9 if row["method"] == "ltm:ratio=0.9" else 0.85
            assert row["ratio"] == ratio
            assert (ratio - 0.1) * base["gmacs"] < row["gmacs"] <= (ratio + 0.021) * base["gmacs"]
    text = capsys.readouterr().out
    assert f"{len(rows)} rows are in" in text
    assert "images/s" in text
    table = (tmp_path / "table.md").read_text()
    assert "### test_vit at 96x96, fp32, model" in table
    assert "tome-reference 0.85" in table
    assert "padded to the longest image" in table


def test_a_grid_is_gathered_over_several_runs_each_with_its_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def go(*options: str) -> int:
        args = ["benchmark", *QUICK, "--ratio", "0.85", "--output", str(tmp_path), *options]
        return main(args)

    assert go("--methods", "tome", "--batch-sizes", "2") == 0
    assert go("--methods", "tome", "--batch-sizes", "2") == 2
    assert "use --resume to add to them, or --overwrite" in capsys.readouterr().err
    assert go("--methods", "tome", "--resume", "--overwrite") == 2
    assert "give --output and no --overwrite" in capsys.readouterr().err
    assert go("--methods", "tome,tofu", "--batch-sizes", "2,3", "--resume") == 0
    assert [(row["run"], row["batch_size"], row["method"]) for row in rows_of(tmp_path)] == [
        (1, 2, "base"),
        (1, 2, "tome"),
        (2, 2, "base"),
        (2, 2, "tofu"),
        (2, 3, "base"),
        (2, 3, "tome"),
        (2, 3, "tofu"),
    ]
    capsys.readouterr()
    assert go("--methods", "tome,tofu", "--batch-sizes", "2,3", "--resume") == 0
    assert capsys.readouterr().out.count("measured before") == 2
    assert len(rows_of(tmp_path)) == 7
    assert go("--methods", "tome", "--batch-sizes", "1", "--overwrite") == 0
    assert len(rows_of(tmp_path)) == 2


def test_scopes_and_what_cannot_run(tmp_path: Path) -> None:
    options = ["--methods", "tome,ltm", "--ratio", "0.85", "--batch-sizes", "2"]
    options += ["--scopes", "end-to-end", "training", "--modes", "eager,cudagraph"]
    options += ["--data", "shapes:classes=4,size=32,val_images=9", "--workers", "0"]
    assert main(["benchmark", *QUICK, *options, "--output", str(tmp_path)]) == 0
    rows = rows_of(tmp_path)
    assert {(row["scope"], row["mode"]) for row in rows} == {
        (scope, mode) for scope in ("end-to-end", "training") for mode in ("eager", "cudagraph")
    }
    for row in rows:
        if row["mode"] == "eager":
            assert row["milliseconds"] > 0
        else:
            assert row["error"]
            assert row["verdict"] == "did not run"


def test_a_method_that_cannot_be_made_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    options = ["--methods", "tome,ltm", "--ratio", "0.66", "--batch-sizes", "1"]
    assert main(["benchmark", *QUICK, *options, "--output", str(tmp_path)]) == 0
    by_name = {row["method"]: row for row in rows_of(tmp_path)}
    assert "cannot go below" in by_name["ltm"]["error"]
    assert by_name["tome"]["milliseconds"] > 0


def test_a_saved_run_races_itself_without_merging(tmp_path: Path) -> None:
    model = ModelSource(model="test_vit").load(untrained=True)
    ltm.merge_tokens_(model, ltm.ToMe(ratio=0.8))
    ltm.save(model, tmp_path / "run")
    args = ["benchmark", "--run", str(tmp_path / "run"), "--rounds", "2", "--batch-sizes", "1"]
    assert main([*args, "--output", str(tmp_path / "out")]) == 0
    base, saved = rows_of(tmp_path / "out")
    assert (base["method"], saved["method"]) == ("base", "saved")
    assert saved["gmacs"] < 0.81 * base["gmacs"]


def test_a_run_on_a_gpu_leaves_the_processor_to_others() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        with _few_threads(torch.device("cpu")):
            assert torch.get_num_threads() == 4
        with _few_threads(torch.device("cuda")):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_runs_that_begin_at_once_keep_each_others_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = _Run.compare
    options = ["--methods", "tome", "--ratio", "0.85", "--output", str(tmp_path)]

    def meanwhile(self: _Run, *args: Any) -> None:
        monkeypatch.setattr(_Run, "compare", results)
        assert main(["benchmark", *QUICK, *options, "--batch-sizes", "1"]) == 0
        self.compare(*args)

    monkeypatch.setattr(_Run, "compare", meanwhile)
    assert main(["benchmark", *QUICK, *options, "--batch-sizes", "2"]) == 0
    found = [(row["run"], row["batch_size"], row["method"]) for row in rows_of(tmp_path)]
    assert found == [(1, 1, "base"), (1, 1, "tome"), (2, 2, "base"), (2, 2, "tome")]


def test_wrong_names_are_found_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--models", "test_vit,vit_smal_patch16_224", "--output", str(tmp_path / "out")]
    assert main(["benchmark", *options]) == 2
    assert "vit_small_patch16_224" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_where_nothing_could_run_the_command_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--methods", "ltm:ratio=0.05", "--batch-sizes", "1", "--output", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(["benchmark", *QUICK, *options])
    assert ended.value.code == 1
    (row,) = rows_of(tmp_path)
    assert row["ratio"] == 0.05
    assert "ratio: got 0.05" in row["error"]
    assert row["error"] in capsys.readouterr().out


def test_networks_are_made_while_nobody_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, seen = ["idle"], []

    def staged(name: str) -> Any:
        @contextmanager
        def stage(_: object) -> Any:
            stages.append(name)
            yield
            stages.pop()

        return stage

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, stages[-1]))
            return function(*args, **kwargs)

        return call

    for name in ("preparing", "timing"):
        monkeypatch.setattr(TimingLock, name, staged(name))
    monkeypatch.setattr(benchmark, "_Candidates", noted("placed", _Candidates))
    converted = noted("converted", _merging_candidate)
    monkeypatch.setattr(benchmark, "_merging_candidate", converted)
    monkeypatch.setattr(latency, "interleaved", noted("timed", latency.interleaved))
    options = ["--methods", "ltm", "--ratio", "0.85", "--batch-sizes", "1"]
    assert main(["benchmark", *QUICK, *options]) == 0
    assert seen == [("placed", "preparing"), ("converted", "preparing"), ("timed", "timing")]


def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    races = []
    race = _Run.compare

    def interrupted(self: _Run, *args: Any) -> None:
        races.append(args)
        if len(races) == 2:
            raise KeyboardInterrupt
        race(self, *args)

    monkeypatch.setattr(_Run, "compare", interrupted)
    args = ["benchmark", *QUICK, "--methods", "tome", "--ratio", "0.85", "--output", str(tmp_path)]
    assert main(args) == 130
    said = capsys.readouterr().out
    assert "interrupted; 2 rows are in" in said
    assert said.count("rows are in") == 1
    assert len(rows_of(tmp_path)) == 2
    assert (tmp_path / "table.md").is_file()


def test_an_interrupt_before_the_first_row_names_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_Run, "compare", interrupted)
    assert main(["benchmark", *QUICK, "--methods", "tome", "--output", str(tmp_path)]) == 130
    said = capsys.readouterr().out
    assert "interrupted; nothing was measured yet" in said
    assert "metrics.json" not in said


def test_no_race_starts_after_the_time_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["benchmark", *QUICK, "--methods", "tome", "--minutes", "0", "--output", str(tmp_path)]
    assert main(args) == 0
    assert "--resume measures the rest" in capsys.readouterr().out
    assert not (tmp_path / "metrics.json").exists()


SWIN = "swin_tiny_patch4_window7_224"
TOO_ODD = ["--image-size", "230", "--rounds", "2", "--warmup", "1", "--batch-sizes", "1"]


def test_a_size_that_the_only_model_cannot_run_on_is_one_sentence_and_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["benchmark", "--models", SWIN, *TOO_ODD]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ltm benchmark: --image-size is 230: it must be a multiple of 4")
    assert error.count("\n") == 1


def test_a_size_that_one_of_several_models_cannot_run_on_is_a_row(tmp_path: Path) -> None:
    options = [
        "--models",
        f"{SWIN},mobilevit_xxs",
        "--methods",
        "tome",
        "--ratio",
        "0.85",
        *TOO_ODD,
    ]
    assert main(["benchmark", *options, "--output", str(tmp_path)]) == 0
    refused, *raced = rows_of(tmp_path)
    assert (refused["model"], refused["method"], refused["verdict"]) == (
        SWIN,
        "base",
        "did not run",
    )
    assert "--image-size is 230: it must be a multiple of 4" in refused["error"]
    assert [(row["model"], row["method"]) for row in raced] == [
        ("mobilevit_xxs", "base"),
        ("mobilevit_xxs", "tome"),
    ]
    assert all(row["milliseconds"] > 0 for row in raced)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--models", "test_vot"], "model test_vot is not known to timm"),
        (["--methods", "tomee"], "method tomee is not known: choose from ltm, ltmp"),
        (["--methods", "tom-reference"], "ltm-static, ltm-uniform, tome-reference"),
        (["--modes", "warp"], "modes: warp is not known; choose from eager, compiled"),
        (["--dtypes", "int3"], "dtypes: int3 is not known"),
        (["--batch-sizes", "1,zero"], "batch_sizes is zero, but must be a whole number"),
        (["--scopes", "end-to-end"], "needs images: give --data"),
        (["--data", "nowhere", "--scopes", "end-to-end"], "no data at nowhere"),
        (["--weights", "nowhere.pth"], "nowhere.pth: there is no such file"),
        (["--output", "/proc/ltm"], "/proc/ltm cannot be written to"),
        (["--rounds", "0"], "rounds is 0, but must be at least 1"),
        (["--warmup", "-3"], "warmup is -3, but must be at least 0"),
        (["--batch-sizes"], "batch_sizes: there is none; give at least one"),
        (["--models"], "models: there is none; give at least one"),
        (["--methods"], "methods: there is none; give at least one"),
        (["--minutes", "-1"], "minutes is -1.0, but must be at least 0"),
        (["--run", "nowhere"], "--models: a saved run has its own; leave it out"),
    ],
)
def test_bad_input_is_one_sentence_and_2(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    assert main(["benchmark", *QUICK, *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.startswith("ltm benchmark: ")
    assert error.count("\n") == 1

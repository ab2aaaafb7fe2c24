"""All tables at scale smoke: run once, by two processes at the same time."""

import csv
import json
import math
import re
from functools import cache
from pathlib import Path
from statistics import median

import pytest
import torch
from rich.console import Console

from ltm.api import conversion_of, is_merging
from ltm.cli import main
from reproduction.jobs import Classifier, Race, identity, in_order
from reproduction.rows import Store, read_lines
from reproduction.running.context import Context, perform
from reproduction.running.networks import local_settings, saved_network
from reproduction.running.training import last_network
from reproduction.scales import make_scale
from reproduction.scales.base import Sources
from reproduction.tables import EXPERIMENTS

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

SCALE = make_scale("smoke", Sources())


def cells(smoke: Path, name: str) -> list[dict[str, str]]:
    with (smoke / name / "table.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def rows_of(smoke: Path) -> dict[str, dict]:
    return read_lines(smoke / "rows.jsonl")


def values_of(smoke: Path, job: str) -> dict:
    return rows_of(smoke)[job]["values"]


def all_jobs() -> list[str]:
    jobs = [job for made in EXPERIMENTS.values() for job in made.declare(SCALE).jobs()]
    return [identity(job) for job in in_order(jobs)]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_table_is_complete(smoke: Path, name: str) -> None:
    found = cells(smoke, name)
    declared = EXPERIMENTS[name].declare(SCALE)
    assert len(found) == sum(len(row.cells) for row in declared.rows) > 0
    assert [cell for cell in found if cell["problem"]] == []
    assert all(math.isfinite(float(cell["value"])) for cell in found)
    text = (smoke / name / "table.md").read_text()
    assert all(f"| {row.label} |" in text for row in declared.rows)
    pictures = {f"{picture.name}.png" for picture in declared.pictures}
    assert {path.name for path in (smoke / name).glob("*.png")} == pictures


def test_two_processes_shared_the_work_and_repeated_nothing(smoke: Path) -> None:
    said = [(smoke.parent / f"smoke-tables-{number}.txt").read_text() for number in range(2)]
    ran = [re.findall(r"^running (\S+)", text, re.MULTILINE) for text in said]
    assert sorted(ran[0] + ran[1]) == sorted(all_jobs())
    assert all(ran)
    assert rows_of(smoke).keys() == set(all_jobs())


def test_numbers_follow_from_the_raw_values(smoke: Path) -> None:
    """By other ways than the package's own: counts, medians, differences."""
    seen = set()
    for name in EXPERIMENTS:
        for cell in cells(smoke, name):
            raw = values_of(smoke, cell["jobs"].split()[0])
            expected = recomputed(cell, raw)
            if expected is not None:
                seen.add(cell["column"].split(" ")[0])
                assert float(cell["value"]) == pytest.approx(expected, rel=1e-9, abs=1e-12), cell
    assert {"top-1", "params", "GMACs", "mAP", "IB", "fine-tuned", "test"} <= seen


def recomputed(cell: dict[str, str], raw: dict) -> float | None:
    column = cell["column"]
    if "correct" in raw and (
        column.startswith("top-1") or column in ("fine-tuned", "from scratch")
    ):
        return 100 * raw["correct"] / raw["num_images"]
    simple = {
        "params (M)": lambda: raw["parameters"] / 1e6,
        "GMACs": lambda: None if "mac_share" in raw else raw["macs"] / 1e9,
        "test loss": lambda: raw["loss"],
        "mAP": lambda: 100 * raw["box"]["ap"],
        "mask AP50": lambda: 100 * raw["mask"]["ap50"],
    }
    if column in simple:
        return simple[column]()
    if column.startswith("IB loss @"):
        return max(raw["blocks"], key=lambda block: block["block"])["loss"]
    if column.startswith("batch "):
        return None if "LTM" in cell["row"] or "To" in cell["row"] else (
            raw["batch_size"] / median(raw["seconds"]["none"])
        )  # fmt: skip
    return None


def test_a_second_call_runs_nothing(smoke: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (smoke / "rows.jsonl").read_bytes()
    assert (
        main(["table", "all", "--scale", "smoke", "--output", str(smoke), "--device", "cpu"]) == 0
    )
    assert f"0 rows run, {len(all_jobs())} there already" in capsys.readouterr().out
    assert (smoke / "rows.jsonl").read_bytes() == before


def test_rows_say_what_made_them_and_no_folder_of_this_machine(smoke: Path) -> None:
    for row in rows_of(smoke).values():
        assert row["environment"]["packages"]["torch"]
        assert row["seconds"] >= 0
        assert str(smoke.parent) not in json.dumps(row)


def test_bottleneck_keeps_its_bound(smoke: Path) -> None:
    names = [name for name in rows_of(smoke) if name.startswith("bottleneck")]
    blocks = [block for name in names for block in values_of(smoke, name)["blocks"]]
    assert blocks
    assert all(b["loss"] <= b["bound"] - b["c0"] + 1e-6 for b in blocks)


def test_the_paper_beside_ours(smoke: Path, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("# Results\n\nWords.\n")
    arguments = [
        "table",
        "beside",
        "--scale",
        "smoke",
        "--output",
        str(smoke),
        "--readme",
        str(page),
    ]
    assert main(arguments) == 0
    text = page.read_text()
    assert text.startswith("# Results\n\nWords.\n")
    assert all(f"(`{name}`)" in text for name in EXPERIMENTS)
    assert "83.74" in text, "the paper's own numbers"
    assert "say nothing about the paper" in text
    assert "Rows of the paper that this scale does not have: MobileViT-XS, " in text
    assert main(arguments) == 0
    assert page.read_text() == text, "written again, not added"


def trained(smoke: Path) -> list[tuple[Classifier, dict]]:
    jobs = [job for made in EXPERIMENTS.values() for job in made.declare(SCALE).jobs()]
    chosen = [job for job in in_order(jobs) if isinstance(job, Classifier) and job.trains]
    return [(job, values_of(smoke, identity(job))) for job in chosen]


def test_accuracy_is_what_training_saw_after_its_last_epoch(smoke: Path) -> None:
    """LTMP apart, whose thresholds are set afterwards."""
    seen = [(j, v) for j, v in trained(smoke) if j.settings.merge.method != "ltmp"]
    assert len(seen) > 10
    for _, values in seen:
        assert values["history"][-1]["val_top1"] * values["num_images"] == values["correct"]


def test_networks_race_as_they_would_be_deployed(
    smoke: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def eager(model, _images):
        seen.append(conversion_of(model).frozen if is_merging(model) else None)
        return model

    monkeypatch.setattr("reproduction.running.measuring.MODES", {"eager": eager})
    job = next(j for j in EXPERIMENTS["throughput"].declare(SCALE).jobs() if isinstance(j, Race))
    context = Context(store=Store(smoke), device=torch.device("cpu"), console=Console(quiet=True))
    times = perform(job, context)["seconds"]
    assert seen == [None, True, True, True, True, True]
    assert list(times) == ["none", "tome", "tofu", "learned", "matched", "static"]


@pytest.mark.parametrize("kind", ["ltm", "ltmp", "lora"])
def test_the_kept_network_can_be_made_again_from_its_run(smoke: Path, kind: str) -> None:
    """As after training in several processes, which leave checkpoints and no network here."""
    context = Context(store=Store(smoke), device=torch.device("cpu"), console=Console(quiet=True))
    job = next(job for job, _ in trained(smoke) if _kind(job) == kind)
    settings = local_settings(job, context)
    made, _ = last_network(settings, context.work(job) / "run", 4, None)
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(made(images), saved_network(job, context)(images))


def _kind(job: Classifier) -> str:
    if job.settings.tune.lora_rank:
        return "lora"
    tunes = job.settings.tune.trainable == "mergers" and job.settings.data.image_size == 32
    return job.settings.merge.method if tunes else "other"

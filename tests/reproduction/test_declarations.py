"""Declared data: names, identities, the paper's numbers, statistics, verdicts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import timm
from PIL import Image
from torch import nn

from ltm.api import conversion_of
from ltm.cli import main
from ltm.detection.settings import DetectionSettings
from ltm.training.network import build
from reproduction.comparison import beside, judge, write_section
from reproduction.estimates import Reader, estimate
from reproduction.jobs import Classifier, Detector, _plain, identity, resolved
from reproduction.measures import MEASURES, correct_flags
from reproduction.paper_numbers import paper_numbers
from reproduction.running.context import Context, perform
from reproduction.running.networks import _Remembered, layer_counts, local_settings
from reproduction.running.training import pack_bits
from reproduction.scales import make_scale, remembered
from reproduction.scales.base import Sources
from reproduction.tables import EXPERIMENTS
from reproduction.tables.base import Cell, Claim, Column, Row, Table
from reproduction.tables.shared_jobs import base, converted, tuned

SOURCES = Sources(
    data="/data/tiny-imagenet.zip", imagenet="/data/imagenet", weights="/data/vit.safetensors"
)
SMALL = make_scale("small", SOURCES)


def test_list_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said and made.item in said for name, made in EXPERIMENTS.items())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["finetunes"], "did you mean finetune"),
        (["finetune", "--scale", "small"], "needs --data"),
        (["finetune", "--scale", "paper"], "needs --data"),
        (["finetune", "--scale", "small", "--imagenet", "nowhere"], "no data at nowhere"),
        (["finetune", "--minutes", "0"], "minutes is 0"),
        (["finetune", "--seeds", "0"], "seeds is 0"),
        (["finetune", "--devices", "0"], "devices is 0"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", *arguments, "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("scale", ["paper", "small", "smoke"])
def test_every_experiment_is_declared_at_every_scale(scale: str) -> None:
    made = make_scale(scale, SOURCES)
    for name, experiment in EXPERIMENTS.items():
        table = experiment.declare(made)
        columns = {column.name for column in table.columns}
        assert table.jobs()
        assert table.claims
        assert {cell.measure for row in table.rows for cell in row.cells.values()} <= set(MEASURES)
        assert all(set(row.cells) <= columns for row in table.rows)
        labels = [row.label for row in table.rows]
        assert len(labels) == len(set(labels))
        for claim in table.claims:
            assert {claim.row, claim.other} <= set(labels), (name, claim)
            assert {claim.column, claim.other_column or claim.column} <= columns
            assert claim.row != claim.other or claim.other_column is not None


def test_at_the_papers_scale_every_printed_row_but_two_is_run() -> None:
    made = make_scale("paper", SOURCES)
    left_out = []
    for name, experiment in EXPERIMENTS.items():
        ours = {row.paper_label for row in experiment.declare(made).rows}
        left_out += [row for row in paper_numbers(name) if row not in ours]
    assert left_out == ["YoloV5-N 640", "Vidt"], "cited there, and no part of this project"


def test_comparisons_have_three_seeds() -> None:
    table = EXPERIMENTS["finetune"].declare(SMALL)
    row = next(row for row in table.rows if row.label == "LTM (matched)-MobileViT-XS")
    assert len(row.cells["top-1 @4"].jobs) == 3


def test_notes_say_what_a_table_is_about() -> None:
    notes = {name: " ".join(made.declare(SMALL).notes) for name, made in EXPERIMENTS.items()}
    shares = "ViT-Ti 0.7 and 0.75; MobileViT-XS 0.743 and 0.771 (ToMe, ToFu), 0.8 (LTMP)."
    assert shares in notes["finetune"]
    tuned_tables = ("finetune", "sweep", "ib-finetune", "layers", "lora")
    assert all("Training images in an epoch" in notes[name] for name in tuned_tables)
    assert "1,000 (ViT-Ti), 10,000 (MobileViT-XS)." in notes["finetune"]
    assert "ViT-Ti after 1 epoch, from scratch ViT-Ti/8; GMACs are ViT-Ti's" in notes["sweep"]
    assert "LTMP is fine-tuned for 4 epochs; in Table 2 for 1 epoch." in notes["ib-scratch"]


@pytest.mark.parametrize("scale", ["paper", "small", "smoke"])
def test_every_row_of_ltm_says_which(scale: str) -> None:
    """The paper's learned mask, or our matching; all tables but a few have both."""
    made = make_scale(scale, SOURCES)
    for name, experiment in EXPERIMENTS.items():
        labels = [row.label for row in experiment.declare(made).rows]
        ours = [label for label in labels if label.startswith("LTM") and "LTMP" not in label]
        forms = [label.partition(" (")[2].partition(")")[0].partition(",")[0] for label in ours]
        assert set(forms) == ({"learned mask"} if name == "heatmaps" else _FORMS), name


_FORMS = {"learned mask", "matched"}


def test_the_original_trains_as_long_as_what_it_is_compared_with() -> None:
    table = EXPERIMENTS["finetune"].declare(SMALL)
    jobs = [row.cells["top-1 @4"].jobs for row in table.rows if row.label.endswith("all trained")]
    assert len(jobs) == 6
    settings = [job.settings for part in jobs for job in part]
    for network in {s.model.name for s in settings}:
        same = [s for s in settings if s.model.name == network]
        assert len(same) == 9
        assert len({(s.optim.epochs, s.optim.lr, s.data.epoch_images) for s in same}) == 1


def test_rows_of_the_first_network_come_first() -> None:
    jobs = [job for name in EXPERIMENTS for job in EXPERIMENTS[name].declare(SMALL).jobs()]
    ordered = SMALL.in_turn(jobs)
    assert len(ordered) == len(jobs)
    assert SMALL.turn(base(SMALL.finetune[0], 0)) == 0 == SMALL.turn(ordered[0])
    assert isinstance(ordered[-1], Detector)
    few = SMALL.in_turn(jobs, ["ViT-Ti/8"])
    assert {SMALL.turn(job) for job in few} == {1}
    with pytest.raises(ValueError, match="networks: got 'ViT'; it must be one of ViT-Ti, "):
        SMALL.in_turn(jobs, ["ViT"])


def test_beside_has_the_notes_and_the_papers_numbers(context: Context) -> None:
    names = ("sweep", "layers")
    tables = {name: EXPERIMENTS[name].declare(SMALL) for name in names}
    assert "No row has been run of: Table 5 (`sweep`), Table 8 (`layers`)." in beside(
        [(EXPERIMENTS[n], tables[n]) for n in names], context.store, "small"
    )
    for table in tables.values():
        context.store.finish(table.jobs()[0], {"values": {"parameters": 1.0}})
    section = beside([(EXPERIMENTS[n], tables[n]) for n in names], context.store, "small")
    sweep, layers = section.split("### Table 8")
    for part, name in ((sweep, "sweep"), (layers, "layers")):
        claims, _, rest = part.partition("not tested: not run |\n\n")
        assert claims
        assert all(note in rest for note in tables[name].notes)
    assert "84.46" in sweep, "the paper's own numbers"
    assert "that this scale does not have: LTM r=0.95" in sweep
    assert "| layer 9 | LTM (matched), layer 9 |" in layers


def test_tables_share_jobs() -> None:
    jobs = {n: {identity(j) for j in EXPERIMENTS[n].declare(SMALL).jobs()} for n in EXPERIMENTS}
    network = SMALL.finetune[1]
    shared = identity(base(network, 0))
    assert all(shared in jobs[name] for name in ("finetune", "scratch", "ib-finetune", "losses"))


def test_identity_is_what_is_run_not_where() -> None:
    job = tuned(SMALL.finetune[0], "matched", 0.7, 5, 1)
    elsewhere = make_scale(
        "small",
        Sources(data="/o/tiny-imagenet.zip", imagenet="/o/imagenet", weights="/w/vit.safetensors"),
    )
    assert identity(tuned(elsewhere.finetune[0], "matched", 0.7, 5, 1)) == identity(job)
    moved = replace(job.settings, run=replace(job.settings.run, device="cuda", devices=4))
    assert identity(replace(job, settings=moved)) == identity(job)
    assert identity(tuned(SMALL.finetune[0], "matched", 0.7, 5, 2)) != identity(job)
    assert identity(tuned(SMALL.finetune[0], "matched", 0.65, 5, 1)) != identity(job)
    assert "/" not in json.dumps(resolved(base(SMALL.finetune[0], 0)))


def test_a_new_setting_renames_nothing_and_a_new_default_is_noticed(context: Context) -> None:
    job = tuned(SMALL.finetune[0], "matched", 0.7, 5, 1)
    kept = json.loads(json.dumps(resolved(job)))
    del kept["settings"]["optim"]["ema"], kept["start"]["settings"]["run"]["seed"]
    context.store.finish(job, {"job": kept, "values": {"parameters": 1.0}})
    assert context.store.values(job) == {"parameters": 1.0}, "it was made before ema was a setting"
    kept["start"]["settings"]["optim"]["momentum"] = 0.5
    context.store.finish(job, {"job": kept, "values": {"parameters": 1.0}})
    assert context.store.is_stale(job)
    assert context.store.values(job) is None, "the network it starts from would be another today"
    assert "momentum" not in json.dumps(_plain("", job, whole=False)), (
        "defaults are no part of the name"
    )


def test_names_of_the_data_are_remembered(context: Context) -> None:
    assert remembered(context.store, "small", SOURCES, runs=True) == SOURCES
    found = remembered(context.store, "small", Sources(), runs=False)
    assert found == Sources(
        data="tiny-imagenet.zip", imagenet="imagenet", weights="vit.safetensors"
    )
    networks = [make_scale("small", sources).finetune[0] for sources in (found, SOURCES)]
    assert identity(base(networks[0], 0)) == identity(base(networks[1], 0))


def test_bits_hold_every_image() -> None:
    import torch

    flags = [True, False, False, True, True, False, True]
    values = {"correct_bits": pack_bits(torch.tensor(flags)), "num_images": 7}
    assert correct_flags(values) == flags
    assert MEASURES["top1"](values, None) == pytest.approx(400 / 7)


def test_student_interval() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.reach == pytest.approx(4.303 / 3**0.5)
    assert estimate([5.0]).low is None


_LARGER = "direction confirmed, size not: 4.0 times the paper's"
_SMALLER = "direction confirmed, size not: less than a third of it"


@pytest.mark.parametrize(
    ("ours", "theirs", "paper", "verdict"),
    [
        ((5.0, 5.1, 5.2), (4.0, 4.1, 4.2), 1.0, "confirmed"),
        ((5.0, 5.1, 5.2), (1.0, 1.1, 1.2), 1.0, _LARGER),
        ((5.0, 5.1, 5.2), (4.8, 4.9, 5.0), 1.0, _SMALLER),
        ((1.0, 1.1, 1.2), (5.0, 5.1, 5.3), 1.0, "not confirmed: the opposite"),
        ((1.0, 5.0, 1.0), (2.0, 1.0, 4.0), 1.0, "not confirmed: no clear difference"),
        ((5.0,), (1.0,), 1.0, "seen in one run, not tested over seeds"),
        ((1.00001,), (1.0,), 1.0, "not seen in one run, not tested over seeds"),
        ((), (1.0, 2.0), 1.0, "not tested: not run"),
        ((4.9, 5.0, 5.1), (5.0, 5.1, 5.2), -0.5, "confirmed"),
        ((1.0, 1.1, 1.2), (5.0, 5.1, 5.3), -0.5, "not confirmed: the difference is larger"),
        ((4.0, 4.5, 5.0), (5.0, 5.0, 5.0), -0.5, "not confirmed: no clear difference"),
        ((4.8,), (5.0,), -0.5, "seen in one run, not tested over seeds"),
        ((4.0,), (5.0,), -0.5, "not seen in one run, not tested over seeds"),
    ],
)
def test_verdicts(ours: tuple, theirs: tuple, paper: float, verdict: str, context: Context) -> None:
    """Where the paper itself is below the other, no worse than that is what it claims."""
    jobs = {}
    for name, numbers in (("a", ours), ("b", theirs)):
        made = []
        for seed in range(max(1, len(numbers))):
            job = tuned(SMALL.finetune[0], "matched" if name == "a" else "ltmp", 0.7, 1, seed)
            made.append(job)
            if numbers:
                context.store.finish(job, {"values": {"parameters": 1e6 * numbers[seed]}})
        jobs[name] = Cell(jobs=tuple(made), measure="parameters")
    table = Table(
        columns=(Column(name="n", points=True),),
        rows=tuple(Row(label=name, cells={"n": cell}) for name, cell in jobs.items()),
    )
    claim = Claim(row="a", other="b", column="n", expected="higher", paper=paper)
    found = judge(table, claim, Reader(context.store))
    assert found.verdict == verdict
    assert found.paper == f"{paper:+.2f}"
    turned = Claim(row="b", other="a", column="n", expected="lower", paper=-paper)
    assert judge(table, turned, Reader(context.store)).verdict == verdict
    assert found.what == f"a is {'higher' if paper > 0 else 'at most 0.5 lower'} than b in n"


def test_differences_are_of_the_same_seed(context: Context) -> None:
    """A seed that is missing in one row takes no part; one published network stands for all."""
    network = SMALL.finetune[0]
    jobs = [[tuned(network, m, 0.7, 1, seed) for seed in range(3)] for m in ("matched", "ltmp")]
    numbers = {
        jobs[0][0]: 10.0,
        jobs[0][2]: 30.0,
        jobs[1][0]: 9.0,
        jobs[1][1]: 5.0,
        jobs[1][2]: 28.0,
    }
    for job, number in numbers.items():
        context.store.finish(job, {"values": {"parameters": 1e6 * number}})
    cells = [Cell(jobs=tuple(made), measure="parameters") for made in jobs]
    cells.append(Cell(jobs=(jobs[1][1],), measure="parameters"))
    table = Table(
        columns=(Column(name="n"),),
        rows=tuple(Row(label=n, cells={"n": c}) for n, c in zip("abc", cells, strict=True)),
    )
    for other, expected in (("b", (1.0, 2.0)), ("c", (5.0, 25.0))):
        claim = Claim(row="a", other=other, column="n", expected="higher")
        found = Reader(context.store).compare(table, claim).estimate
        assert found is not None
        assert found.values == expected


def test_a_page_without_an_end_mark_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- paper beside ours: begin -->\nwords\n")
    with pytest.raises(ValueError, match="add it, or remove both"):
        write_section(page, "section")


def vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2
    )


def test_one_layer_keeps_another_share() -> None:
    assert layer_counts(vit(), (32, 32), 0.5, 1, 0.9) == [8, 8, 4]
    grids = layer_counts(timm.create_model("efficientvit_b0"), (128, 128), 0.7, 0, 0.3)
    assert grids[0] == (5, 5), "8 x 8 tokens, sides by the root of 0.3"
    assert len(grids) == 4
    with pytest.raises(ValueError, match="sites 0 to 2"):
        layer_counts(vit(), (32, 32), 0.5, 3, 0.9)


def test_a_job_is_data() -> None:
    job = base(SMALL.finetune[1], 0)
    assert isinstance(job, Classifier)
    assert hash(job) == hash(base(SMALL.finetune[1], 0))


@pytest.mark.parametrize("task", ["detection", "segmentation"])
def test_no_epoch_of_a_detector_is_chosen_by_the_scores_that_are_reported(
    task: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[DetectionSettings] = []

    def stop(settings: DetectionSettings, *_: object, **__: object) -> None:
        seen.append(settings)
        raise InterruptedError

    monkeypatch.setattr("reproduction.running.training.train_detector", stop)
    table = EXPERIMENTS[task].declare(make_scale("paper", SOURCES))
    with pytest.raises(InterruptedError):
        perform(table.jobs()[0], context)
    assert seen[0].eval_every == seen[0].optim.epochs


def test_a_peer_at_ltms_sites_keeps_as_many_tokens(context: Context) -> None:
    network = make_scale("smoke", Sources()).sweep
    peer = replace(converted(network, "tome-same", 0.8, 0), start=None)
    ours = replace(converted(network, "matched", 0.8, 0), start=None)
    sites = []
    for job in (peer, ours):
        model = build(local_settings(job, context), 4).model
        sites.append([(s.block, s.num_out) for s in conversion_of(model).sites if s.merges])
    assert sites[0] == sites[1]


def test_images_that_fit_are_read_once() -> None:
    read: list[int] = []

    class Files:
        def __len__(self) -> int:
            return 2

        def name(self, index: int) -> str:
            return str(index)

        def read(self, index: int) -> Image.Image:
            read.append(index)
            return Image.new("RGB", (10, 10))

    images = _Remembered(Files(), num_bytes=300)
    for index in (0, 1, 0, 1):
        images.read(index)
    assert read == [0, 1, 1], "the second does not fit"


@pytest.mark.parametrize("seeds", [3, 1])
def test_one_seed_of_three_is_compared_image_by_image(context: Context, seeds: int) -> None:
    network = SMALL.finetune[0]
    jobs = [
        [tuned(network, method, 0.7, 1, seed) for seed in range(number)]
        for method, number in (("matched", 3), ("ltmp", seeds))
    ]
    bits = ("f" * 99 + "0", "f" * 50 + "0" * 50)
    for made, right in zip(jobs, bits, strict=True):
        context.store.finish(made[0], {"values": {"correct_bits": right, "num_images": 400}})
    cells = [Cell(jobs=tuple(made), measure="top1") for made in jobs]
    table = Table(
        columns=(Column(name="n"),),
        rows=tuple(Row(label=n, cells={"n": c}) for n, c in zip("ab", cells, strict=True)),
    )
    claim = Claim(row="a", other="b", column="n", expected="higher")
    found = Reader(context.store).compare(table, claim).estimate
    assert found is not None
    assert found.mean == pytest.approx(49.0)
    assert found.low is not None
    assert 40 < found.low < 49

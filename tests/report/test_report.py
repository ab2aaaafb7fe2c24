"""The report: honest sentences, nothing fetched, everything escaped."""

import dataclasses
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from ltm.evaluation.accuracy import PairedDifference
from ltm.evaluation.measurement import Measurement
from ltm.evaluation.records import percent, points
from ltm.report.comparison import BlockChange, Comparison, CurvePoint, Deployment, verdicts
from ltm.report.curves import (
    Point,
    accuracy_figure,
    bottleneck_figure,
    ratios_figure,
    tokens_figure,
)
from ltm.report.documents import (
    Illustration,
    curves,
    render_report,
    table_of,
    write_card,
    write_report,
)
from ltm.report.pictures import figure_bytes


class Page(HTMLParser):
    """Collects what a page asks a browser to load, and whether its tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "poster", "action"):
                self.addresses.append(value or "")
        if tag == "img":
            self.pictures.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(comparison: Comparison, tmp_path: Path) -> None:
    shown = Illustration(address="data:image/png;base64,YWJj", alt="a token", caption="One")
    text = write_report(comparison, tmp_path, [shown]).read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert all(address.startswith("data:") for address in page.addresses)
    assert not re.search(r"https?://|@import|url\(", text)
    assert "script" not in page.tags
    assert len(page.pictures) == 1 + len(curves(comparison))
    assert all(picture["alt"] for picture in page.pictures)
    assert "vit &lt;tiny&gt;" in text
    assert "width=device-width" in text


def test_every_cell_names_its_column_for_narrow_windows(comparison: Comparison) -> None:
    text = render_report(comparison)
    cells = re.findall(r"<td[^>]*>", text)
    assert cells
    assert all("data-label=" in cell for cell in cells)


def test_the_main_sentence_states_accuracy_and_cost(comparison: Comparison) -> None:
    assert verdicts(comparison)[0] == "LTM kept 74.10 of 74.20 top-1 at 0.70 of the multiply-adds."
    said = " ".join(verdicts(comparison))
    assert "too small to tell from chance" in said
    assert "PyTorch no gain at batch 1, 1.20x as fast at batch 8" in said
    assert "LTM against ToMe (73.10 at 0.70): +1.00 points" in said
    assert "LTM is better" in said
    assert "LTMP is not compared: it cannot reach 0.70." in said


def test_without_labels_the_sentences_speak_of_agreement(
    comparison: Comparison, tmp_path: Path
) -> None:
    given = dataclasses.replace(comparison, labelled=False)
    said = verdicts(given)
    assert said[0] == (
        "LTM predicts the same class as the original on 74.10% of 2,000 images, at 0.70 of the "
        "multiply-adds."
    )
    assert said[1].startswith("The images have no labels, so agreement with the original is")
    assert "LTM against ToMe (agreement 73.10 at 0.70): +1.00 points" in " ".join(said)
    header, base, ltm, _ = table_of(given)
    assert header[:3] == ["network", "agreement", "labels changed"]
    assert (base[1], ltm[1]) == ("", "74.10")
    card = write_card(given, tmp_path).read_text(encoding="utf-8")
    assert "model-index" not in yaml.safe_load(card.split("---\n")[1])
    for text in (card, render_report(given), *(shown.alt for shown in curves(given))):
        assert "top-1" not in text.lower()


@pytest.mark.parametrize(
    ("low", "high", "meaning"),
    [
        (-0.02, -0.01, "a real loss"),
        (0.001, 0.02, "a real gain"),
        (-0.01, 0.01, "too small to tell from chance"),
    ],
)
def test_a_difference_is_called_real_only_outside_chance(
    low: float, high: float, meaning: str, comparison: Comparison
) -> None:
    difference = PairedDifference(difference=(low + high) / 2, low=low, high=high, num_images=2000)
    changed = _with(comparison, "ltm", against_base=difference)
    assert meaning in verdicts(changed)[1]


def test_a_slower_network_a_missed_budget_and_few_images_are_admitted(
    comparison: Comparison,
) -> None:
    ltm = comparison.compressed
    assert ltm is not None
    assert ltm.accuracy is not None
    slow = dataclasses.replace(ltm.timings[0], speedup=0.8, speedup_interval=(0.7, 0.9))
    few = dataclasses.replace(ltm.accuracy, num_images=100, top1_interval=(0.65, 0.83))
    changed = _with(comparison, "ltm", timings=(slow,), share=0.74, accuracy=few)
    said = " ".join(verdicts(changed))
    assert "slower (0.80x) at batch 1" in said
    assert "The budget of 0.70 was missed: the network keeps 0.740 of the multiply-adds." in said
    assert "Only 100 images were evaluated: top-1 itself is uncertain by 9.0 points" in said


def test_an_original_at_chance_is_pointed_out(comparison: Comparison) -> None:
    told = "Check its weights"
    assert told not in " ".join(verdicts(dataclasses.replace(comparison, num_classes=100)))
    base = comparison.base
    assert base is not None
    assert base.accuracy is not None
    poor = dataclasses.replace(base.accuracy, top1=0.012, top1_interval=(0.008, 0.018))
    changed = dataclasses.replace(_with(comparison, "base", accuracy=poor), num_classes=100)
    said = " ".join(verdicts(changed))
    assert "The original has 1.20% top-1, which guessing among 100 classes reaches too." in said


def test_untrained_masks_are_pointed_out(comparison: Comparison) -> None:
    told = "nothing has trained them yet"
    assert told not in " ".join(verdicts(comparison))
    changed = dataclasses.replace(comparison, untrained=True)
    assert told in " ".join(verdicts(changed))
    assert told in render_report(changed)


@pytest.mark.parametrize(
    ("block", "before", "after", "said"),
    [
        (11, "79", "7", True),
        (11, "79", "70", False),
        (8, "79", "7", False),
        (11, "7 x 7", "2 x 2", False),
    ],
)
def test_patch_tokens_that_leave_in_the_last_block_are_pointed_out(
    block: int, before: str, after: str, said: bool, comparison: Comparison, tmp_path: Path
) -> None:
    last = BlockChange(block=block, before=before, after=after, how="pairs merge")
    changed = dataclasses.replace(comparison, blocks=(*comparison.blocks, last))
    told = "The last block keeps 7 of 79 patch tokens."
    assert (told in " ".join(verdicts(changed))) == said
    card = write_card(changed, tmp_path).read_text(encoding="utf-8")
    assert (told in card and told in render_report(changed)) == said


@pytest.mark.parametrize(("quartiles", "busy"), [((9.0, 14.0), True), ((9.9, 10.1), False)])
def test_times_of_a_busy_machine_are_pointed_out(
    quartiles: tuple[float, float], busy: bool, comparison: Comparison
) -> None:
    base = comparison.base
    assert base is not None
    timed = dataclasses.replace(base.timings[0], milliseconds=10.0, quartiles=quartiles)
    said = " ".join(verdicts(_with(comparison, "base", timings=(timed,))))
    assert ("The machine was busy with other work" in said) == busy


def test_a_timing_that_others_interrupted_is_pointed_out(comparison: Comparison) -> None:
    told = "The machine was busy with other work, so the times are unreliable."
    for rate in (20.0, 300.0):
        changed = dataclasses.replace(comparison, preemptions=rate)
        assert (told in " ".join(verdicts(changed))) == (rate > 100)


def test_a_stopped_run_says_so(comparison: Comparison) -> None:
    stopped = dataclasses.replace(comparison, interrupted="timing", networks=())
    assert verdicts(stopped)[-1].startswith("The run was stopped during timing")
    assert "This run was stopped during timing" in render_report(stopped)
    assert stopped.to_dict()["complete"] is False
    assert json.dumps(comparison.to_dict())


def test_the_table_leaves_out_what_nobody_measured(comparison: Comparison) -> None:
    header, *rows = table_of(comparison)
    assert header[0] == "network"
    assert [row[0] for row in rows] == ["original", "LTM", "ToMe"]
    assert header[-2:] == ["batch 1", "batch 8"]
    assert rows[1][1:] == [
        "74.10",
        "-0.10 (-0.60 to +0.40)",
        "140 (7.00%)",
        "0.840",
        "0.70",
        "no gain",
        "1.20x",
    ]
    untimed = dataclasses.replace(
        comparison,
        networks=tuple(dataclasses.replace(n, timings=()) for n in comparison.networks),
    )
    assert table_of(untimed)[0][-1] == "share"


def test_the_card_has_the_hubs_front_matter(comparison: Comparison, tmp_path: Path) -> None:
    text = write_card(comparison, tmp_path, origin={"base_model": "timm/vit", "license": "mit"})
    _, front, body = text.read_text(encoding="utf-8").split("---\n", 2)
    known = yaml.safe_load(front)
    assert known["library_name"] == "timm"
    assert known["base_model"] == "timm/vit"
    metric = known["model-index"][0]["results"][0]["metrics"][0]
    assert metric == {"type": "accuracy", "name": "top-1", "value": 74.1}
    assert "| LTM | 74.10 | 93.00 | 0.840 | 0.700 | 5.70 M |" in body
    assert "ltm.load(" in body


def test_the_card_names_files_without_the_folders_of_a_machine(
    comparison: Comparison, tmp_path: Path
) -> None:
    command = (
        "ltm compress --model vit --data '/home/me/my data/val' --weights /home/me/w.safetensors "
        "--method ltm:sites=1+2 --model-args file=/home/me/w.json --output runs/small"
    )
    given = dataclasses.replace(
        comparison,
        data="/home/me/my data/val/",
        command=command,
        left_out={"ltmp": "no data at /home/me/my data/val/train"},
    )
    text = write_card(given, tmp_path).read_text(encoding="utf-8")
    assert "/home" not in text
    assert (
        "ltm compress --model vit --data val --weights w.safetensors --method ltm:sites=1+2 "
        "--model-args file=w.json --output runs/small"
    ) in text
    assert "Data: val" in text
    assert yaml.safe_load(text.split("---\n")[1])["model-index"][0]["results"][0]["dataset"] == {
        "name": "val",
        "type": "val",
    }


def test_the_card_repeats_a_call_from_python(comparison: Comparison, tmp_path: Path) -> None:
    call = "ltm.compress('vit', '/home/me/my data/val', ratio=0.5, compare=('tome',))"
    given = dataclasses.replace(comparison, data="/home/me/my data/val", command=call)
    text = write_card(given, tmp_path).read_text(encoding="utf-8")
    assert "\n    ltm.compress('vit', 'val', ratio=0.5, compare=('tome',))\n" in text
    assert "/home" not in text


def test_what_gains_nothing_gets_a_reason_and_advice(comparison: Comparison) -> None:
    said = " ".join(verdicts(comparison))
    assert "No gain in PyTorch at batch 1: matching adds small operators" in said
    assert "What to do: use PyTorch at batch 8 (1.20x)." in said


def _deployed(comparison: Comparison, **goals: float) -> Comparison:
    deployed = Deployment(
        form="eager", batch_size=8, code="scores = 1", file="model.onnx",
        num_images=2000, num_changed=60, num_unlike=1,
    )  # fmt: skip
    return dataclasses.replace(comparison, deployment=deployed, **goals)


def test_the_form_to_run_is_told_with_its_code(comparison: Comparison, tmp_path: Path) -> None:
    given = _deployed(comparison)
    said = " ".join(verdicts(given))
    assert "Run it in PyTorch: 120 images per second at batch 8" in said
    assert (
        "On all 2,000 evaluated images, model.onnx predicts another label than the network on "
        "1 image, and another label than the original on 60 images (3.00%)."
    ) in said
    page = render_report(given)
    assert "<pre>scores = 1</pre>" in page
    assert "PyTorch (recommended)" in page
    assert "scores = 1" in write_card(given, tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("goals", "sentence"),
    [
        ({"goal_speedup": 1.2}, "The goal of 1.2x in PyTorch at batch 8 is met: 1.20x."),
        ({"goal_speedup": 1.23}, "is met: 1.20x."),
        ({"goal_speedup": 1.5}, "at batch 8 is missed by 20%: it came to 1.20x."),
        ({"goal_ms": 50.0}, "The goal of 50 ms in PyTorch at batch 8 is missed by 25%"),
        ({"goal_speedup": 1.17}, "is met: 1.20x."),
        ({"goal_speedup": 1.1}, "at batch 8 is exceeded by 9%: it came to 1.20x, so a larger"),
        ({"goal_ms": 80.0}, "at batch 8 is exceeded by 20%: it came to 66.67 ms, so a larger"),
    ],
)
def test_a_goal_is_met_within_3_per_cent_or_a_number_says_how_near_it_came(
    goals: dict[str, float], sentence: str, comparison: Comparison
) -> None:
    assert sentence in " ".join(verdicts(_deployed(comparison, **goals)))


def test_the_curve_is_drawn_and_the_choice_explained(comparison: Comparison) -> None:
    ltm = comparison.compressed
    assert ltm is not None
    tried = tuple(
        CurvePoint(
            ratio=ratio,
            share=ratio,
            loss=PairedDifference(difference=loss, low=-0.02, high=0.0, num_images=900),
            top1=0.74 + loss,
            num_changed=9,
            timing=dataclasses.replace(ltm.timings[1], speedup=1 / ratio),
            chosen=ratio == 0.7,
        )
        for ratio, loss in ((0.8, 0.0), (0.7, -0.004), (0.5, -0.03))
    )
    given = dataclasses.replace(comparison, curve=tried, max_loss=0.5)
    said = " ".join(verdicts(given))
    assert (
        "The ratio of 0.7 was chosen on 900 other images (-0.40 points there): the fastest of 3 "
        "within 0.5 points."
    ) in said
    assert len(curves(given)) == len(curves(comparison)) + 1
    assert "Ratios that were tried" in render_report(given)
    closest = dataclasses.replace(given, max_loss=0.1)
    assert "none of 3 is within 0.1 points, and this one loses least" in " ".join(verdicts(closest))


@pytest.mark.parametrize(
    ("share", "percentage", "difference"),
    [
        (0.7475, "74.75", "+74.75"),
        (0.00125, "0.13", "+0.13"),
        (-0.00004, "0.00", "0.00"),
        (0.0, "0.00", "0.00"),
    ],
)
def test_halves_are_rounded_up_and_zero_has_no_sign(
    share: float, percentage: str, difference: str
) -> None:
    assert percent(abs(share)) == percentage
    assert points(share) == difference


@pytest.mark.parametrize(
    "drawn",
    [
        # A bisection ends with ratios that are close together.
        [(0.8, -0.2, 0.7, False), (0.75, -0.45, 0.66, False), (0.74, -0.5, 0.62, True)],
        [(0.98, -0.02, 0.85, False), (0.985, -0.05, 0.7, False), (0.97, 0.0, 0.55, True)],
        [(1.01, 0.01, 0.85, False), (1.0, -0.01, 0.7, True), (0.99, 0.0, 0.55, False)],
    ],
)
def test_the_names_of_ratios_do_not_overlap(drawn: list[tuple[float, float, float, bool]]) -> None:
    axes = ratios_figure(drawn, 0.5, "PyTorch, batches of 1").axes[0]
    boxes = [text.get_window_extent() for text in axes.texts]
    assert {text.get_text() for text in axes.texts} == {"original", *(f"{d[2]:g}" for d in drawn)}
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    points = axes.transData.transform([(1.0, 0.0), *(d[:2] for d in drawn)])
    assert not any(box.contains(*point) for box in boxes for point in points)


def test_curves_show_every_network(comparison: Comparison) -> None:
    points = [
        Point(method=method, cost=cost, accuracy=0.5 + cost / 10)
        for method in ("base", "ltm", "ltm:support=learned")
        for cost in (1.0, 2.0)
    ]
    axes = accuracy_figure(points, "GMACs").axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["original", "LTM", "ltm:support=learned"]
    lines = tokens_figure({"base": {0: 64, 1: 64}, "ltm": {0: 64, 1: 30}}).axes[0].lines
    assert _heights(lines[1]) == [64, 30]
    sites = [site for n in comparison.networks for site in n.bottleneck]
    upper, lower = bottleneck_figure(sites).axes
    assert len(upper.lines) == len(lower.lines) == 3
    assert _heights(upper.lines[0]) == [0.0, -0.1]
    same = [figure_bytes(accuracy_figure(points, "GMACs"), "svg") for _ in range(2)]
    assert b"<svg" in same[0]


def _heights(line: Any) -> list[float]:
    return list(line.get_ydata())


def _with(comparison: Comparison, method: str, **changes: object) -> Comparison:
    def change(network: Measurement) -> Measurement:
        return dataclasses.replace(network, **changes) if network.method == method else network

    return dataclasses.replace(comparison, networks=tuple(map(change, comparison.networks)))

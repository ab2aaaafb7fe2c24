"""The report in a real browser: wide and narrow, light and dark."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browsing import contrast, ground, overlaps, running_browser
from ltm.evaluation.accuracy import PairedDifference
from ltm.report.comparison import Comparison, CurvePoint, Deployment
from ltm.report.documents import write_report

pytestmark = pytest.mark.slow

ELEMENTS = "h1, h2, p, li, pre, figure, tr, dt, dd"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as found:
        yield found


@pytest.fixture
def report(comparison: Comparison, tmp_path: Path) -> Path:
    """A report with a curve, a recommended form and its code."""
    ltm = comparison.compressed
    assert ltm is not None
    point = CurvePoint(
        ratio=0.7,
        share=0.7,
        loss=PairedDifference(difference=-0.004, low=-0.02, high=0.0, num_images=900),
        top1=0.736,
        num_changed=9,
        timing=ltm.timings[1],
        chosen=True,
    )
    milder = dataclasses.replace(point, ratio=0.85, share=0.85, chosen=False)
    code = 'scores = session.run(None, {"images": pixels.transpose(2, 0, 1)[None]})[0]\n' * 5
    given = dataclasses.replace(
        comparison,
        curve=(milder, point),
        max_loss=0.5,
        deployment=Deployment(form="eager", batch_size=8, code=code),
    )
    return write_report(given, tmp_path)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overlaps_scrolls_sideways_or_fades(
    browser: Any, report: Path, width: int, scheme: str
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(report.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert overlaps(page, ELEMENTS) == []
    assert (ground(page) < 0.1) == (scheme == "dark")
    for name in ("body", ".note", "figcaption", "dt"):
        assert contrast(page, name) >= 4.5, f"{name} is hard to read"
    said = page.locator("main").inner_text()
    assert "How to run it" in said
    assert "session.run" in said
    assert "Ratios that were tried" in said
    assert "labels changed" in said
    assert "images/s" in said
    page.close()

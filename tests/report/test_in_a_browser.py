"""The report in a real browser: wide and narrow, light and dark."""

import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ltm.evaluation.accuracy import PairedDifference
from ltm.report.comparison import Comparison, CurvePoint, Deployment
from ltm.report.documents import write_report

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


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


OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll("h1, h2, p, li, pre, figure, tr, dt, dd")]
    .map(element => [element, element.getBoundingClientRect()])
    .filter(([, box]) => box.width > 1 && box.height > 1);
  const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  return boxes.flatMap(([a, one], i) => boxes.slice(i + 1)
    .filter(([b, other]) => !a.contains(b) && overlap(one, other))
    .map(([b]) => `${a.innerText} / ${b.innerText}`));
}"""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overlaps_scrolls_sideways_or_fades(
    browser: Any, report: Path, width: int, scheme: str
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(report.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERLAPS) == []
    ground = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (ground < 0.1) == (scheme == "dark")
    for name in ("body", ".note", "figcaption", "dt"):
        colour = page.evaluate("n => getComputedStyle(document.querySelector(n)).color", name)
        low, high = sorted((ground, luminance(colour)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, f"{name} is hard to read"
    said = page.locator("main").inner_text()
    assert "How to run it" in said
    assert "session.run" in said
    assert "Ratios that were tried" in said
    assert "labels changed" in said
    assert "images/s" in said
    page.close()


def luminance(colour: str) -> float:
    """Relative luminance, as the contrast rules of WCAG define it."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

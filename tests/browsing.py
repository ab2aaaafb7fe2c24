"""What tests of the report and of the page share: a real browser, and what is hard to read."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def running_browser() -> Iterator[Any]:
    """A browser without a window; skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(_BROWSERS)} is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


_OVERLAPS = """names => {
  const shown = ({width, height}) => width > 1 && height > 1;
  const place = element => {  // that of its words, not of the empty space around them
    const words = document.createRange();
    words.selectNodeContents(element);
    const box = words.getBoundingClientRect();
    return shown(box) ? box : element.getBoundingClientRect();
  };
  const boxes = [...document.querySelectorAll(names)]
    .filter(element => shown(element.getBoundingClientRect()))
    .map(element => [element, place(element)]);
  const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  return boxes.flatMap(([a, one], i) => boxes.slice(i + 1)
    .filter(([b, other]) => !a.contains(b) && overlap(one, other))
    .map(([b]) => `${a.innerText} / ${b.innerText}`));
}"""


def overlaps(page: Any, names: str) -> list[str]:
    """The texts of elements that overlap, by the selector of all that are compared."""
    return page.evaluate(_OVERLAPS, names)


_COLOURS = """element => {
  const shares = colour => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const style = getComputedStyle(element);
  let ground = element;
  while (ground && (shares(getComputedStyle(ground).backgroundColor)[3] ?? 1) === 0)
    ground = ground.parentElement;
  return [style.color, ground ? getComputedStyle(ground).backgroundColor : "rgb(255, 255, 255)"];
}"""


def contrast(page: Any, name: str) -> float:
    """Contrast of an element's words with what they stand on, as WCAG defines it."""
    low, high = sorted(map(luminance, page.locator(name).first.evaluate(_COLOURS)))
    return (high + 0.05) / (low + 0.05)


def ground(page: Any) -> float:
    """Luminance of the page's background: near 0 is black."""
    return luminance(page.locator("body").evaluate(_COLOURS)[1])


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

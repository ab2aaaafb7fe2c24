"""The page in a real browser: upload, slide, click, read."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browsing import contrast, ground, overlaps, running_browser
from serving import Served

pytestmark = pytest.mark.slow

TIMEOUT = 60_000
ELEMENTS = "h1, h2, p, label, input, dt, dd, #summary span, #layers td, #layers th"


@pytest.fixture(scope="module")  # a process cannot drive two at a time
def browser() -> Iterator[Any]:
    with running_browser() as found:
        yield found


class Visit:
    """A page, and all that it complains about or asks others for."""

    def __init__(self, browser: Any, served: Served, width: int, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(TIMEOUT)
        self.complaints: list[str] = []
        self.strangers: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._request(request.url, served.address))
        self.page.goto(served.address)
        self.page.locator("#summary b").first.wait_for()
        self.page.locator("#heatmap img").wait_for()

    def _console(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    def _request(self, url: str, address: str) -> None:
        if not url.startswith((address, "data:", "blob:")):
            self.strangers.append(url)

    def text(self, name: str) -> str:
        return self.page.locator(f"#{name}").inner_text()

    def source(self, name: str) -> str:
        return self.page.locator(f"#{name} img").first.get_attribute("src")

    def wait_for_change(self, name: str, before: str) -> None:
        """Until a picture is another one."""
        self.page.wait_for_function(
            "([name, before]) => document.querySelector(`#${name} img`)?.src !== before",
            arg=[name, before],
        )


def share(visit: Visit) -> int:
    """Percentage of the multiply-adds that the page says is left."""
    found = re.search(r"\((\d+)%\)", visit.text("summary"))
    assert found is not None
    return int(found.group(1))


def test_upload_slide_click_and_read(browser: Any, served: Served, picture: Path) -> None:
    visit = Visit(browser, served, width=1280)
    page = visit.page
    assert share(visit) <= 50
    shown, groups = visit.source("picture"), visit.source("groups")

    page.locator("input[type=file]").first.set_input_files(picture)
    visit.wait_for_change("picture", shown)
    visit.wait_for_change("groups", groups)
    assert visit.text("message").strip() == ""

    groups = visit.source("groups")
    slider = page.locator("#ratio input[type=range]")
    slider.focus()
    for _ in range(20):  # a press is lost while an answer arrives
        if float(slider.input_value()) > 0.4:
            slider.press("ArrowLeft")
    page.get_by_text(re.compile(r"\((40|39)%\)")).wait_for()
    visit.wait_for_change("groups", groups)
    assert "784 → " in visit.text("layers")

    heatmap = visit.source("heatmap")
    target = page.locator("#groups img")
    box = target.bounding_box()
    target.click(position={"x": box["width"] * 0.945, "y": box["height"] * 0.945})
    page.get_by_text("row 27, column 27").wait_for()
    visit.wait_for_change("heatmap", heatmap)
    target.click(position={"x": box["width"] * 0.02, "y": box["height"] * 0.02})
    page.get_by_text("row 1, column 1 ").wait_for()

    assert page.locator("#before").get_by_text("%").count() == 5
    assert page.locator("#after").get_by_text("%").count() == 5
    assert visit.complaints == []
    assert visit.strangers == []
    page.close()


def test_refusals_are_read_and_another_method_is_chosen(
    browser: Any, served: Served, tmp_path: Path
) -> None:
    visit = Visit(browser, served, width=390)
    page = visit.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    words, large = tmp_path / "words.png", tmp_path / "large.png"
    words.write_text("these are words", encoding="utf-8")
    with large.open("wb") as file:
        file.truncate(21 * 2**20)
    file_input = page.locator("input[type=file]").first
    file_input.set_input_files(words)
    page.get_by_text("not a readable picture").wait_for()
    file_input.set_input_files(large)
    page.get_by_text(re.compile("exceed the maximum allowed size of 20")).wait_for()

    groups = visit.source("groups")
    page.locator("#examples button").nth(3).click()
    visit.wait_for_change("groups", groups)
    assert visit.text("message").strip() == ""

    groups = visit.source("groups")
    page.locator("#method input").click()
    page.get_by_role("option", name="ToMe", exact=True).click()
    visit.wait_for_change("groups", groups)
    assert page.locator("#layers tbody tr").count() == 6
    assert visit.complaints == []
    page.close()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (390, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.exhaustive),
        pytest.param(390, "light", marks=pytest.mark.exhaustive),
    ],
)
def test_nothing_overlaps_scrolls_sideways_or_fades(
    browser: Any, served: Served, width: int, scheme: str
) -> None:
    visit = Visit(browser, served, width, scheme)
    page = visit.page
    page.locator("#after h2").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert overlaps(page, ELEMENTS) == []
    assert (ground(page) < 0.1) == (scheme == "dark")
    for name in (
        "h1",
        "p",
        "#summary b",
        "#caption p",
        "#layers td",
        "#ratio label span",
        "#after h2",
    ):
        assert contrast(page, name) >= 4.5, f"{name} is hard to read"
    block = page.locator("#block input[type=range]")
    assert 0 < int(block.input_value()) < int(block.get_attribute("max")), "not the blurriest"
    page.close()

"""Every measurement in README comes from a row under results/ or from a committed run."""

import re
from pathlib import Path

import pytest

from reproduction.readme import PAGES, PART, PARTS, updated

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

NOT_MEASURED = {"3.11", "0.1.0", "2,000", "224", "70%", "40%", "1", "8", "128"}
"""Numbers in the text that state no result: versions, numbers of images, sizes, ratios."""


@pytest.mark.parametrize("page", PAGES)
def test_the_parts_of_pages_are_as_the_rows_say(page: str) -> None:
    text = (ROOT / page).read_text()
    assert updated(text) == text, "run python -m reproduction.readme"


def test_every_part_is_on_a_page() -> None:
    texts = [(ROOT / page).read_text() for page in PAGES]
    assert {part[2] for text in texts for part in PART.finditer(text)} == set(PARTS)


def test_readme_states_no_other_number() -> None:
    text = PART.sub("", README.read_text())
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)  # code
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)  # commands
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)  # code and addresses in a line
    numbers = re.findall(r"(?<![\w.-])\d(?:[\d.,]*\d)?[%x]?(?!\w)", text)
    assert set(numbers) - NOT_MEASURED == set()

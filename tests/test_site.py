"""The site has a place for every public name."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import ltm
import ltm.detection

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = spec_from_file_location("site_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference(hooks: ModuleType) -> None:
    pages = hooks.reference_pages()
    listed = {line.removeprefix("::: ") for text in pages.values() for line in text.splitlines()}
    names = [f"ltm.{name}" for name in dir(ltm)]
    names += [f"ltm.detection.{name}" for name in dir(ltm.detection)]
    assert [name for name in names if name not in listed] == []
    assert [name for name in names if f"[`{name}`]" not in pages["index"]] == []

"""The door to the paper's tables, from a checkout and without one."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ltm.cli import main, table


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in an installed `ltm`: there is no `reproduction` to import."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "reproduction"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not holds_reproduction(p)])
    monkeypatch.chdir(tmp_path)
    assert find_spec("reproduction") is None


def holds_reproduction(folder: str) -> bool:
    return (Path(folder or os.curdir) / "reproduction").is_dir()


@pytest.mark.usefixtures("installed")
def test_without_a_checkout_one_sentence_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "_roots", lambda: (tmp_path,))
    assert main(["table", "list"]) == 2
    error = capsys.readouterr().err
    assert "clone the project" in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("installed")
def test_an_editable_project_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "list"]) == 0
    assert "finetune" in capsys.readouterr().out

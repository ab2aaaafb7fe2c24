"""Every option of version 0.1.0 is still there, or CHANGELOG names what took its place."""

import json
import re
from pathlib import Path

import pytest

from ltm.cli import main

HERE = Path(__file__).parent
OPTIONS = json.loads((HERE / "options_of_0_1_0.json").read_text())


def replaced() -> str:
    """What CHANGELOG says of this version."""
    text = (HERE.parents[1] / "CHANGELOG.md").read_text()
    return text.partition("\n## [0.1.0]")[0]


@pytest.mark.parametrize("command", OPTIONS)
def test_no_option_is_lost(command: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]+", capsys.readouterr().out))
    gone = [option for option in OPTIONS[command] if option not in found]
    assert [option for option in gone if f"`{option}`" not in replaced()] == []

"""The command line as a whole; every registered command is held to the same manners."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ltm.cli import COMMANDS, main


def test_help_lists_the_commands_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    code = "import sys; from ltm.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"ltm {name}" in text.split("Example:")[1]
    assert "--output" in text


@pytest.mark.parametrize("args", [[], ["mergee"], ["demo", "--sample", "many"]])
def test_a_wrong_call_exits_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--samples", "0"], "samples is 0: at least 1 is needed"),
        (["--beta", "-1"], "beta is -1.0: a positive finite number is needed"),
        (["--output", __file__], f"output is {__file__}, a file: a folder is needed"),
    ],
)
def test_bad_input_is_one_sentence_and_2(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *options]) == 2
    assert capsys.readouterr().err == f"ltm demo: {sentence}\n"


def test_demo_shows_and_writes_the_bottleneck(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--samples", "200", "--output", str(tmp_path / "new" / "run")]) == 0
    assert "IB loss" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "new" / "run" / "metrics.json").read_text())
    assert metrics["clean classes"]["loss"] < metrics["noise"]["loss"]
    for row in metrics.values():
        assert row["loss"] <= row["bound"] - row["c0"]

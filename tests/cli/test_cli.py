"""The command line as a whole; every registered command is held to the same manners."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tyro

from ltm.cli import COMMANDS, main
from ltm.cli.commands import OPTIONS


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


@dataclass(frozen=True, kw_only=True)
class _Settings:
    size: int = 1
    """This needs more than
    one line of the source."""


def test_help_breaks_no_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docstrings of settings have line breaks; the help is as wide as the terminal."""
    monkeypatch.setenv("COLUMNS", "400")
    with OPTIONS, pytest.raises(SystemExit):
        tyro.cli(_Settings, args=["--help"])
    assert "needs more than one line of the source" in capsys.readouterr().out


@pytest.mark.parametrize("args", [[], ["mergee"], ["demo", "--images", "many"]])
def test_a_wrong_call_exits_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    "call",
    [
        "export --run nowhere --int8",
        "compress --data shapes --ratios",
        "evaluate --data shapes --run x --methods",
    ],
)
def test_an_option_without_its_values_is_refused(
    call: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        main(call.split())
    assert stop.value.code == 2
    assert "give at least one value, or leave the option out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--images", "0"], "images is 0, but must be at least 1"),
        (["--ratio", "1.5"], "ratio: got 1.5; it must be larger than 0 and at most 1."),
        (["--output", __file__], f"output is {__file__}, a file: a folder is needed"),
    ],
)
def test_bad_input_is_one_sentence_and_2(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *options]) == 2
    assert capsys.readouterr().err == f"ltm demo: {sentence}\n"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("train --data nowhere", "no data at nowhere"),
        ("finetune --data nowhere --recipe shapes_vit", "no data at nowhere"),
        ("calibrate --data shapes --budget 0.7 --run nowhere", "there is no such folder"),
        ("compress --data shapes --run nowhere", "there is no such folder"),
        ("visualize --run nowhere", "there is no such folder"),
        ("benchmark --models test_vitt", "not known to timm"),
        ("evaluate --data shapes --run nowhere", "there is no such folder"),
        ("detect train --data nowhere", "no data at nowhere"),
        ("detect evaluate --data shapes --run nowhere", "nowhere"),
        ("segment predict shapes --run nowhere", "nowhere"),
        ("export --run nowhere", "there is no such folder"),
        ("export --run nowhere --formats", "formats: there is none; give at least one"),
        ("export --run nowhere --batch-sizes", "batch_sizes: there is none; give at least one"),
        ("export --run nowhere --batch-sizes 3 0", "batch_sizes is 0, but must be at least 1"),
        ("table sweep --scale small --data nowhere", "no data at nowhere"),
        ("table sweep --seeds 0", "seeds is 0"),
        (f"predict {__file__} --run nowhere", "there is no such folder"),
        ("serve --run nowhere --embedded --port 7997", "there is no such folder"),
        ("demo --images 0", "images is 0"),
        (f"predict {__file__} --run nowhere --threshold 7", "threshold is 7.0, but must be from 0"),
        (f"predict {__file__} --run nowhere --crop-ratio 1.5", "crop_ratio is 1.5, but must be"),
        (f"predict {__file__} --onnx {__file__}", "must be a file whose name ends in .onnx"),
        ("embed nowhere --model no_such_network --pretrained", "nowhere: there is no such image"),
        ("export --run nowhere --tolerance nan", "tolerance is nan, but must be at least 0"),
        ("export --run nowhere --calibration-images -1", "calibration_images is -1"),
        ("export --run nowhere --data nothing", "no data at nothing"),
        ("evaluate --data shapes --run nowhere --beta 0", "beta is 0.0, but must be above 0"),
        ("evaluate --data shapes --run nowhere --templates {}", "go with --zero-shot"),
        ("evaluate --data shapes --model demo_vit --pretrained --ratio 0.5", "goes with --methods"),
        (f"evaluate --data {'a' * 300} --run nowhere", "is too long for the name of a file"),
        ("train --augment.auto-augment rond", "auto_augment is rond, which timm cannot read"),
        ("serve --port 7997 --class-names x.txt", "--class-names: the network of the package has"),
    ],
)
def test_bad_input_leaves_no_folder(
    call: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*call.split(), "--output", str(tmp_path / "runs" / "new")]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--interpolation cubic", "interpolation is cubic, but must be one of nearest"),
        ("--std 0.2 0 0.2", "std is (0.2, 0.0, 0.2), but must be above 0"),
    ],
)
def test_images_that_cannot_be_are_refused_before_training(
    options: str,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        main(["train", *options.split(), "--output", str(tmp_path / "new")])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

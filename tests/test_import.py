"""`import ltm` must stay light: names are imported when they are first used."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ltm
from ltm.adapters import adapters
from ltm.methods import methods

CHECK = """
import sys, time, torch
start = time.perf_counter()
import ltm
{use}
seconds = time.perf_counter() - start
assert seconds < 1.5, f"{{seconds:.2f}} s"
heavy = {{"timm", "torchvision", "lightning", "matplotlib"}} & set(sys.modules)
assert not heavy, heavy
assert not torch.cuda.is_initialized()
"""


@pytest.mark.slow
@pytest.mark.parametrize("use", ["", "ltm.information_bottleneck; ltm.image_features"])
def test_import_is_light(use: str) -> None:
    command = [sys.executable, "-c", CHECK.format(use=use)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", dir(ltm))
def test_every_public_name_has_a_home(name: str) -> None:
    assert getattr(ltm, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'merge_everything'"):
        _ = ltm.merge_everything  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_the_command_line_needs_no_script() -> None:
    command = [sys.executable, "-m", "ltm", "benchmark", "--ratio", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "ratio" in done.stderr


@pytest.mark.parametrize(
    ("contract", "package"),
    [
        ("Nobody above the methods names one", "ltm.methods"),
        ("Nobody above the adapters names a family", "ltm.adapters"),
    ],
)
def test_no_method_and_no_family_escapes_the_layers(contract: str, package: str) -> None:
    """`lint-imports` forbids only the modules that are listed."""
    text = Path(__file__).resolve().parents[1].joinpath("pyproject.toml").read_text("utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    (listed,) = [c["forbidden_modules"] for c in contracts if c["name"] == contract]
    registered = {kind.__module__ for kind in (*methods().values(), *map(type, adapters()))}
    depth = package.count(".") + 2
    ours = {".".join(name.split(".")[:depth]) for name in registered if name.startswith(package)}
    assert ours <= set(listed)
    assert len(ours) > 5

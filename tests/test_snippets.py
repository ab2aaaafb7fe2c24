"""What README and the documentation show works: Python blocks run, commands parse.

The blocks of a page run one after the other in one namespace, in a folder with a few small images.
Networks are tiny stand-ins of the same name, and jobs are small: few trials, no timing.
"""

import ast
import functools
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

import ltm
from ltm.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if not page.is_relative_to(ROOT / "docs" / "examples")]

SKIPPED = {
    ("docs/convert.md", 3): "captures a CUDA graph: needs a GPU",
    ("docs/add-a-family.md", 0): "an excerpt; tests/test_a_new_family.py has the whole",
    ("docs/add-a-family.md", 1): "an excerpt; tests/test_a_new_family.py has the whole",
    ("docs/benchmark.md", 0): "needs a GPU",
    ("docs/benchmark.md", 1): "needs a GPU",
    ("docs/detection.md", 0): "trains on COCO; tests/cli/test_detect.py trains a small one",
    ("docs/export.md", 0): "takes long; examples/onnx_file.py and tests/deployment export",
    ("docs/export.md", 1): "reads the file of the block before",
    ("docs/export.md", 2): "takes long; tests/deployment/test_onnx.py does",
    ("docs/export.md", 3): "reads a package; tests/deployment/test_onnx.py does",
    ("docs/export.md", 4): "reads a saved folder; tests/api/test_folders.py does",
    ("docs/scale.md", 0): "reads a thousand shards; tests/deployment embeds small ones",
    ("docs/scale.md", 1): "speaks to Ray, datasets, Dask and Spark",
    ("docs/serve.md", 0): "serves until Ctrl-C; tests/web serves and asks",
    ("docs/serve.md", 1): "asks a server that runs",
    ("docs/training.md", 0): "trains on ImageNet, four devices; tests/training has small ones",
}  # fmt: skip
"""Python blocks that do not run here, by page and place. They must still parse."""

QUICK: dict[str, dict[str, Any]] = {
    "compress": {
        "calibration_trials": 3, "calibration_images": 32, "time": False, "bottleneck_images": 0,
        "workers": 0,
    },
    "calibrate": {"trials": 3, "images": 32, "workers": 0},
    "evaluate": {"workers": 0, "bottleneck": False},
    "visualize": {},
}  # fmt: skip
"""Settings that make a job small, where the page does not give them."""


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[str]:
    """The calls of `ltm` in a text, whole ones, without comments."""
    joined = re.sub(r"\\\n\s*", "", text)
    for line in re.findall(
        r"^(?: {4}|\S.*\| )?((?:ltm|torchrun .* ltm) .*)$", joined, re.MULTILINE
    ):
        yield line[line.index("ltm ") :].split(" #")[0].split(" > ")[0].rstrip()


def shown() -> list[tuple[str, str]]:
    """All commands that pages and helps show, with where they stand."""
    found = [(str(p.relative_to(ROOT)), c) for p in PAGES for c in commands(p.read_text())]
    for name in COMMANDS:
        help_text = inspect.getdoc(getattr(import_module(f"ltm.cli.{name}"), name, None)) or ""
        example = help_text.partition("Example:")[2].partition("Args:")[0]
        text = re.sub(r"\n {8}(?=\S)", " ", example)
        found += [(f"ltm {name} --help", call) for call in commands(text)]
    return [(where, call) for where, call in found if not call.endswith("...")]


class Parsed(BaseException):
    """A command was understood, and would run now."""


@pytest.fixture(scope="module")
def parse() -> Iterator[Callable[[str], None]]:
    """Read a command as `ltm` does, up to where it would run."""
    import tyro

    real = tyro.cli

    def only_parse(command: Any, **options: Any) -> None:
        function = getattr(command, "func", command)

        @functools.wraps(function)
        def stub(*_: Any, **__: Any) -> None:
            raise Parsed

        partial = isinstance(command, functools.partial)
        real(functools.partial(stub, **command.keywords) if partial else stub, **options)

    def run(call: str) -> None:
        with pytest.raises(Parsed):
            main(shlex.split(call)[1:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tyro, "cli", only_parse)
        yield run


def test_every_command_shown_is_understood(parse: Callable[[str], None]) -> None:
    calls = shown()
    assert len(calls) > 50
    wrong = []
    for where, call in calls:
        try:
            parse(call)
        except (SystemExit, pytest.fail.Exception):
            wrong.append((where, call))
    assert wrong == []


def test_every_module_shown_is_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"python -m ([\w.]+)", page.read_text())}
    assert [name for name in sorted(named) if find_spec(name) is None] == []


def tiny(name: str, pretrained: bool = False, **arguments: Any) -> Any:
    """A small network in place of the one that is named; saved ones as they are."""
    if name.startswith("local-dir:") or not name.startswith("vit_"):
        return _create_model(name, pretrained=pretrained, **arguments)
    small = {"embed_dim": 24, "depth": 6, "num_heads": 2, "num_classes": 4}
    if "dinov3" not in name:
        small |= {"img_size": 64, "patch_size": 8}
    return _create_model(name, **(small | arguments))


_create_model = timm.create_model


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with images under the names that pages use, and small jobs."""
    for folder in ("imagenet/train", "imagenet/val", "photos"):
        for label in range(4):
            for number in range(12):
                pixels = torch.randint(0, 255, (64, 64, 3), dtype=torch.uint8).numpy()
                path = tmp_path / folder / f"class{label}" / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timm, "create_model", tiny)
    for name, small in QUICK.items():
        verb = getattr(ltm, name)
        known = getattr(ltm, f"{name.title()}Settings").__dataclass_fields__
        given = {key: value for key, value in small.items() if key in known}
        monkeypatch.setattr(ltm, name, _quick(verb, given))
    return tmp_path


def _quick(verb: Callable[..., Any], small: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def call(*args: Any, **options: Any) -> Any:
        return verb(*args, **(small | options))

    return call


def stand_ins() -> dict[str, Any]:
    """What pages speak of without making it."""
    base, images = tiny("vit_tiny_patch16_224").eval(), torch.randn(64, 3, 64, 64)
    merged = tiny("vit_tiny_patch16_224").eval()
    ltm.merge_tokens_(merged, ltm.LTM(ratio=0.7))
    labels = torch.arange(64) % 4
    pictures = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    target = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    return {
        "pictures": pictures, "targets": [target, target],
        "ltm": ltm, "timm": timm, "torch": torch, "base": base, "merged": merged, "images": images,
        "model": tiny("vit_tiny_patch16_224").eval(), "names": ["one", "two"],
        "loader": [(images[:32], labels[:32]), (images[32:], labels[32:])],
    }  # fmt: skip


RUNNING = [
    page for page in PAGES
    if any((str(page.relative_to(ROOT)), i) not in SKIPPED for i in range(len(blocks(page))))
]  # fmt: skip


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: str(page.relative_to(ROOT)))
# docs/convert.md has a block about it.
@pytest.mark.filterwarnings("ignore:This network gives merged tokens")
def test_the_blocks_of_a_page_run(page: Path, place: Path) -> None:
    names = stand_ins()
    for number, block in enumerate(blocks(page)):
        if (str(page.relative_to(ROOT)), number) not in SKIPPED:
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_skipped_blocks_exist_and_parse() -> None:
    for (page, number), reason in SKIPPED.items():
        assert reason
        tree = ast.parse(blocks(ROOT / page)[number])
        used = [
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "ltm"
        ]
        assert [name for name in used if not hasattr(ltm, name)] == []

"""The core alone: what works without any extra, and what a missing one says."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ltm.extras import _EXTRA_OF, MissingExtraError, named, require

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

BLOCK = """
import sys
from importlib.machinery import PathFinder

MISSING = {missing!r}

class Core(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else super().find_spec(name, path, target)

sys.meta_path[:] = [Core if finder is PathFinder else finder for finder in sys.meta_path]
"""

WORK = """
import tempfile, torch
from timm.models.vision_transformer import VisionTransformer
import ltm

def host():
    sizes = dict(img_size=48, patch_size=8, embed_dim=32, depth=6, num_heads=2, num_classes=4)
    return VisionTransformer(**sizes)

model = host().eval()
ltm.merge_tokens_(model, ltm.LTM(ratio=0.7), 48)
images = torch.rand(2, 3, 48, 48)
assert 0 < ltm.gmacs(model) < ltm.gmacs(host(), 48)
with torch.no_grad():
    expected = model(images)
try:
    ltm.capture(model, images)
except ValueError as error:
    assert "NVIDIA" in str(error)
with tempfile.TemporaryDirectory() as folder:
    ltm.save(model, folder)
    with torch.no_grad():
        torch.testing.assert_close(ltm.load(folder, host()).eval()(images), expected)
ltm.freeze_(model)
with torch.no_grad():
    torch.testing.assert_close(model(images), expected)
from ltm.cli import main
assert main(["compress", "vit_tiny_patch16_224"]) == 2
assert main([]) == 2
"""


def packages(requirements: list[str]) -> set[str]:
    """Modules of requirements, their versions left out."""
    names = (re.split(r"[\[<>=!; ]", text)[0] for text in requirements)
    return {name.replace("-", "_") for name in names} - {"ltm"}


def optional() -> set[str]:
    extras = PROJECT["optional-dependencies"]
    names = {name for extra in extras if extra != "dev" for name in packages(extras[extra])}
    return names - {"filelock", "jinja2", "pillow", "pyyaml"}  # torch and timm need them too


def test_the_core_is_five_packages() -> None:
    assert packages(PROJECT["dependencies"]) == {
        "jaxtyping",
        "numpy",
        "safetensors",
        "timm",
        "torch",
    }


@pytest.mark.slow
def test_the_core_works_alone_and_a_command_names_its_extra() -> None:
    code = BLOCK.format(missing=optional() | {"onnx_ir", "datasets", "torchmetrics"}) + WORK
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = "ltm: tyro is not installed, and this needs it: pip install 'ltm[cli]'"
    assert done.stderr.splitlines() == [said, said]


def test_every_module_of_an_extra_is_known_by_its_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    for module, extra in _EXTRA_OF.items():
        assert module in packages(extras[extra])


def test_a_missing_module_names_its_extra() -> None:
    missing = named(
        ModuleNotFoundError("No module named 'lightning.fabric'", name="lightning.fabric")
    )
    assert isinstance(missing, MissingExtraError)
    assert str(missing) == "lightning is not installed, and this needs it: pip install 'ltm[train]'"
    other = ModuleNotFoundError("No module named 'ltm.nothing'", name="ltm.nothing")
    assert named(other) is other
    with pytest.raises(MissingExtraError, match=r"pip install 'ltm\[export\]'"):
        require("no_such_module", extra="export")

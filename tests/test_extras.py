"""The core alone: what works without any extra, and what a missing one says."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ltm.extras import _EXTRA_OF, MissingExtraError, named, require

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

NEEDED_BY_CORE = {"filelock", "jinja2", "pillow", "pyyaml"}
"""Optional packages that torch and timm need too."""

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
from ltm.progress import Progress
assert list(Progress("no bar")([1, 2])) == [1, 2]
from ltm.cli import main
assert main(["compress", "vit_tiny_patch16_224"]) == 2
assert main([]) == 2
"""


TRAINING = """
import tempfile
from pathlib import Path
import ltm

with tempfile.TemporaryDirectory() as folder:
    said = []
    words = ("img_size=32", "patch_size=8", "embed_dim=16", "depth=4", "num_heads=2")
    changes = dict(epochs=1, warm_epochs=0, device="cpu", image_size=32, batch_size=4)
    done = ltm.train(
        ltm.ModelSource(model="vit_tiny_patch16_224", model_args=words),
        "shapes:classes=2,size=32,images=8,val_images=4",
        "shapes_vit",
        output=folder,
        say=said.append,
        **changes,
    )
    assert (Path(folder) / "model" / "model.safetensors").is_file() and said
from ltm.detection.settings import RECIPES
"""


def packages(requirements: list[str]) -> set[str]:
    """Modules of requirements, their versions left out."""
    names = (re.split(r"[\[<>=!; ]", text)[0] for text in requirements)
    return {name.replace("-", "_") for name in names} - {"ltm"}


def optional() -> set[str]:
    extras = PROJECT["optional-dependencies"]
    names = {name for extra in extras if extra != "dev" for name in packages(extras[extra])}
    return names - NEEDED_BY_CORE


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


@pytest.mark.slow
def test_training_from_python_needs_no_command_line() -> None:
    extras = PROJECT["optional-dependencies"]
    assert "ltm[cli]" not in extras["train"]
    missing = packages(extras["cli"]) - packages(extras["train"]) - NEEDED_BY_CORE
    missing -= {"rich"}  # lightning looks for its metadata, which cannot be hidden, and imports it
    code = BLOCK.format(missing=missing) + TRAINING
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_module_of_an_extra_is_known_by_its_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    others = {"braceexpand": "webdataset", "onnx_ir": "onnxscript", "open_clip": "open_clip_torch"}
    for module, extra in _EXTRA_OF.items():
        assert others.get(module, module) in packages(extras[extra])


def test_a_missing_module_names_its_extra() -> None:
    missing = named(
        ModuleNotFoundError("No module named 'lightning.fabric'", name="lightning.fabric")
    )
    assert isinstance(missing, MissingExtraError)
    assert str(missing) == "lightning is not installed, and this needs it: pip install 'ltm[train]'"
    other = ModuleNotFoundError("No module named 'ltm.nothing'", name="ltm.nothing")
    assert named(other) is other
    with pytest.raises(MissingExtraError, match=r"pip install no-such-module$"):
        require("no_such_module")


def test_a_module_that_is_required_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ltm\[export\]'$"):
        require("onnxruntime")

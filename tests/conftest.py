"""What every test relies on: checked shapes, one thread, fixed seeds, real data if there is any."""

import gc
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import settings
from jaxtyping import config as jaxtyping_config, install_import_hook

from toys import GRIDS, TOYS, VARIANTS

# Before anything of ours is imported: from here on, annotated shapes are assertions. Not in the
# kernels, whose source Triton compiles itself, nor in modules of core that annotate none: a checked
# call costs as much as a small operator.
CORE = Path(__file__).resolve().parents[1] / "src" / "ltm" / "core"
CHECKED = [f"ltm.core.{path.stem}" for path in CORE.glob("*.py") if "jaxtyping" in path.read_text()]
install_import_hook([*CHECKED, "ltm.methods", "ltm.adapters"], "shapecheck.check")

torch.set_num_threads(1)

# Tracing makes millions of small objects: collecting seldom saves a tenth of the time.
gc.set_threshold(100_000, 50, 50)

# The same examples every time, lest CI fail by chance; search with --hypothesis-profile=explore.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("fixed")

REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


MODELS = ("vit", *GRIDS)
"""Toys that meet every method. The others are their relatives, and meet LTM and one other."""


def is_repetition(name: object, method: object) -> bool:
    """Whether a pair of a toy and a method, or its settings, repeats what other pairs show."""
    from ltm.methods import DEFAULT, methods

    relatives = [toy for toy in TOYS if toy not in MODELS]
    peers = sorted(methods().keys() - {DEFAULT})
    method = getattr(method, "name", method)
    if name not in relatives or method not in peers:
        return False
    return method != peers[relatives.index(name) % len(peers)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick tier sees one network of each table, and no real weights."""
    grids = ("swin", "mobilevit", "efficientvit")
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if is_repetition(given.get("name"), given.get("method") or given.get("config")):
            item.add_marker(pytest.mark.exhaustive)
        name = given.get("name")
        another = isinstance(name, str) and name in TOYS | VARIANTS and name != "vit"
        another |= any(
            isinstance(value, str) and value.startswith(grids) for value in given.values()
        )
        another |= item.name.startswith("test_swin_")
        another |= item.get_closest_marker("real") is not None
        if another:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What was imported by now stays: the collector need not look at it again."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end all of it goes, in good order."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def seldom_collected(request: pytest.FixtureRequest) -> None:
    """Where networks are timed, each is collected: what earlier tests left is not looked at."""
    if request.path.parent.name in {"cli", "deployment", "evaluation"}:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Shells let background jobs ignore Ctrl-C, and so would all that the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def shared_counts() -> Iterator[None]:
    """Multiply-adds of equal networks are counted once."""
    from counted import share_counts_

    with pytest.MonkeyPatch.context() as patch:
        share_counts_(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_call_a_turn() -> Iterator[None]:
    """Networks are timed once a round, however short that is."""
    from ltm.evaluation import latency

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "interleaved", partial(latency.interleaved, least_seconds=0))
        yield


@pytest.fixture(scope="module", autouse=True)
def plain_onnx(request: pytest.FixtureRequest) -> Iterator[None]:
    """Three quarters of an ONNX export go into onnxscript's rewriting: only deployment waits."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "deployment":
            patch.setattr(torch.onnx.ONNXProgram, "optimize", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Switch the shape assertions off, as they are for users: our own checks must do.

    Also for compiling and exporting, which need not trace the assertions, nor remember what tests
    before have compiled.
    """
    torch.compiler.reset()
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of real images and weights, which are not part of the project."""
    if not REAL_DATA.is_dir():
        pytest.skip("no real data: ../shared/data is absent")
    return REAL_DATA


@pytest.fixture(scope="session")
def scenes():
    from ltm.data.shapes import ShapesDetection

    return ShapesDetection("val", num_images=8, image_size=64, empty_ratio=0.4, seed=1)


@pytest.fixture(scope="session")
def coco_folder(scenes, tmp_path_factory) -> Path:
    from written import write_coco_folder

    return write_coco_folder(scenes, tmp_path_factory.mktemp("coco"))

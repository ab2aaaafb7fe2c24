"""How many files of ours a reader has to follow: those that run in a block, a conversion, a verb.

The numbers are a measure of the design; ARCHITECTURE.md quotes them.
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import timm
import torch

import ltm
from toys import pictures, toy

ROOT = f"{Path(ltm.__file__).parent}/"
MOST = {"block": 9, "merge_tokens_": 19, "compress": 60}
TINY: dict[str, Any] = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 4}
TINY |= {"num_heads": 2, "num_classes": 4}
pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def files_crossed(run: Callable[[], Any]) -> list[str]:
    """The files under src/ltm whose functions run; importing a module is no hop."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        ours = event == "call" and code.co_filename.startswith(ROOT)
        if ours and code.co_flags & inspect.CO_OPTIMIZED:  # no body of a module or class
            found.add(code.co_filename.removeprefix(ROOT))

    before = sys.gettrace()
    sys.settrace(note)
    try:
        run()
    finally:
        sys.settrace(before)
    return sorted(found)


def assert_few(what: str, run: Callable[[], Any]) -> None:
    found = files_crossed(run)
    print(f"{what}: {len(found)} files: {', '.join(found)}")
    assert found
    assert len(found) <= MOST[what], found


@torch.no_grad()
def test_one_merging_block() -> None:
    model, images = toy("vit"), pictures("vit")
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.7))
    model(images)
    block = next(b for b in model.blocks[1:] if b.merger is not None)
    x = torch.randn(2, block.merger.site.num_in + 1, 32)
    block(x)
    assert_few("block", lambda: block(x))


def test_a_conversion() -> None:
    model, config, convert_ = toy("vit"), ltm.LTM(ratio=0.7), ltm.merge_tokens_
    assert_few("merge_tokens_", lambda: convert_(model, config))


@pytest.mark.slow
def test_compress(tmp_path: Path) -> None:
    """From the network in memory to the report on the disk."""
    model = timm.create_model("vit_tiny_patch16_224", **TINY)

    def compress() -> None:
        found = ltm.compress(
            model, "shapes:classes=4,size=32,images=64,val_images=96", compare=("tome",),
            calibration_images=32, calibration_trials=2, images=16, bottleneck_images=0,
            time=False, workers=0, device="cpu",
        )  # fmt: skip
        found.save(tmp_path / "small")

    assert_few("compress", compress)

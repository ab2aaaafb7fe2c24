"""Every family, every method: what is exported says what the network says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import ltm
from ltm.api import conversion_of
from ltm.deployment.export import Export
from ltm.deployment.formats import MAX_TOKENS
from ltm.deployment.information import describe
from ltm.methods import MethodConfig
from toys import pictures, settled, size_of, toy

pytestmark = pytest.mark.slow

METHODS: dict[str, MethodConfig] = {
    "ltm": ltm.LTM(ratio=0.8),
    "ltm_static": ltm.LTM(ratio=0.8, support=ltm.Learned()),
    "tome": ltm.ToMe(ratio=0.9),
    "tofu": ltm.ToFu(ratio=0.9),
    "ltmp": ltm.LTMP(ratio=0.9, merge_threshold=0.5, prune_threshold=0.02),
}
GRIDS = ("swin", "mobilevit", "efficientvit")
# On grids LTM is static unless told otherwise; ToFu is ToMe but for what becomes of a pair.
CASES = [("vit", method) for method in METHODS] + [
    *((family, method) for family in GRIDS for method in ("ltm", "ltmp")),
    *(("swin", "tome"), ("mobilevit", "tome"), ("efficientvit", "tofu")),
]
FIRST = {("vit", method) for method in METHODS}
FIRST |= {(family, "ltm") for family in GRIDS}


def network(family: str, method: str = "ltm") -> nn.Module:
    """As little as shows how merging blocks follow each other: tracing takes time for each layer.

    The peers restore the grid at the end of a stage, on EfficientViT of a block; LTM hands it on.
    """
    torch.manual_seed(0)
    hands_on = method == "ltm"
    if family == "vit":
        return VisionTransformer(
            img_size=48, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10
        )
    if family == "swin":
        depths, heads = ((2,), (1,)) if method == "tome" else ((2, 1), (1, 2))
        return SwinTransformer(
            img_size=112, embed_dim=16, depths=depths, num_heads=heads, num_classes=10
        )
    model: Any = toy(family)
    torch.manual_seed(0)
    if family == "mobilevit":
        model.stem, model.final_conv = nn.Conv2d(3, 24, 4, 4), nn.Identity()
        model.stages = model.stages[2:4] if hands_on else model.stages[2:3]
        model.head.fc = nn.Linear(64 if hands_on else 48, 10)
    else:
        model.stem, model.stages = nn.Conv2d(3, 24, 8, 8), model.stages[2:3]
        model.head.in_conv = nn.Conv2d(32, 64, 1)
        if method in ("tome", "ltmp"):
            del model.stages[0].blocks[2]
    return settled(model, size_of(family))


@pytest.mark.parametrize(
    ("family", "method"),
    [pytest.param(*case, marks=[] if case in FIRST else pytest.mark.exhaustive) for case in CASES],
)
def test_one_onnx_file_and_one_program_say_the_same_at_every_batch_size(
    family: str, method: str, tmp_path: Path, unchecked_shapes: None
) -> None:
    images = pictures(family, 16)
    size = (images.shape[-2], images.shape[-1])
    model, config = network(family, method).eval(), METHODS[method]
    if (family, method) == ("swin", "ltmp"):
        config = replace(config, ratio=0.98)  # Its windows leave little to save.
    ltm.merge_tokens_(model, config, image_size=size)
    with torch.no_grad():
        before = model(images)
    job = Export(model, tmp_path, describe(model))
    files = job.write(("onnx", "program"), images)
    assert [file.name for file in files] == ["model.pt2", "model.onnx"]
    if method != "ltmp":
        _lint(tmp_path / "model.onnx")
    for file in files:
        assert [row.batch_size for row in file.parity] == [1, 3, 16]
        for row in file.parity:
            assert row.max_relative_difference < 1e-4
            assert row.agreement == 1
    # The model itself is left as it was: not frozen, and in working order.
    assert not conversion_of(model).frozen
    with torch.no_grad():
        assert torch.equal(model(images), before)
        if method == "ltmp":
            merged = ltm.merge_maps(model, images)
            for weights in merged.values():
                kept = (weights.sum(1) > 0).sum(1)
                assert len(kept.unique()) > 1, "thresholds that merge nothing would prove nothing"


def _lint(path: Path) -> None:
    """What TensorRT takes: nothing is scattered, and K of every TopK is a small constant."""
    graph = onnx.load(str(path)).graph
    assert not {node.op_type for node in graph.node} & {"ScatterElements", "ScatterND", "Scatter"}
    known = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "TopK":
            assert 0 < int(known[node.input[1]].item()) <= MAX_TOKENS


@pytest.mark.parametrize("method", [None, pytest.param("active", marks=pytest.mark.slow)])
def test_originals_and_informative_weights_are_exported_too(
    method: str | None, tmp_path: Path, unchecked_shapes: None
) -> None:
    images = pictures("vit", 16)
    model = network("vit").eval()
    if method is not None:
        ltm.merge_tokens_(model, ltm.LTM(ratio=0.75))
        ltm.collect_statistics_(model, [(images, torch.arange(16) % 10)])
    job = Export(model, tmp_path, describe(model))
    (file,) = job.write(("onnx",), images)
    assert max(row.max_relative_difference for row in file.parity) < 1e-4


@pytest.mark.parametrize("channels", [1, 4])
def test_images_of_other_than_three_channels_are_exported(
    channels: int, tmp_path: Path, unchecked_shapes: None
) -> None:
    model = VisionTransformer(
        img_size=48, patch_size=8, embed_dim=32, depth=2, num_heads=2, in_chans=channels
    ).eval()
    ltm.merge_tokens_(model, ltm.LTM(counts=(24,), sites=(0,)))
    job = Export(model, tmp_path, describe(model))
    (file,) = job.write(("onnx",), torch.randn(4, channels, 48, 48), batch_sizes=(1, 3))
    assert max(row.max_relative_difference for row in file.parity) < 1e-4

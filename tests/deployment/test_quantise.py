"""Int8 files: which layers, how small, how right, and that they still say how to use them."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ltm.deployment.export import Export
from ltm.deployment.formats import onnx_information
from ltm.deployment.int8 import RECIPES, Int8, quantise_onnx, quantise_torch_
from ltm.evaluation.modes import OnnxModel


def kinds(path: Path) -> list[tuple[str, str]]:
    return [(node.op_type, node.name) for node in onnx.load(str(path)).graph.node]


@pytest.mark.parametrize("recipe", ["accurate", "small", "dynamic"])
def test_linear_layers_become_int8_and_products_of_activations_do_not(
    recipe: str, exported: Export, tmp_path: Path, images: Tensor
) -> None:
    source, target = exported.folder / "model.onnx", tmp_path / "int8.onnx"
    number = quantise_onnx(source, target, RECIPES[recipe], [images[:8], images[8:]])
    assert number == 9  # qkv, proj, fc1 and fc2 of two blocks, and the head
    stored = {i.name: i.data_type for i in onnx.load(str(target)).graph.initializer}
    floats = [name for name, kind in stored.items() if kind == onnx.TensorProto.FLOAT]
    weights = {i.name: i for i in onnx.load(str(source)).graph.initializer}
    large = [n for n in floats if n in weights and np.prod(weights[n].dims) >= 32 * 32]
    matrices = [onnx.numpy_helper.to_array(weights[n]) for n in large if len(weights[n].dims) == 2]
    # A mask of infinities, which matching adds to distances, is no weight.
    assert not [x for x in matrices if np.isfinite(x).all()], "weights were left in float"
    if recipe != "dynamic":
        before = [name for kind, name in kinds(source) if kind == "MatMul" and "/" in name]
        after = {name for kind, name in kinds(target) if kind == "MatMul"}
        assert set(before) <= after
    model = OnnxModel(target)
    assert onnx_information(model) == onnx_information(OnnxModel(source))
    found, expected = model(images), OnnxModel(source)(images)
    error = (found - expected).abs().max() / expected.abs().max()
    assert 0 < error < 0.15


def test_weights_alone_lose_next_to_nothing(
    exported: Export, tmp_path: Path, images: Tensor
) -> None:
    source, target = exported.folder / "model.onnx", tmp_path / "int8.onnx"
    # All but the head, which has to be computed in int8 lest there be nothing to do.
    recipe = Int8(weights_only=("qkv", "proj", "fc1", "fc2"))
    quantise_onnx(source, target, recipe, [images])
    expected = OnnxModel(source)(images)
    # Of most images: where two pairs of tokens are equally alike, another one may be merged.
    error = (OnnxModel(target)(images) - expected).abs().amax(1).median() / expected.abs().max()
    assert error < 0.02
    dequantised = [name for kind, name in kinds(target) if kind == "DequantizeLinear"]
    assert sum(name.endswith("/MatMul_weight") for name in dequantised) == 8


def test_static_ranges_need_images(exported: Export, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="static ranges need images"):
        quantise_onnx(exported.folder / "model.onnx", tmp_path / "x.onnx", RECIPES["small"])


def test_torchao_makes_the_same_layers_int8(vit: nn.Module, images: Tensor) -> None:
    with torch.no_grad():
        expected = vit(images)
        assert quantise_torch_(vit, RECIPES["accurate"]) == 9
        error = (vit(images) - expected).abs().max() / expected.abs().max()
    assert 0 < error < 0.1
    with pytest.raises(ValueError, match="no linear layers"):
        quantise_torch_(nn.Conv2d(3, 3, 1), RECIPES["small"])


def test_files_that_are_compared_run_on_the_same_device(
    vit: nn.Module, tmp_path: Path, exported: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(_: object, path: Path, *__: object) -> Path:
        path.write_bytes(b"a file")
        return path

    devices: list[str] = []
    monkeypatch.setattr(
        "ltm.deployment.export.OnnxModel", lambda _, device="cpu": devices.append(device) or vit
    )
    monkeypatch.setattr("ltm.deployment.export.trace", lambda *_: None)
    monkeypatch.setattr("ltm.deployment.export.save_onnx", written)
    monkeypatch.setattr("ltm.deployment.export.quantise_onnx", written)
    job = Export(vit, tmp_path, exported.information, device="cuda")
    job.write(("onnx",), torch.zeros(1, 3, 48, 48), batch_sizes=(1,))
    job.write_int8("dynamic", [])
    assert devices == ["cuda", "cuda"]


def test_accuracy_and_speed_are_measured_against_the_float_file(
    vit: nn.Module, tmp_path: Path, exported: Export, images: Tensor
) -> None:
    job = Export(vit, tmp_path, exported.information)
    (tmp_path / "model.onnx").write_bytes((exported.folder / "model.onnx").read_bytes())
    job._add(
        tmp_path / "model.onnx", "onnx", "float32", OnnxModel(tmp_path / "model.onnx"), parity=()
    )
    job.write_int8("dynamic", [])
    with torch.no_grad():
        labels = exported.model(images).argmax(1)
    labels[:4] = (labels[:4] + 1) % 10
    batches = DataLoader(TensorDataset(images, labels), batch_size=8)
    (row,) = job.measure_int8(batches, rounds=3)
    assert row.name == "model.int8-dynamic.onnx"
    assert row.num_images == 16
    assert row.top1_before == 0.75
    assert row.difference == pytest.approx(row.top1_after - 0.75)
    assert row.interval[0] <= row.difference <= row.interval[1]
    assert row.share_of_size < 1
    assert row.speedup > 0
    with pytest.raises(ValueError, match="no images to measure"):
        job.measure_int8([])

"""The ONNX file: what it carries, what it leaves out, and what is refused."""

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import ltm
from ltm.api.saving import telling_names
from ltm.deployment.export import Export, Parity, ParityError, compare, require_parity
from ltm.deployment.formats import deployable, onnx_information, save_onnx, trace
from ltm.deployment.information import (
    ModelInformation,
    describe,
    read_class_names,
    saved_class_names,
)
from ltm.evaluation.modes import OnnxModel, onnx_providers

pytestmark = pytest.mark.slow


def test_the_file_says_how_to_use_it(exported: Export) -> None:
    model = OnnxModel(exported.folder / "model.onnx")
    assert onnx_information(model).spec == exported.information.spec
    assert onnx_information(model).class_names == tuple(f"class {index}" for index in range(10))
    merging = onnx_information(model).token_merging
    assert merging is not None
    assert merging["method"] == "ltm"
    assert merging["token_counts"] == [24]
    assert 0.5 < merging["macs_share"] < 1


def test_anybody_can_run_it_with_plain_onnx_runtime(exported: Export, images: Tensor) -> None:
    session = onnxruntime.InferenceSession(str(exported.folder / "model.onnx"))
    (entry,) = session.get_inputs()
    assert (entry.name, entry.shape) == ("images", ["batch", 3, 48, 48])
    assert session.get_outputs()[0].shape == ["batch", 10]
    with torch.no_grad():
        expected = exported.model(images[:5]).numpy()
    found = np.asarray(session.run(None, {"images": images[:5].numpy()})[0])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_file_tells_nothing_about_the_machine_it_was_made_on(exported: Export) -> None:
    for name in ("model.onnx", "model.pt2"):
        content = (exported.folder / name).read_bytes()
        assert str(Path(ltm.__file__).parent).encode() not in content
        assert b"site-packages" not in content
    graph = onnx.load(str(exported.folder / "model.onnx")).graph
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)
    assert {"blocks.0.mlp.fc2/MatMul", "blocks.1.attn.qkv/MatMul"} <= set(names)


def test_the_program_is_read_back_by_torch(exported: Export, images: Tensor) -> None:
    program = torch.export.load(exported.folder / "model.pt2").module()
    with torch.no_grad():
        for batch in (images[:1], images[:7]):
            assert torch.equal(program(batch), exported.model(batch))


def test_a_difference_is_refused(exported: Export, images: Tensor) -> None:
    rows = compare(exported.model, lambda x: exported.model(x) * 1.01, images, (1, 5))
    assert [row.num_images for row in rows] == [16, 20]
    assert all(0.009 < row.max_relative_difference < 0.011 for row in rows)
    with pytest.raises(ParityError, match=r"model\.onnx differs .* at batch 1: at most 1e-03"):
        require_parity(rows, "model.onnx")
    missing = compare(exported.model, lambda x: exported.model(x) * torch.nan, images, (1,))
    with pytest.raises(ParityError):
        require_parity(missing, "model.onnx")
    with pytest.raises(ParityError, match="instead of"):
        compare(exported.model, lambda x: exported.model(x)[:, :3], images)


def test_a_wrong_file_is_not_left_to_be_used(
    vit: nn.Module, tmp_path: Path, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ltm.deployment.export.compare",
        lambda *_: [Parity(batch_size=1, num_images=1, max_relative_difference=1, agreement=0)],
    )
    monkeypatch.setattr("ltm.deployment.export.save_onnx", lambda _, path, __: _touched(path))
    monkeypatch.setattr("ltm.deployment.export.OnnxModel", lambda *_, **__: vit)
    job = Export(vit, tmp_path, describe(vit))
    with pytest.raises(ParityError):
        job.write(("onnx",), images)
    assert not (tmp_path / "model.onnx").exists()


def test_a_file_of_another_shape_is_not_left_to_be_used(
    vit: nn.Module, tmp_path: Path, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ltm.deployment.export.save_onnx", lambda _, path, __: _touched(path))
    monkeypatch.setattr(
        "ltm.deployment.export.OnnxModel", lambda *_, **__: lambda batch: vit(batch)[:, :3]
    )
    job = Export(vit, tmp_path, describe(vit))
    with pytest.raises(ParityError, match="instead of"):
        job.write(("onnx",), images)
    assert not (tmp_path / "model.onnx").exists()


def _touched(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def test_torch_exports_a_converted_network_by_itself(
    vit: nn.Module, images: Tensor, tmp_path: Path, unchecked_shapes: None
) -> None:
    """0.1.0 sorted in a way that torch cannot translate."""
    path = tmp_path / "plain.onnx"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        torch.onnx.export(vit, (images,), str(path), dynamo=True, verbose=False)
    with torch.no_grad():
        torch.testing.assert_close(OnnxModel(path)(images), vit(images), atol=1e-5, rtol=1e-4)


def test_more_tokens_than_can_be_sorted_are_refused(
    vit: nn.Module, monkeypatch: pytest.MonkeyPatch, unchecked_shapes: None
) -> None:
    monkeypatch.setattr("ltm.deployment.formats.MAX_TOKENS", 35)
    with pytest.raises(ValueError, match="matches 36 tokens cannot"):
        trace(deployable(vit))


def test_a_device_chooses_who_runs_the_file(
    exported: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exported.folder / "model.onnx"
    with pytest.raises(ValueError, match="got 'gpu'; an ONNX file runs on cpu, cuda, tensorrt"):
        OnnxModel(path, device="gpu")
    here = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: here[1:])
    assert onnx_providers("cpu") == [(here[2], {})]
    assert onnx_providers("cuda:1") == [(here[1], {"device_id": 1}), (here[2], {})]
    with pytest.raises(ValueError, match=r"tensorrt needs Tensorrt.* 'ltm\[onnx-gpu\]'"):
        OnnxModel(path, device="tensorrt")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: here)
    assert [name for name, _ in onnx_providers("tensorrt")] == here


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="it has CUDA"
)
def test_a_device_that_is_missing_is_refused_before_anything_is_traced(
    exported: Export, vit: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="cuda needs CUDAExecutionProvider"):
        ltm.export(vit, tmp_path / "x", device="cuda")
    with pytest.raises(ValueError, match="cuda needs CUDAExecutionProvider"):
        ltm.predict(exported.folder / "model.onnx", tmp_path, device="cuda")


PACKAGE = """
import sys, torch
run = torch._inductor.aoti_load_package(sys.argv[1])
images, expected = torch.load(sys.argv[2])
for number in (1, 4, 9):
    torch.testing.assert_close(run(images[:number]), expected[:number], atol=1e-4, rtol=1e-3)
assert "ltm" not in sys.modules
"""


@pytest.mark.exhaustive
def test_a_package_runs_in_a_process_without_us(
    vit: nn.Module, images: Tensor, tmp_path: Path, unchecked_shapes: None
) -> None:
    job = Export(vit, tmp_path, describe(vit))
    (file,) = job.write(("aoti",), images)
    assert file.name == "model.aoti.pt2"
    with torch.no_grad():
        torch.save((images, vit(images)), tmp_path / "images.pt")
    arguments = [sys.executable, "-c", PACKAGE, str(tmp_path / file.name), tmp_path / "images.pt"]
    environment = {**os.environ, "PYTHONPATH": ""}
    subprocess.run(arguments, check=True, cwd=tmp_path, env=environment)


def test_a_package_has_a_name_of_its_own_and_is_compared(
    vit: nn.Module, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes a minute: here the network stands in for its package."""
    monkeypatch.setattr("ltm.deployment.export.trace", lambda *_: None)
    monkeypatch.setattr("ltm.deployment.export.save_package", lambda _, path: _touched(path))
    monkeypatch.setattr("ltm.deployment.export.PackagedModel", lambda *_: vit)
    job = Export(vit, tmp_path, describe(vit))
    (file,) = job.write(("aoti",), images)
    assert file.name == "model.aoti.pt2"
    assert [row.batch_size for row in file.parity] == [1, 3, 16]
    assert job.write_int8("dynamic", ()) == [file]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device is available"):
            Export(vit, tmp_path, describe(vit), device="cuda").write(("aoti",), images)


def test_what_is_no_model_is_refused(tmp_path: Path, exported: Export) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        OnnxModel(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ValueError, match="is not an ONNX model"):
        OnnxModel(tmp_path / "text.onnx")
    foreign = onnx.load(str(exported.folder / "model.onnx"))
    del foreign.metadata_props[:]
    onnx.save(foreign, str(tmp_path / "foreign.onnx"))
    with pytest.raises(ValueError, match="`ltm export` did not write it"):
        onnx_information(OnnxModel(tmp_path / "foreign.onnx"))
    number = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [])
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [])
    graph = onnx.helper.make_graph([node], "no network", [number], [result])
    opset = [onnx.helper.make_opsetid("", 18)]  # onnx may be ahead of what the runtime knows
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=opset)
    onnx.save(model, str(tmp_path / "number.onnx"))
    with pytest.raises(ValueError, match="`ltm export` did not write it"):
        ltm.BatchPredictor(tmp_path / "number.onnx", "top5").load()


def test_a_missing_package_is_named(
    exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(
        ValueError, match=r"onnxscript is not installed.*pip install 'ltm\[export\]'"
    ):
        save_onnx(None, tmp_path / "x.onnx", exported.information)  # type: ignore[arg-type]


def test_information_survives_being_written(exported: Export) -> None:
    information = exported.information
    again = ModelInformation.from_strings(information.to_strings())
    assert again.to_strings() == information.to_strings()
    assert json.loads(information.to_strings()["ltm.preprocessing"])["size"] == [48, 48]
    unreadable = dataclasses.replace(information, token_merging={"ratio": torch.tensor(0.7)})
    with pytest.raises(TypeError, match="not JSON serializable"):
        unreadable.to_strings()


def test_class_names_come_from_where_they_are_known(vit: nn.Module, tmp_path: Path) -> None:
    import timm

    imagenet = describe(timm.create_model("vit_tiny_patch16_224", depth=1)).class_names
    assert imagenet is not None
    assert imagenet[1].startswith("goldfish")
    assert describe(vit).class_names is None
    with pytest.raises(ValueError, match="got 2 for a model of 10 classes"):
        describe(vit, class_names=("cat", "dog"))
    (tmp_path / "names.txt").write_text("cat\n\ndog\n")
    assert read_class_names(tmp_path / "names.txt") == ("cat", "dog")
    (tmp_path / "config.json").write_text('{"label_names": ["cat", "dog"]}')
    assert read_class_names(tmp_path / "config.json") == ("cat", "dog")
    assert saved_class_names(tmp_path) == ("cat", "dog")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(tmp_path)
    assert saved_class_names(tmp_path / "run") == ("cat", "dog")
    assert telling_names(["cat", "dog"]) == ("cat", "dog")
    assert telling_names(["0", "1", "2"]) is None  # ImageNet's folders, as some number them
    assert telling_names(["0000", "0001", "0002"]) is None
    assert telling_names(["1", "2", "4"]) == ("1", "2", "4")
    (tmp_path / "config.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="holds no class names"):
        read_class_names(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError):
        read_class_names(tmp_path / "absent.txt")

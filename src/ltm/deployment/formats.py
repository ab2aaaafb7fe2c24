"""The file formats of an exported network, and how to run each of them again.

| format | written by | run by |
|---|---|---|
| torch.export program, `.pt2` | `save_program` | `torch.export.load`, which unpickles |
| ONNX, `.onnx` | `save_onnx` | `evaluation.modes.OnnxModel` |
| OpenVINO, `.xml` and `.bin` | `save_openvino`, from an ONNX file | `OpenVinoModel` |
| AOTInductor package, `.aoti.pt2` | `save_package` | `PackagedModel` |

A network is traced once (`trace`), for any batch size. An ONNX file has its preprocessing and class
names inside.
"""

from __future__ import annotations

import ast
import copy
import io
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ltm.api import freeze_, image_size_of, is_merging, mergers
from ltm.core.cost import channels_of
from ltm.deployment.information import ModelInformation
from ltm.deployment.settings import Format
from ltm.evaluation.modes import OnnxModel, to_onnx
from ltm.extras import require
from ltm.files import write_bytes
from ltm.methods.base import Decision

SUFFIXES: dict[Format, str] = {
    "program": ".pt2",
    "onnx": ".onnx",
    "openvino": ".xml",
    "aoti": ".aoti.pt2",
}
INPUT, OUTPUT, BATCH = "images", "logits", "batch"
"""Names in an ONNX file."""

_SCOPES = "pkg.torch.onnx.name_scopes"

MAX_TOKENS = 3840
"""The most tokens that an exported graph matches: TensorRT's TopK takes no more, and all pairs are
stored."""

# Batch 1 would be taken for a constant.
_EXAMPLE_BATCH = 2


def deployable(model: nn.Module) -> nn.Module:
    """A copy to export: on the processor, in float32, in evaluation mode, frozen."""
    ready = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    if is_merging(ready):
        freeze_(ready)
    for module in ready.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            # Folded masks may be views, and files hold whole tensors.
            whole = buffer.clone(memory_format=torch.contiguous_format)
            module.register_buffer(name, whole, persistent=name in module.state_dict())
    return ready


@torch.no_grad()
def trace(model: nn.Module, image_size: tuple[int, int] | None = None) -> ExportedProgram:
    """Trace a `deployable` network for any number of images of one size.

    LTMP is traced in its masked form, whose shapes do not depend on the images.
    """
    shape = channels_of(model), *image_size_of(model, image_size)
    device = next((p.device for p in model.parameters()), None)
    images = torch.zeros(_EXAMPLE_BATCH, *shape, device=device)
    with _matching_few_tokens(model):
        program = torch.export.export(model, (images,), dynamic_shapes=({0: Dim.DYNAMIC},))
    # Stack traces hold paths of this machine.
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


@contextmanager
def _matching_few_tokens(model: nn.Module) -> Iterator[None]:
    """Refuse a network that matches more than `MAX_TOKENS` tokens in a forward inside."""
    matched = [0]

    def note(_: nn.Module, __: Any, decision: Decision) -> None:
        if decision.merge.is_matched:
            matched.append(decision.merge.num_in)

    hooks = [merger.register_forward_hook(note) for _, merger in mergers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if max(matched) > MAX_TOKENS:
        raise ValueError(
            f"a network that matches {max(matched)} tokens cannot be exported, because at most "
            f"{MAX_TOKENS} can be sorted: take smaller images, or merge by a static mask "
            "(--method ltm:support=learned)"
        )


def save_program(program: ExportedProgram, path: Path) -> Path:
    """Write a traced network for `torch.export.load`.

    torch makes the archive in memory: its writer of files ends the process if the disk is full.
    """
    archive = io.BytesIO()
    torch.export.save(program, archive)
    write_bytes(path, archive.getvalue())
    return path


def save_onnx(program: ExportedProgram, path: Path, information: ModelInformation) -> Path:
    """Write a traced network as ONNX; its metadata say how images are prepared."""
    require("onnx")
    require("onnxscript")
    exported = to_onnx(program, input_names=[INPUT], output_names=[OUTPUT])
    graph_model: Any = exported.model
    _name_nodes_(graph_model)
    _name_batch_(graph_model)
    graph_model.producer_name = "ltm"
    graph_model.metadata_props.update(information.to_strings())
    exported.save(str(path), external_data=False)
    return path


def _name_nodes_(model: Any) -> None:
    """Name nodes by the module they come from, and drop the exporter's notes and stack traces."""
    seen: Counter[str] = Counter()
    for node in model.graph:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        # The last scope is the operation, the one before it the innermost module.
        module = scopes[-2] if len(scopes) > 1 else ""
        name = f"{module}/{node.op_type}"
        seen[name] += 1
        node.name = name if seen[name] == 1 else f"{name}_{seen[name]}"
        node.metadata_props.clear()
    model.graph.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()


def _name_batch_(model: Any) -> None:
    ir = require("onnx_ir")
    traced = model.graph.inputs[0].shape[0]
    outputs = [value for node in model.graph for value in node.outputs]
    for value in (*model.graph.inputs, *outputs):
        if value.shape is not None:
            value.shape = ir.Shape([BATCH if side == traced else side for side in value.shape])


def onnx_information(model: OnnxModel) -> ModelInformation:
    """What an ONNX file says about its images and classes."""
    try:
        return ModelInformation.from_strings(model.metadata)
    except ValueError as error:
        raise ValueError(f"{model.path}: {error}") from error


def save_openvino(source: Path, target: Path) -> Path:
    """Convert an ONNX file; weights go beside the .xml, with the ending .bin, in float32."""
    openvino = require("openvino")
    openvino.save_model(openvino.convert_model(str(source)), str(target), compress_to_fp16=False)
    return target


class OpenVinoModel:
    """An OpenVINO file on the processor: scores from images."""

    def __init__(self, path: Path) -> None:
        openvino = require("openvino")
        # Reduced precision is the default on some processors.
        settings = {"INFERENCE_PRECISION_HINT": "f32"}
        self._compiled: Any = openvino.Core().compile_model(str(path), "CPU", settings)

    def __call__(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self._compiled(images.float().cpu().numpy())[0].copy())


def save_package(program: ExportedProgram, path: Path) -> Path:
    """Compile a traced network for the device that it was traced on: C++ in a file, no Python.

    torch makes the archive in memory, as in `save_program`.
    """
    archive = io.BytesIO()
    torch._inductor.aoti_compile_and_package(program, package_path=archive)  # noqa: SLF001
    write_bytes(path, archive.getvalue())
    return path


class PackagedModel:
    """An AOTInductor package: scores from images."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._run: Any = torch._inductor.aoti_load_package(str(path))  # noqa: SLF001
        self._device = device

    def __call__(self, images: Tensor) -> Tensor:
        return self._run(images.to(self._device)).cpu()

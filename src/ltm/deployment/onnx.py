"""A network as one ONNX file: any batch size, with its preprocessing and class names inside."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from ltm.core.translation import to_onnx
from ltm.deployment.information import ModelInformation
from ltm.extras import require

SUFFIX = ".onnx"
INPUT, OUTPUT, BATCH = "images", "logits", "batch"

_SCOPES = "pkg.torch.onnx.name_scopes"


def save_onnx(program: ExportedProgram, path: Path, information: ModelInformation) -> Path:
    """Write a traced network as ONNX with everything needed to use it in its metadata."""
    for package in ("onnx", "onnxscript"):
        require(package, extra="export")
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
    ir = require("onnx_ir", extra="export")
    traced = model.graph.inputs[0].shape[0]
    outputs = [value for node in model.graph for value in node.outputs]
    for value in (*model.graph.inputs, *outputs):
        if value.shape is not None:
            value.shape = ir.Shape([BATCH if side == traced else side for side in value.shape])

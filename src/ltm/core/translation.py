"""Traced networks in ONNX, with what torch's own exporter cannot say: a stable sort."""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch.export import ExportedProgram


def to_onnx(
    program: ExportedProgram,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> torch.onnx.ONNXProgram:
    """A traced network as an ONNX program in memory; onnx and onnxscript must be installed."""
    with warnings.catch_warnings():
        # The exporter warns of its own deprecations, which are nothing to its users.
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            input_names=input_names,
            output_names=output_names,
            custom_translation_table=_translations(),
        )
    assert exported is not None
    return exported


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    return {torch.ops.aten.sort.stable: _stable_sort}


def _stable_sort(
    values: Any,
    stable: Any = None,  # noqa: ARG001 - part of the signature
    dim: int = -1,
    descending: bool = False,
) -> Any:
    """Among equals, TopK takes the lower index first: all of them, sorted, are a stable sort."""
    op = import_module("onnxscript").opset18
    length = op.Gather(op.Shape(values), op.Constant(value_ints=[dim]))
    return op.TopK(values, length, axis=dim, largest=int(descending), sorted=1)

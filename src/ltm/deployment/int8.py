"""Int8: weights and activations of the linear layers in eight bits, everything else in float.

Products of two activations (attention, matching) always stay in float: quantising them ruins
vision transformers. Most of the loss comes from what enters the second layer of each MLP, so the
accurate recipe stores that layer's weights as int8 but computes it in float.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from ltm.deployment.formats import INPUT
from ltm.extras import require


@dataclass(frozen=True, kw_only=True)
class Int8:
    """What becomes int8, and how its range is found."""

    ranges: Literal["static", "dynamic"] = "static"
    """From calibration images beforehand, or from each input while it runs."""
    weights_only: tuple[str, ...] = ()
    """Layers whose path ends in one of these keep int8 weights but compute in float."""
    convolutions: bool = False
    """Convolutions become int8 too; for networks that mostly consist of them."""
    description: str = ""


RECIPES = {
    "accurate": Int8(
        weights_only=("fc2",),
        description="linear layers; of the second of each MLP the weights only",
    ),
    "small": Int8(description="linear layers"),
    "dynamic": Int8(ranges="dynamic", description="linear layers, ranges found while it runs"),
    "convolutional": Int8(
        weights_only=("fc2",), convolutions=True, description="as accurate, and convolutions"
    ),
}
"""Settings by name. All but "dynamic" need calibration images."""


def quantise_onnx(
    source: Path, target: Path, recipe: Int8, calibration: Iterable[Tensor] = ()
) -> int:
    """Write an int8 version of an ONNX file; returns how many layers became int8.

    `calibration` gives batches of images of the kind that the network will see, without labels.
    """
    onnx, ort = require("onnx"), require("onnxruntime.quantization")
    model = onnx.load(str(source))
    kinds = ["MatMul", "Gemm", *(["Conv"] if recipe.convolutions else [])]
    computed, stored = _layers(model, kinds, recipe)
    if not computed:
        raise ValueError(f"{source} has no layers that could become int8 with these settings")
    metadata = list(model.metadata_props)
    # Notes on the shapes of weights contradict the transposed copies that the quantiser makes.
    del model.graph.value_info[:]
    common: dict[str, Any] = {
        "nodes_to_quantize": computed,
        "op_types_to_quantize": kinds,
        "per_channel": True,
    }
    with _quiet():
        if recipe.ranges == "dynamic":
            ort.quantize_dynamic(model, target, **common)
        else:
            ort.quantize_static(
                model,
                target,
                _Reader(calibration),
                activation_type=ort.QuantType.QUInt8,
                weight_type=ort.QuantType.QInt8,
                extra_options={"MatMulConstBOnly": True},
                **common,
            )
    quantised = onnx.load(str(target))
    for name in stored:
        _store_as_int8_(quantised, name)
    # The quantiser keeps no metadata, but preprocessing and class names are the same.
    del quantised.metadata_props[:]
    quantised.metadata_props.extend(metadata)
    quantised.producer_name = "ltm"
    onnx.save(quantised, str(target))
    return len(computed) + len(stored)


def quantise_torch_(model: nn.Module, recipe: Int8) -> int:
    """Make linear layers int8 in place by torchao; returns how many.

    Weights per channel, activations per token while it runs: it needs no calibration images.
    """
    torchao = require("torchao.quantization")
    stored = {path for path in _linears(model) if path.endswith(recipe.weights_only or ("\0",))}
    computed = _linears(model) - stored
    if not computed:
        raise ValueError("model: it has no linear layers that could become int8")
    both = torchao.Int8DynamicActivationInt8WeightConfig()
    torchao.quantize_(model, both, lambda _, path: path in computed)
    if stored:
        weights = torchao.Int8WeightOnlyConfig()
        torchao.quantize_(model, weights, lambda _, path: path in stored)
    return len(computed) + len(stored)


def _linears(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}


def _layers(model: Any, kinds: list[str], recipe: Int8) -> tuple[list[str], list[str]]:
    """Nodes that are computed in int8, and nodes that only store their weights in int8."""
    weights = {initializer.name for initializer in model.graph.initializer}
    computed: list[str] = []
    stored: list[str] = []
    for node in model.graph.node:
        if node.op_type not in kinds or node.input[1] not in weights:
            continue  # a product of two activations has no weights
        path = node.name.rpartition("/")[0]
        weights_only = node.op_type == "MatMul" and path.endswith(recipe.weights_only or ("\0",))
        (stored if weights_only else computed).append(node.name)
    return computed, stored


def _store_as_int8_(model: Any, name: str) -> None:
    """Keep the weights of a product as int8, one scale per output channel, and compute in float."""
    onnx = require("onnx")
    place, node = next((i, n) for i, n in enumerate(model.graph.node) if n.name == name)
    weight = next(w for w in model.graph.initializer if w.name == node.input[1])
    values = onnx.numpy_helper.to_array(weight)
    scale = np.maximum(np.abs(values).max(axis=0), 1e-12) / 127
    rounded = np.round(values / scale).astype(np.int8)
    model.graph.initializer.remove(weight)
    parts = {"int8": rounded, "scale": scale.astype(np.float32)}
    for part, array in parts.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, f"{weight.name}_{part}"))
    inputs = [f"{weight.name}_{part}" for part in parts]
    output = f"{weight.name}_float"
    restored = onnx.helper.make_node("DequantizeLinear", inputs, [output], f"{name}_weight", axis=1)
    node.input[1] = output
    model.graph.node.insert(place, restored)


class _Reader:
    """Calibration batches as ONNX Runtime asks for them."""

    def __init__(self, batches: Iterable[Tensor]) -> None:
        self._batches, self._empty = iter(batches), True

    def get_next(self) -> dict[str, Any] | None:
        """The next batch, or None at the end."""
        images = next(self._batches, None)
        if images is None and self._empty:
            raise ValueError("calibration: static ranges need images, and there are none")
        self._empty = False
        return None if images is None else {INPUT: images.float().cpu().numpy()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the quantiser, which logs advice that is followed already."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(before)

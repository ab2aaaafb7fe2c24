"""An ONNX file as OpenVINO's own format, where OpenVINO is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ltm.extras import require

SUFFIX = ".xml"


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

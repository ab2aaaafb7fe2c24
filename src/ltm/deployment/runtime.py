"""Run an ONNX file as if it were the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ltm.deployment.information import ModelInformation
from ltm.extras import require


class OnnxModel:
    """An ONNX file of `ltm export` in ONNX Runtime on the processor: scores from images."""

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        onnxruntime = require("onnxruntime", extra="export")
        if not path.is_file():
            raise FileNotFoundError(f"model is {path}: there is no such file")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 3
        # Its threads would otherwise keep the processor from what comes between two batches.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its own exceptions have no common base
            raise ValueError(f"{path} is no ONNX model that can be run: {_line(error)}") from error
        self.path = path
        self._input = self.session.get_inputs()[0].name
        self.num_classes = int(self.session.get_outputs()[0].shape[-1])

    @property
    def information(self) -> ModelInformation:
        """What the file says about its images and classes."""
        entries = self.session.get_modelmeta().custom_metadata_map
        try:
            return ModelInformation.from_strings(entries)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def __call__(self, images: Tensor) -> Tensor:
        outputs: Any = self.session.run(None, {self._input: images.float().cpu().numpy()})
        return torch.from_numpy(outputs[0])


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

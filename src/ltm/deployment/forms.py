"""Forms in which a network is deployed: its ONNX file, and the lines of code that run a form.

The modes of `evaluation.modes` run a network in memory. Here ONNX Runtime runs the file that the
user gets, so the same file is timed, compared and written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from ltm.data.transforms import ImageSpec
from ltm.deployment.formats import deployable, save_onnx, trace
from ltm.deployment.information import ModelInformation
from ltm.evaluation.modes import OnnxModel

ONNX_FILE = "model.onnx"


class OnnxFiles:
    """The ONNX files of networks, each written when it is first asked for, for any batch size.

    This is a mode: called on a network, it gives its runner.
    """

    def __init__(self, folder: Path, information: Callable[[nn.Module], ModelInformation]) -> None:
        self.folder, self._information = folder, information
        self._files: dict[nn.Module, OnnxModel] = {}

    def __call__(self, model: nn.Module, _images: Tensor | None = None) -> OnnxModel:
        if model not in self._files:
            path = self.folder / f"{len(self._files)}.onnx"
            information = self._information(model)
            traced = trace(deployable(model), information.spec.size)
            self._files[model] = OnnxModel(save_onnx(traced, path, information))
        return self._files[model]


_LOAD = """\
import ltm, timm, torch
from PIL import Image, ImageOps
model = ltm.load("{folder}"){placed}
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")
image = transform(photo)[None]{placed}
"""
_EAGER = """\
with torch.inference_mode(): scores = model(image)
"""
_COMPILED = """\
with torch.inference_mode(): scores = torch.compile(model, dynamic=False)(image)
"""
_GRAPH = """\
run = ltm.capture({network}, image)  # once, for batches of at most this size
scores = run(image)
"""
_ONNX = """\
import numpy, onnxruntime
from PIL import Image, ImageOps
session = onnxruntime.InferenceSession("{folder}/model.onnx")
photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")
image = ImageOps.fit(photo, {resized}, {method}){cropped}
pixels = (numpy.asarray(image) / 255 - {mean}) / {std}
scores = session.run(None, {{"images": pixels.astype("float32").transpose(2, 0, 1)[None]}})[0]
"""
_CODE = {
    "eager": _LOAD + _EAGER,
    "compiled": _LOAD + _COMPILED,
    "cudagraph": _LOAD + _GRAPH.format(network="model"),
    "compiled-cudagraph": _LOAD + _GRAPH.format(network="torch.compile(model, dynamic=False)"),
    "onnxruntime": _ONNX,
}
_RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}


def code_for(form: str, folder: str, spec: ImageSpec) -> str:
    """The lines that run a saved network in a form on a photo; `scores` has one for each class."""
    height, width = spec.size
    resized = (math.floor(width / spec.crop_ratio), math.floor(height / spec.crop_ratio))
    left, top = round((resized[0] - width) / 2), round((resized[1] - height) / 2)
    box = (left, top, left + width, top + height)
    return _CODE[form].format(
        folder=folder,
        placed=".cuda()" if "cudagraph" in form else "",
        resized=resized,
        cropped=f".crop({box})" if resized != (width, height) else "",
        method=_RESAMPLING.get(spec.interpolation, 3),
        mean=list(spec.mean),
        std=list(spec.std),
    )

"""Packages that only some users need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXTRAS = {
    "onnx": "ltm[export]",
    "onnx_ir": "ltm[export]",
    "onnxscript": "ltm[export]",
    "onnxruntime": "ltm[export]",
    "torchao": "ltm[export]",
    "gradio": "ltm[web]",
}
"""Where to get a package, unless it is its own name."""


def optional(module: str) -> Any:
    """Import a module, or say in a ValueError how to install it."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        source = _EXTRAS.get(package, package.replace("_", "-"))
        raise ValueError(
            f"{package} is not installed, and this needs it: pip install '{source}'"
        ) from error

"""Packages that only some users need: one function imports them, or names the extra to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXTRA_OF = {
    "rich": "cli",
    "tyro": "cli",
    "webdataset": "cli",
    "matplotlib": "report",
    "lightning": "train",
    "peft": "train",
    "tensorboard": "train",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "torchao": "export",
    "gradio": "web",
    "faster_coco_eval": "detection",
    "pycocotools": "detection",
}
"""Which extra installs a module that some of ours import at their top."""


class MissingExtraError(ModuleNotFoundError, ValueError):
    """An optional package is not installed."""


def require(module: str, *, extra: str | None = None) -> Any:
    """Import an optional module, or say in one sentence how to install it.

    Args:
        module: its name, such as `onnx` or `onnxruntime.quantization`.
        extra: the extra of `ltm` that installs it; None for a package that no extra installs.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        source = package.replace("_", "-") if extra is None else f"'ltm[{extra}]'"
        raise MissingExtraError(_sentence(package, source), name=package) from error


def named(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error of an import, with the extra to install where an extra of `ltm` has the module."""
    package = (error.name or "").partition(".")[0]
    if isinstance(error, MissingExtraError) or package not in _EXTRA_OF:
        return error
    return MissingExtraError(_sentence(package, f"'ltm[{_EXTRA_OF[package]}]'"), name=package)


def _sentence(package: str, source: str) -> str:
    return f"{package} is not installed, and this needs it: pip install {source}"

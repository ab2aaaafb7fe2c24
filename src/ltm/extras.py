"""Packages that only some users need: one function imports them, or names the extra to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any


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
        raise MissingExtraError(
            f"{package} is not installed, and this needs it: pip install {source}", name=package
        ) from error

"""Imports on demand: names when they are first used, and packages that only some users need.

A package that is not installed is named in one sentence, with the extra that installs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

_EXTRA_OF = {
    "rich": "cli",
    "tyro": "cli",
    "webdataset": "cli",
    "matplotlib": "report",
    "lightning": "train",
    "peft": "train",
    "transformers": "transformers",
    "tensorboard": "train",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "torchao": "export",
    "gradio": "web",
    "faster_coco_eval": "detection",
    "pycocotools": "detection",
    "pyarrow": "scale",
    "ray": "ray",
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


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`: each name is imported from its home when first used.

    Args:
        package: its `__name__`.
        homes: the names that each module holds.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(home_of[name]), name)
        except ModuleNotFoundError as error:
            raise named(error) from error
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(home_of)


def named(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error of an import, with the extra to install where an extra of `ltm` has the module."""
    package = (error.name or "").partition(".")[0]
    if isinstance(error, MissingExtraError) or package not in _EXTRA_OF:
        return error
    return MissingExtraError(_sentence(package, f"'ltm[{_EXTRA_OF[package]}]'"), name=package)


def _sentence(package: str, source: str) -> str:
    return f"{package} is not installed, and this needs it: pip install {source}"

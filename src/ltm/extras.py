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
    "braceexpand": "cli",
    "matplotlib": "report",
    "lightning": "train",
    "peft": "train",
    "transformers": "transformers",
    "tensorboard": "train",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "onnx_ir": "export",
    "torchao": "export",
    "gradio": "web",
    "faster_coco_eval": "detection",
    "pycocotools": "detection",
    "pyarrow": "scale",
    "ray": "ray",
    "open_clip": "clip",
    "torch_pruning": "reproduction",
}
"""The extra that installs a package; a package that is not listed is installed by its own name."""


class MissingExtraError(ModuleNotFoundError, ValueError):
    """An optional package is not installed."""


def require(module: str) -> Any:
    """Import an optional module, such as `onnxruntime.quantization`, or say how to install it."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise _missing(package) from error


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
    """The error of an import; it names the extra that installs the package, if one does."""
    package = (error.name or "").partition(".")[0]
    if isinstance(error, MissingExtraError) or package not in _EXTRA_OF:
        return error
    return _missing(package)


def _missing(package: str) -> MissingExtraError:
    extra = _EXTRA_OF.get(package)
    source = package.replace("_", "-") if extra is None else f"'ltm[{extra}]'"
    said = f"{package} is not installed, and this needs it: pip install {source}"
    return MissingExtraError(said, name=package)

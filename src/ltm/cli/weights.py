"""Weights of other people: read without unpickling, and loaded strictly or not at all."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")
_PICKLED = (".pth", ".pt", ".bin", ".tar", ".ckpt")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict in float32, whatever it is stored in; nothing but tensors is unpickled."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise FileNotFoundError(f"weights is {path}: there is no such file")
    suffix = path.suffix.lower()
    try:
        if suffix == ".safetensors":
            stored: Any = load_file(path)
        elif suffix in _PICKLED:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about files that are refused in a moment
                stored = torch.load(path, map_location="cpu", weights_only=True)
        else:
            known = ", ".join((".safetensors", *_PICKLED))
            raise ValueError(f"weights is {path}: its name must end in one of {known}")
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        raise ValueError(
            f"weights {path} cannot be read ({first_line(error)}): the file is damaged, or holds "
            "more than tensors; copy it again or save its state dict"
        ) from error
    for wrapper in _WRAPPERS:
        if isinstance(stored, Mapping) and isinstance(stored.get(wrapper), Mapping):
            stored = stored[wrapper]
    if not isinstance(stored, Mapping):
        raise ValueError(f"weights {path} hold a {type(stored).__name__}, not a state dict")
    tensors = {_bare(name): value for name, value in stored.items() if torch.is_tensor(value)}
    return {
        name: value.float() if value.is_floating_point() else value
        for name, value in tensors.items()
    }


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def misfits(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """What keeps weights from loading strictly."""
    own = model.state_dict()
    missing = [f"{name} is missing" for name in own if name not in weights]
    unknown = [f"{name} is unknown" for name in weights if name not in own]
    shapes = [
        f"{name} is {tuple(weights[name].shape)} instead of {tuple(value.shape)}"
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    return shapes + missing + unknown


def load_weights_(model: nn.Module, name: str, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load weights strictly, or say what does not fit."""
    found = misfits(model, weights)
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"weights {path} do not fit {name}: {'; '.join(found[:3])}{more}; name the model "
            "that they were saved from"
        )
    model.load_state_dict(weights, strict=True)


def first_line(error: BaseException) -> str:
    """Return an error's first line, which fits into a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")

"""Read and write saved folders: what `config.json` may contain, and how weights are checked.

A folder is data. Only known entries of the right types are read, and nothing in a folder can start
a download, name a file outside it, or ask for a network much larger than its weights.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save as save_tensors
from timm.models import build_model_with_cfg
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ltm.adapters.base import adapters, import_families
from ltm.adapters.conversion import mergers_of
from ltm.core.finite import require_finite
from ltm.core.validation import check_entries, first_line
from ltm.extras import require
from ltm.files import complete, read_json, results_in, write_bytes, write_json

CONFIG = "config.json"
WEIGHTS = "model.safetensors"

_CHECKSUMS = "checksums"
_PLAIN = (str, int, float, bool, type(None))
_Texts = tuple[str, ...]

# --- What may be in config.json ------------------------------------------------------------------

_NETWORK: dict[str, Any] = {
    "architecture": str,
    "num_classes": int,
    "num_features": int,
    "model_args": dict[str, Any],
    "pretrained_cfg": dict[str, Any] | None,
    "fingerprint": str,
    "token_merging": dict[str, Any],
    "label_names": _Texts | None,
    "label_descriptions": dict[str, str] | None,
}
_DETECTOR: dict[str, Any] = {
    "task": str,
    "detector": dict[str, Any],
    "token_merging": dict[str, Any] | None,
    "host": dict[str, Any] | None,
    "categories": tuple[dict[str, Any], ...],
}
_OF_OTHERS: dict[str, Any] = dict.fromkeys(
    (
        "global_pool",  # timm's
        "_name_or_path",  # transformers'
        "architectures",
        "do_pooling",
        "dtype",
        "id2label",
        "initializer_range",
        "label2id",
        "model_type",
        "num_labels",
        "problem_type",
        "torch_dtype",
        "transformers_version",
    ),
    Any,
)
"""Other entries that timm and transformers write; they are never read."""
_IMAGES: dict[str, Any] = {
    "architecture": str | None,
    "input_size": tuple[int, int, int],
    "test_input_size": tuple[int, int, int] | None,
    "min_input_size": tuple[int, int, int] | None,
    "fixed_input_size": bool,
    "interpolation": str,
    "crop_pct": float | None,
    "test_crop_pct": float | None,
    "crop_mode": str | None,
    "mean": tuple[float, ...],
    "std": tuple[float, ...],
    "num_classes": int,
    "label_offset": int | None,
    "label_names": _Texts | None,
    "label_descriptions": dict[str, str] | None,
    "pool_size": tuple[int, ...] | None,
    "test_pool_size": tuple[int, ...] | None,
    "first_conv": str | _Texts | None,
    "classifier": str | _Texts | None,
    "license": str | None,
    "description": str | None,
    "origin_url": str | None,
    "paper_name": str | None,
    "paper_ids": str | _Texts | None,
    "notes": str | _Texts | None,
}
"""Entries of timm's `pretrained_cfg`."""
_SOURCES = (
    "tag",
    "url",
    "file",
    "hf_hub_id",
    "hf_hub_filename",
    "source",
    "custom_load",
    "state_dict",
)
"""Where timm got the weights of a network: allowed, but never read."""


def image_entries(known: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of timm's `pretrained_cfg` that a folder keeps: all but the origin of weights."""
    return {name: value for name, value in known.items() if name in _IMAGES}


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a saved network or detector; a ValueError names what is wrong."""
    path = folder / CONFIG
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no entries; copy it again")
    own = _DETECTOR if "detector" in config or "task" in config else _NETWORK
    if is_pretrained(config):  # `make_pretrained` checks the settings of transformers
        own = {**dict.fromkeys(config, Any), **own}
    try:
        check_entries(config, {**own, **_OF_OTHERS, _CHECKSUMS: dict[str, str]})
        known = config.get("pretrained_cfg")
        if known is not None:
            check_entries(known, {**_IMAGES, **dict.fromkeys(_SOURCES, Any)}, "pretrained_cfg.")
            config["pretrained_cfg"] = image_entries(known)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return config


# --- Checksums -----------------------------------------------------------------------------------


def write_folder(model: nn.Module, folder: Path, config: Mapping[str, Any]) -> None:
    """Write the weights of a model and its description, with checksums of both."""
    empty = unset(model)
    tensors = {n: value.contiguous() for n, value in model.state_dict().items() if n not in empty}
    require_own(folder)
    with results_in(folder) as aside:
        write_bytes(aside / WEIGHTS, save_tensors(tensors, metadata={"format": "pt"}))
        write_config(aside, config)


def unset(model: nn.Module) -> set[str]:
    """Keys of merger tensors that were never set, such as class statistics never collected.

    They are not written, so that timm can load the weights into its own network.
    """
    return {
        f"{path}.{name}" for path, merger in mergers_of(model).items() for name in merger.unset()
    }


def require_own(folder: Path) -> None:
    """Raise an error if writing would replace a model that ltm has not written."""
    complete(folder)
    there = [name for name in (CONFIG, WEIGHTS) if (folder / name).exists()]
    if not there:
        return
    try:
        known = read_json(folder / CONFIG)
    except (OSError, ValueError):
        known = None
    if not isinstance(known, dict) or not {"token_merging", _CHECKSUMS} & known.keys():
        raise FileExistsError(
            f"folder {folder} has a {there[0]} that ltm has not written, and that would be "
            "replaced: choose another folder"
        )


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the description of a folder whose weights are already written."""
    entries = {name: value for name, value in config.items() if name != _CHECKSUMS}
    sums = {CONFIG: _checksum(entries), WEIGHTS: _file_checksum(folder / WEIGHTS)}
    write_json(folder / CONFIG, {**entries, _CHECKSUMS: sums})


def read_tensors(
    folder: Path, config: Mapping[str, Any], *, verify: bool = True
) -> dict[str, Tensor]:
    """Read the weights of a folder; `verify` compares weights and config with their checksums.

    Folders of 0.1.0 have no checksums.
    """
    path = folder / WEIGHTS
    if verify and (sums := config.get(_CHECKSUMS)) is not None:
        if sums.get(CONFIG) != _checksum(config):
            raise ValueError(
                f"{folder / CONFIG} is not as it was saved: copy the folder again, or turn verify "
                "off if you have edited it"
            )
        if sums.get(WEIGHTS) != _file_checksum(path):
            raise ValueError(
                f"{path} has damaged weights, other than those that were saved: copy the folder "
                "again, or turn verify off if you have changed them"
            )
    try:
        weights = load_file(path)
        require_finite(weights)
    except (SafetensorError, ValueError, RuntimeError, KeyError, OverflowError) as error:
        raise ValueError(
            f"{path} has damaged weights ({first_line(error)}): copy or save it again"
        ) from error
    return weights


def _checksum(config: Mapping[str, Any]) -> str:
    """A checksum of the entries of a config that this library reads."""
    entries = {n: v for n, v in config.items() if n in _NETWORK or n in _DETECTOR}
    if entries.get("pretrained_cfg"):
        entries["pretrained_cfg"] = image_entries(entries["pretrained_cfg"])
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- From entries to a network -------------------------------------------------------------------

_NAME = re.compile(r"\w+(\.\w+)?", re.ASCII)
_LARGEST = 10**6
"""The largest number among the arguments of a network."""
_LARGEST_SIDE = 2**14
_HARMLESS = ("scriptable", "exportable", "no_jit")
FACTORY_ARGUMENTS = frozenset(
    name
    for function in (timm.create_model, build_model_with_cfg)
    for name, parameter in inspect.signature(function).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD and name not in _HARMLESS
) | {"features_only", "out_indices", "feature_cls", "pruned", "pretrained_model_args"}
"""Arguments that make timm load weights, read files or make something other than a network."""


def make_host(
    architecture: str, arguments: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> nn.Module:
    """Make the network of timm that a folder names, without weights; a ValueError if it cannot."""
    check_host(architecture, arguments, weights)
    return timm.create_model(architecture, pretrained=False, **arguments)


def is_pretrained(config: Mapping[str, Any]) -> bool:
    """Whether the network of a folder is one of transformers."""
    return "model_type" in config and "architecture" not in config


_NOT_SETTINGS = frozenset({*_NETWORK, _CHECKSUMS, "architectures"})
"""Entries that are no settings of a network of transformers."""
_ACTED_ON = frozenset(
    {"auto_map", "quantization_config", "attn_implementation", "experts_implementation"}
)
"""Entries that make transformers run other code, some of it from the hub. So do its private ones,
which begin with an underscore."""


def known_networks() -> dict[str, Any]:
    """The classes of transformers that can be made, by name."""
    import_families(["transformers"])
    return {kind.__name__: kind for adapter in adapters() for kind in adapter.networks()}


def make_pretrained(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    """Make the network of transformers that a folder names, without weights."""
    require("transformers")
    known = known_networks()
    named = config.get("architectures") or [None]
    if not isinstance(named, list) or named[0] not in known:
        raise ValueError(
            f"architectures is {named!r:.80}; known are {', '.join(sorted(known))}: give a model "
            "made like the saved one"
        )
    kind = known[named[0]]
    settings = settings_of(kind, config)
    require_fit(kind, settings, weights)
    return kind(settings)


def require_fit(kind: Any, settings: Any, weights: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a network of transformers is much larger than its weights."""
    most, room = _limits(weights)
    with torch.device("meta"), _at_most(most):
        _require_room(kind(settings), room)


def settings_of(kind: Any, config: Mapping[str, Any]) -> Any:
    """The settings of a network of transformers, of plain values alone."""
    entries = _inert({name: value for name, value in config.items() if name not in _NOT_SETTINGS})
    for name, value in entries.items():
        _check_setting(name, value)
    return kind.config_class.from_dict(entries)


def _inert(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries without those that transformers would act on, in groups too."""
    return {
        name: _inert(cast("Mapping[str, Any]", value)) if isinstance(value, dict) else value
        for name, value in entries.items()
        if not name.startswith("_") and name not in _ACTED_ON
    }


def _check_setting(name: str, value: Any) -> None:
    """Raise a ValueError unless a setting is a plain value or a group of plain values."""
    if isinstance(value, dict):
        for inner, each in cast("Mapping[str, Any]", value).items():
            _check_setting(f"{name}.{inner}", each)
    else:
        _check_plain(name, value)


def _limits(weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """The most layers and the most numbers that a network with these weights may have.

    Networks have hardly more layers than tensors, and few buffers that are not saved.
    """
    return 20 * len(weights) + 1000, 4 * sum(w.numel() for w in weights.values()) + 2**24


def check_host(
    architecture: str, arguments: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> None:
    """Raise a ValueError unless timm can make the network and `weights` fill it; uses no memory."""
    if not _NAME.fullmatch(architecture) or not timm.is_model(architecture.partition(".")[0]):
        raise ValueError(
            f"architecture is {architecture!r:.80}, no network of timm: give a model made like "
            "the saved one"
        )
    for name, value in arguments.items():
        _check_argument(name, value)
    most, room = _limits(weights)
    try:
        with torch.device("meta"), _at_most(most):
            outline = timm.create_model(architecture, pretrained=False, **arguments)
        _require_room(outline, room)
    except Exception as error:  # timm's networks fail in ways of their own
        raise ValueError(
            f"timm cannot make {architecture} with its model_args ({first_line(error)})"
        ) from error


def _require_room(outline: nn.Module, room: int) -> None:
    needed = sum(tensor.numel() for tensor in (*outline.parameters(), *outline.buffers()))
    if needed > room:
        raise ValueError(f"it asks for {needed} numbers, more than its weights hold")


def _check_argument(name: str, value: Any) -> None:
    """Raise a ValueError unless an argument is a plain setting of a network."""
    if name in FACTORY_ARGUMENTS or not name.isidentifier():
        raise ValueError(f"model_args: {name:.80} is no setting of a network")
    _check_plain(f"model_args: {name}", value)


def _check_plain(name: str, value: Any) -> None:
    """Raise a ValueError unless a value is plain, or a list of plain values."""
    if isinstance(value, list | tuple):
        for each in cast("Sequence[Any]", value):
            _check_plain(name, each)
        return
    number = isinstance(value, int | float)
    if not isinstance(value, _PLAIN) or (number and not abs(value) <= _LARGEST):
        raise ValueError(
            f"{name:.80} is {value!r:.80}; it must be a word, a flag or a number up to {_LARGEST}"
        )


@contextmanager
def _at_most(most: int) -> Iterator[None]:
    """Raise a ValueError if a network with more layers is made inside, in this thread."""
    count, here = 0, threading.get_ident()

    def note(*_: object) -> None:
        nonlocal count
        count += threading.get_ident() == here
        if count > most:
            raise ValueError("it has more layers than its weights")

    handle = register_module_module_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()


def check_image_size(size: Sequence[int]) -> None:
    """Raise a ValueError for an image size that no network can have been saved for."""
    if not all(1 <= side <= _LARGEST_SIDE for side in size):
        raise ValueError(
            f"image_size is {tuple(size)!r:.80}; sides must be from 1 to {_LARGEST_SIDE}."
        )


@contextmanager
def refused(folder: Path) -> Iterator[None]:
    """Turn any error inside into a ValueError of one sentence that names the folder."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{folder / CONFIG}: {first_line(error)}.") from error


def saved_folder(folder: Path) -> Path:
    """The folder of a saved network, given that folder or the one of a training run."""
    complete(folder)
    inner = folder / "model"
    return inner if not (folder / CONFIG).is_file() and (inner / CONFIG).is_file() else folder

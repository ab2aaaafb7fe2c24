"""Open a network of Hugging Face transformers, from the hub or a folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ltm.adapters.base import select_adapter
from ltm.api.folders import check_image_size, known_networks, require_fit, settings_of
from ltm.core.validation import first_line
from ltm.extras import require
from ltm.files import read_json

SCHEME = "hf:"
"""The prefix of names of transformers."""
_SECONDS_TO_REACH = 10.0
_RESAMPLING: dict[Any, str] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""PIL's numbers, as processors store them."""


@contextmanager
def reaching_hub() -> Iterator[str]:
    """Look in the cache alone if the hub cannot be reached, and give its address; else "".

    Its client would retry for a minute.
    """
    from huggingface_hub import constants  # noqa: PLC0415 - slow
    from huggingface_hub.utils import get_session  # noqa: PLC0415

    before, unreached = constants.HF_HUB_OFFLINE, ""
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS_TO_REACH)
    except Exception:  # noqa: BLE001 - its HTTP library changes, and the errors with it
        constants.HF_HUB_OFFLINE, unreached = True, constants.ENDPOINT
    try:
        yield unreached
    finally:
        constants.HF_HUB_OFFLINE = before


def open_pretrained(name: str) -> nn.Module:
    """Load a network with its weights; a classifier takes images and returns scores.

    No code of the hub runs, and nothing is unpickled.

    Args:
        name: a name on the hub, or a folder that `save_pretrained` wrote.
    """
    require("transformers")
    with nullcontext("") if Path(name).exists() else reaching_hub() as unreached:
        model: Any = load_pretrained(name, known_networks(), unreached)
        return _prepared_(model, preprocessing(name, model.config), name)


def load_pretrained(name: str, known: Mapping[str, Any], unreached: str = "") -> nn.Module:
    """Load a network with its weights, as one of the known classes.

    A folder is data, whoever wrote it: see `ltm.api.folders`.
    """
    transformers = require("transformers")
    try:
        entries: dict[str, Any] = transformers.PretrainedConfig.get_config_dict(name)[0]
        kind: str = entries["model_type"]
    except Exception as error:  # transformers and its hub fail in ways of their own
        reason = f"{unreached} cannot be reached" if unreached else first_line(error)
        raise ValueError(
            f"model {SCHEME}{name} cannot be found ({reason}): give a name of the hub, or a folder "
            "with a config.json of transformers"
        ) from error
    named = str((entries.get("architectures") or [kind])[0])
    if named not in known:
        raise ValueError(
            f"model {SCHEME}{name} is a {named:.80}; known are {', '.join(sorted(known))}"
        )
    try:
        settings = settings_of(known[named], entries)
        require_fit(known[named], settings, _outline(name))
        return known[named].from_pretrained(name, config=settings, use_safetensors=True)
    except Exception as error:
        raise ValueError(
            f"the weights of model {SCHEME}{name} cannot be read ({first_line(error)}): it needs a "
            "model.safetensors that fits its config.json"
        ) from error


_WEIGHTS_FILE = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)


def _outline(name: str) -> dict[str, Tensor]:
    """The shapes of a network's weights, as tensors on `meta`."""
    found: dict[str, Tensor] = {}
    for path in _weight_files(name):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - no dictionary
                found[key] = torch.empty(file.get_slice(key).get_shape(), device="meta")
    return found


def _weight_files(name: str) -> list[str]:
    """The files that hold a network's weights, none of them outside its folder."""
    file = partial(require("transformers.utils").cached_file, name)
    if (Path(name) / "adapter_config.json").is_file():
        raise ValueError("it is an adapter of another network; merge the two first")
    whole: str | None = file("model.safetensors", _raise_exceptions_for_missing_entries=False)
    if whole is not None:
        return [whole]
    index: dict[str, Any] = read_json(Path(file("model.safetensors.index.json")))
    names = sorted(set(index["weight_map"].values()))
    for each in names:
        if not _WEIGHTS_FILE.fullmatch(each):
            raise ValueError(f"weight_map names {each!r:.80}, no .safetensors file beside it")
    return [file(each) for each in names]


def _prepared_(model: nn.Module, images: Mapping[str, Any], name: str) -> nn.Module:
    """Add what verbs need: scores, the preprocessing of images, class names."""
    host = cast("Any", model)
    labels = getattr(host.config, "id2label", None) or {}
    names = [labels[index] for index in sorted(labels)]
    told = any(label != f"LABEL_{index}" for index, label in enumerate(names))
    host.pretrained_cfg = {
        **images,
        "architecture": f"{SCHEME}{name}",
        "num_classes": len(names),
        **({"label_names": names} if told else {}),
    }
    give_scores_(model)
    return model.eval()


def give_scores_(model: nn.Module) -> None:
    """Make a classifier of transformers return scores, as timm's networks do."""
    select_adapter(model).give_scores_(model)


def preprocessing(name: str, config: Any) -> dict[str, Any]:
    """The preprocessing of the network's image processor, as entries of timm."""
    transformers = require("transformers")
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        stored = processor.to_dict()
    except (OSError, ValueError):  # there is no processor
        stored = {}
    vision = getattr(config, "vision_config", config)
    try:
        entries = processor_entries(stored, int(getattr(vision, "image_size", 224)))
        check_image_size(entries["input_size"][1:])
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"model {SCHEME}{name}: the settings of its image processor are not readable "
            f"({first_line(error)})"
        ) from error
    return entries


def processor_entries(stored: Mapping[str, Any], side: int) -> dict[str, Any]:
    """A processor's settings as entries of timm.

    A size with height and width squashes images; a shortest edge is cropped if the processor crops.
    """
    size: Mapping[str, Any] = stored.get("size") or {}
    crops = bool(stored.get("do_center_crop"))
    crop: Mapping[str, Any] = (stored.get("crop_size") if crops else None) or {}
    height = int(crop.get("height") or size.get("height") or side)
    width = int(crop.get("width") or size.get("width") or side)
    edge = size.get("shortest_edge") or (size.get("height") if crops else None)
    entries: dict[str, Any] = {
        "input_size": (3, height, width),
        "crop_pct": min(1.0, height / edge) if edge else 1.0,
        "crop_mode": "center" if edge else "squash",
        "interpolation": _RESAMPLING.get(stored.get("resample"), "bicubic"),
    }
    for ours, theirs in (("mean", "image_mean"), ("std", "image_std")):
        entries[ours] = tuple(map(float, stored.get(theirs) or (0.5, 0.5, 0.5)))
    return entries

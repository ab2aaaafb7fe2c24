"""Open a network of Hugging Face transformers, from the hub or a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from torch import nn

from ltm.adapters.base import select_adapter
from ltm.api.folders import known_networks
from ltm.core.validation import first_line
from ltm.extras import require

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
    transformers = require("transformers")
    with nullcontext("") if Path(name).exists() else reaching_hub() as unreached:
        return _opened(name, transformers, unreached)


def _opened(name: str, transformers: Any, unreached: str) -> nn.Module:
    known = known_networks()
    try:
        config: Any = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = f"{unreached} cannot be reached" if unreached else first_line(error)
        raise ValueError(
            f"model {SCHEME}{name} cannot be found ({reason}): give a name of the hub, or a folder "
            "with a config.json of transformers"
        ) from error
    named = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    if named not in known:
        raise ValueError(f"model {SCHEME}{name} is a {named}; known are {', '.join(sorted(known))}")
    try:
        model: nn.Module = known[named].from_pretrained(name, use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the weights of model {SCHEME}{name} cannot be read ({first_line(error)}): it needs a "
            "model.safetensors that fits its config.json"
        ) from error
    return _prepared_(model, preprocessing(name, config), name)


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
        stored = transformers.AutoImageProcessor.from_pretrained(name).to_dict()
    except (OSError, ValueError):  # there is no processor
        stored = {}
    vision = getattr(config, "vision_config", config)
    return processor_entries(stored, int(getattr(vision, "image_size", 224)))


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
        entries[ours] = tuple(stored.get(theirs) or (0.5, 0.5, 0.5))
    return entries

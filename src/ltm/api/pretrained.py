"""Networks of Hugging Face transformers by name: of the hub, or of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from torch import nn

from ltm.adapters.base import adapters, import_families, select_adapter
from ltm.core.validation import first_line
from ltm.extras import require

SCHEME = "hf:"
"""How a name of transformers begins."""
_SECONDS_TO_REACH = 10.0
_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""PIL's numbers, which processors store."""


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
    """A network with its weights, which takes images and gives scores where it has classes.

    No code of the hub runs, and nothing is unpickled.

    Args:
        name: of the hub, or a folder that `save_pretrained` wrote.
    """
    transformers = require("transformers")
    import_families(["transformers"])
    with nullcontext("") if Path(name).exists() else reaching_hub() as unreached:
        return _opened(name, transformers, unreached)


def _opened(name: str, transformers: Any, unreached: str) -> nn.Module:
    known: dict[str, Any] = {k.__name__: k for a in adapters() for k in a.networks()}
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
    return prepared_(model, preprocessing(name, config), name)


def prepared_(model: nn.Module, images: Mapping[str, Any], name: str) -> nn.Module:
    """What verbs ask of a network: scores, how images are prepared, names of classes."""
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
    """Let a classifier of transformers give scores alone; timm's networks do."""
    select_adapter(model).give_scores_(model)


def preprocessing(name: str, config: Any) -> dict[str, Any]:
    """How the folder's processor prepares images, as an entry of timm says it."""
    transformers = require("transformers")
    try:
        stored = transformers.AutoImageProcessor.from_pretrained(name).to_dict()
    except (OSError, ValueError):  # a folder without one
        stored = {}
    vision = getattr(config, "vision_config", config)
    return image_entries(stored, int(getattr(vision, "image_size", 224)))


def image_entries(stored: Mapping[str, Any], side: int) -> dict[str, Any]:
    """A processor's settings in timm's words.

    A size of height and width squashes images; a shortest edge is cropped where the processor does.
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
        "interpolation": _RESAMPLING.get(int(stored.get("resample", 3)), "bicubic"),
    }
    for ours, theirs in (("mean", "image_mean"), ("std", "image_std")):
        entries[ours] = tuple(stored.get(theirs) or (0.5, 0.5, 0.5))
    return entries

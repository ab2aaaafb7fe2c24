"""Save a detector, load it: `model.safetensors` and a readable `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_type_hints

from torch import Tensor, nn

from ltm.api import conversion_of, merge_tokens_, mergers, merging_network, token_counts
from ltm.api.folders import (
    CONFIG,
    WEIGHTS,
    check_host,
    check_image_size,
    make_host,
    read_config,
    read_tensors,
    refused,
    write_folder,
)
from ltm.api.saving import become_saved_, load_exactly_
from ltm.core.finite import require_finite
from ltm.core.validation import check_entries
from ltm.detection.mask_rcnn import MaskRCNN, MaskRCNNConfig
from ltm.detection.pyramid import DetectorConfig, Pyramid, size_arguments
from ltm.detection.settings import Task
from ltm.detection.ssdlite import SSDLite, SSDLiteConfig
from ltm.methods import config_from_dict

Detector = SSDLite | MaskRCNN
DETECTORS: dict[Task, type[DetectorConfig]] = {
    kind.task: kind for kind in (SSDLiteConfig, MaskRCNNConfig)
}


class LoadedDetector(NamedTuple):
    """A detector in evaluation mode, and what its labels mean: label 1 is the first category."""

    model: Detector
    config: DetectorConfig
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]


def save_detector(
    model: nn.Module,
    config: DetectorConfig,
    folder: str | Path,
    *,
    class_names: Sequence[str],
    category_ids: Sequence[int],
) -> Path:
    """Write a detector that `config` has built, and the categories of its labels."""
    require_finite(model.state_dict(), "model: ")
    folder = Path(folder)
    pyramid = next(module for module in model.modules() if isinstance(module, Pyramid))
    description = {
        "task": config.task,
        "detector": _plain(config),
        "token_merging": _merging(model),
        "host": pyramid.host,
        "categories": [
            {"id": int(number), "name": name}
            for number, name in zip(category_ids, class_names, strict=True)
        ],
    }
    write_folder(model, folder, description)
    return folder


def load_detector(folder: str | Path, *, verify: bool = True) -> LoadedDetector:
    """Read a detector that `save_detector` wrote, in evaluation mode.

    As with `ltm.load`, a folder is data; `verify=False` loads one that was edited.
    """
    folder = Path(folder)
    known = _read(folder)
    weights = read_tensors(folder, known, verify=verify)
    with refused(folder):
        return _load(known, weights)


def _load(known: dict[str, Any], weights: dict[str, Tensor]) -> LoadedDetector:
    config = DETECTORS[known["task"]](**known["detector"])
    _check_sizes(config, known["categories"], weights)
    merging = known["token_merging"]
    if merging is not None:
        check_image_size(merging["image_size"])
        config = dataclasses.replace(
            config, merging=config_from_dict(merging["exactly"], saved=True)
        )
    if known["host"] is not None:
        model = _on_host(config, known["host"], merging, weights)
    else:
        check_host(config.backbone, {}, weights)
        check_host(config.backbone, size_arguments(config.backbone, config.padded_size)[0], weights)
        model = config.build()
    if merging is not None:
        frozen, macs = merging.get("frozen", False), merging.get("macs_after")
        weights = become_saved_(model, weights, merging["active"], frozen=frozen, macs=macs)
        config = dataclasses.replace(config, merging=config_from_dict(merging["asked"], saved=True))
    load_exactly_(model, weights, "the weights do not fit the detector: ")
    names = tuple(entry["name"] for entry in known["categories"])
    numbers = tuple(int(entry["id"]) for entry in known["categories"])
    return LoadedDetector(model.eval(), config, names, numbers)


def _check_sizes(
    config: DetectorConfig, categories: Sequence[Any], weights: Mapping[str, Tensor]
) -> None:
    """Refuse a config that would make a detector larger than its weights."""
    check_image_size(config.image_size)
    if len(categories) != config.num_classes:
        raise ValueError(
            f"the weights do not fit the detector: it has {len(categories)} categories, but "
            f"num_classes is {config.num_classes}"
        )
    largest = max((side for weight in weights.values() for side in weight.shape), default=0)
    width = getattr(config, "width", 1)
    if not 1 <= width <= largest:
        raise ValueError(f"detector.width is {width}; its weights have {largest} at most")


def _plain(config: DetectorConfig) -> dict[str, Any]:
    """The settings, without those that only matter before there are weights."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {**values, "merging": None, "pretrained": False, "weights": None}


def _merging(model: nn.Module) -> dict[str, Any] | None:
    """How the network merges: the config that was asked for, and the resulting token counts."""
    network = merging_network(model)
    if network is None:
        return None
    done = conversion_of(network)
    exactly = done.config.with_amount(
        counts=tuple(token_counts(network)), sites=tuple(site.block for site in done.sites)
    )
    return {
        "asked": done.config.to_dict(),
        "exactly": exactly.to_dict(),
        "image_size": done.image_size,
        "active": [merger.active for _, merger in mergers(model)],
        "frozen": done.frozen,
        "macs_after": done.macs_after,
    }


def _on_host(
    config: DetectorConfig,
    host: dict[str, Any],
    merging: dict[str, Any] | None,
    weights: dict[str, Tensor],
) -> Detector:
    """The detector on a whole network that `ltm.save` once wrote, converted as it was then."""
    network: Any = make_host(host["architecture"], host["model_args"], weights)
    network.pretrained_cfg = {**network.pretrained_cfg, **host.get("normalisation", {})}
    if merging is not None and config.merging is not None:
        merge_tokens_(network, config.merging, tuple(merging["image_size"]))
    return config.on(Pyramid(network, host=host, **config.maps()))


def _read(folder: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder}: there is no {name}; a saved detector has one.")
    known = read_config(folder)
    if known.get("task") not in DETECTORS:
        raise ValueError(f"{folder / CONFIG}: it describes no detector.")
    with refused(folder):
        check_entries(known, dict.fromkeys(known, Any), required=_ENTRIES)
        kind = DETECTORS[known["task"]]
        hints = get_type_hints(kind)
        types = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
        types |= {"merging": NoneType, "pretrained": Literal[False], "weights": NoneType}
        check_entries(known["detector"], types, "detector.", required=("backbone", "image_size"))
        for name, entries in _PARTS.items():
            if known[name] is not None:
                required = set(entries) - _OPTIONAL
                check_entries(known[name], entries, f"{name}.", required=required)
        for category in known["categories"]:
            check_entries(category, _CATEGORY, "categories.", required=_CATEGORY)
    known["detector"]["image_size"] = tuple(known["detector"]["image_size"])
    return known


_ENTRIES = ("task", "detector", "token_merging", "host", "categories")
_CATEGORY: dict[str, Any] = {"id": int, "name": str}
_PARTS: dict[str, dict[str, Any]] = {
    "token_merging": {
        "asked": dict[str, Any],
        "exactly": dict[str, Any],
        "image_size": tuple[int, int],
        "active": tuple[bool, ...],
        "frozen": bool,
        "macs_after": int,
    },
    "host": {
        "architecture": str,
        "model_args": dict[str, Any],
        "normalisation": dict[Literal["mean", "std"], tuple[float, ...]],
    },
}
_OPTIONAL = {"frozen", "macs_after", "normalisation"}
"""Folders of earlier versions lack them."""

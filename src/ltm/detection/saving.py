"""Save a detector, load it: `model.safetensors` and a readable `config.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
from safetensors.torch import load_file
from torch import nn

from ltm.api import (
    conversion_of,
    freeze_,
    merge_tokens_,
    mergers,
    merging_network,
    token_counts,
)
from ltm.api.saving import CONFIG, WEIGHTS, freeze_as_, write_weights
from ltm.core.finite import require_finite
from ltm.detection.mask_rcnn import MaskRCNN, MaskRCNNConfig
from ltm.detection.pyramid import DetectorConfig, Pyramid
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
    """Write a detector that `config` has built, and what its labels mean."""
    require_finite(model.state_dict(), "model: ")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
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
    write_weights(model, folder)
    (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    return folder


def load_detector(folder: str | Path) -> LoadedDetector:
    """Read a detector that `save_detector` wrote, in evaluation mode. Nothing is unpickled."""
    folder = Path(folder)
    known = _read(folder)
    settings = dict(known["detector"])
    settings["image_size"] = tuple(settings["image_size"])
    config = DETECTORS[known["task"]](**settings)
    merging = known["token_merging"]
    if merging is not None:
        config = dataclasses.replace(
            config, merging=config_from_dict(merging["exactly"], saved=True)
        )
    if known["host"] is not None:
        model = _on_host(config, known["host"], merging)
    else:
        model = config.build()
        _merge_as_saved_(merging_network(model), merging)
    weights = load_file(folder / WEIGHTS)
    require_finite(weights, f"{folder / WEIGHTS}: ")
    if merging is not None and merging.get("frozen", False):
        weights = freeze_as_(model, weights)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{folder}: the weights do not fit the detector: {error}") from error
    if merging is not None:
        config = dataclasses.replace(config, merging=config_from_dict(merging["asked"], saved=True))
    names = tuple(entry["name"] for entry in known["categories"])
    numbers = tuple(int(entry["id"]) for entry in known["categories"])
    return LoadedDetector(model.eval(), config, names, numbers)


def _plain(config: DetectorConfig) -> dict[str, Any]:
    """The settings without what the weights make up for."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {**values, "merging": None, "pretrained": False, "weights": None}


def _merging(model: nn.Module) -> dict[str, Any] | None:
    """How the network merges, as it was asked for and as it turned out."""
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
    }


def _on_host(
    config: DetectorConfig, host: dict[str, Any], merging: dict[str, Any] | None
) -> Detector:
    """The detector on a whole network, converted as it was, which `ltm.save` once wrote."""
    network: Any = timm.create_model(host["architecture"], **host["model_args"])
    network.pretrained_cfg = {**network.pretrained_cfg, **host.get("normalisation", {})}
    if merging is not None and config.merging is not None:
        merge_tokens_(network, config.merging, tuple(merging["image_size"]))
        _merge_as_saved_(network, merging)
    return config.on(Pyramid(network, host=host, **config.maps()))


def _merge_as_saved_(network: nn.Module | None, merging: dict[str, Any] | None) -> None:
    """Give a fresh converted network the parts that the saved one had, ready for its weights."""
    if network is None or merging is None:
        return
    for (_, merger), active in zip(mergers(network), merging["active"], strict=True):
        if active:
            merger.activate_()
    if merging.get("frozen", False):  # folders of earlier versions do not say
        freeze_(network)


def _read(folder: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder}: there is no {name}; a saved detector has one.")
    try:
        known = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / CONFIG}: it is no JSON ({error}).") from error
    if not isinstance(known, dict) or known.get("task") not in DETECTORS:
        raise ValueError(f"{folder / CONFIG}: it describes no detector.")
    return known

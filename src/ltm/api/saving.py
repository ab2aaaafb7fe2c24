"""Freeze, save and load a converted model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.models._features import FeatureDictNet, FeatureGetterNet, FeatureHookNet
from torch import Tensor, nn

from ltm.adapters import adapter_of
from ltm.adapters.conversion import all_or_nothing, convert_, described, macs_of, revert_
from ltm.api.conversion import (
    conversion_of,
    is_merging,
    mergers,
    merging_network,
    note_,
    watching,
)
from ltm.api.folders import (
    CONFIG,
    FACTORY_ARGUMENTS,
    WEIGHTS,
    check_image_size,
    image_entries,
    is_pretrained,
    make_host,
    make_pretrained,
    read_config,
    read_tensors,
    refused,
    saved_folder,
    unset,
    write_folder,
)
from ltm.core.cost import channels_of, meta_copy
from ltm.core.finite import require_finite
from ltm.core.patches import embed_by_product_
from ltm.core.validation import check_entries, plain
from ltm.methods import MethodConfig, config_from_dict
from ltm.methods.base import Merger
from ltm.methods.frozen import FrozenMerger


@torch.no_grad()
def freeze_(model: nn.Module) -> nn.Module:
    """Make a converted model ready for deployment.

    Masks that do not depend on the image become constants, patches are embedded by a matrix product
    if that is faster, and parts that only training needs are dropped. Outputs are those of
    evaluation mode. MACs are counted again: informative weights without statistics no longer count,
    but a constant mask on a sequence also multiplies the prefix tokens, so the share can end up
    slightly above the budget.
    """
    done = conversion_of(model)
    if not done.state.merging:
        raise ValueError("model: merging is off (merging_off); freeze_ it outside.")
    if not done.frozen:
        _freeze_mergers_(model)
        note_(model, frozen=True, macs_after=macs_of(model, done.image_size))
    return model


def _freeze_mergers_(model: nn.Module) -> None:
    """Replace mergers by frozen ones, from their decisions on a blank image."""
    done, parameter = conversion_of(model), next(model.parameters())
    images = parameter.new_zeros(1, channels_of(model), *done.image_size)
    model.eval()
    with watching(model) as records:
        model(images)
    known = {id(record.merger): record for record in records if record.decision is not None}
    for path, merger in list(mergers(model)):
        record = known.get(id(merger))
        found = (None, None) if record is None else (record.decision, record.hints)
        _replace_(model, path, merger.frozen(*found))
    embed_by_product_(model)


@torch.no_grad()
def _freeze_as_(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace mergers by frozen ones, without values; return the weights to load into the model.

    Version 0.1.0 saved running means beside the constants made from them; those are left out.
    """
    left = dict(weights)
    for path, merger in list(mergers(model)):
        start = f"{path}."
        saved = {n.removeprefix(start): w for n, w in weights.items() if n.startswith(start)}
        frozen = merger.frozen_as(saved)
        _replace_(model, path, frozen)
        if isinstance(frozen, FrozenMerger):
            for name in saved.keys() - frozen.state_dict().keys():
                del left[f"{start}{name}"]
    return left


def _replace_(model: nn.Module, path: str, merger: Merger) -> None:
    parent, _, name = path.rpartition(".")
    device = next(model.parameters()).device
    merger.to(device).eval().requires_grad_(False)
    setattr(model.get_submodule(parent), name, merger)


def save(model: nn.Module, folder: str | Path, *, class_names: Sequence[str] | None = None) -> Path:
    """Write a converted model as `model.safetensors` and a readable `config.json`.

    The layout is that of timm on the Hugging Face hub, or that of transformers for its networks,
    with one more entry, `token_merging`. Class names are kept for predictions, unless they are just
    numbers.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps it
    done = conversion_of(model)
    _require_whole(model)
    require_finite(model.state_dict(), "model: ")
    names = names_for(model, class_names)
    folder = Path(folder)
    entries = adapter_of(done.family).saved_entries(model)
    config = {
        **(_host_arguments(model, done.image_size) if entries is None else entries),
        _FINGERPRINT: fingerprint(model),
        "token_merging": described(model),
    }
    if names is not None:
        config["label_names"] = names
    write_folder(model, folder, config)
    return folder


def telling_names(names: Sequence[str]) -> tuple[str, ...] | None:
    """The class names; None if they are just numbers, for which timm may know better names."""
    numbered = all(name.isdecimal() and int(name) == at for at, name in enumerate(names))
    return None if numbered else tuple(names)


def names_for(model: nn.Module, class_names: Sequence[str] | None) -> tuple[str, ...] | None:
    """The class names to save with a model, one per class; None if they are just numbers."""
    names = telling_names(class_names or ())
    number = int(getattr(model, "num_classes", 0) or 0)
    if names is not None and len(names) != number:
        raise ValueError(
            f"class_names: got {len(names)} names, and the model has {number} classes; "
            "give one per class."
        )
    return names


def _require_whole(model: nn.Module) -> None:
    if isinstance(model, FeatureDictNet | FeatureGetterNet | FeatureHookNet):
        raise ValueError(
            "model: it gives feature maps (features_only=True), and timm cannot make it again; "
            "convert and save the whole network."
        )


def load(folder: str | Path, model: nn.Module | None = None, *, verify: bool = True) -> nn.Module:
    """Read a model that `save` wrote, in evaluation mode.

    timm does not remember all arguments of a model. If yours was made with unusual ones, give a
    `model` made with the same; it is not changed if the file does not fit. A folder is data:
    nothing is unpickled, downloaded or read from elsewhere. A folder that was changed after saving
    is refused; `verify=False` loads one that you edited.
    """
    folder = saved_folder(Path(folder))
    config = _read_config(folder)
    with refused(folder):
        _read_merging(config["token_merging"])  # its errors say more than a wrong checksum
    weights = read_tensors(folder, config, verify=verify)
    with refused(folder):
        return _load(config, weights, model)


def _load(config: dict[str, Any], weights: dict[str, Tensor], model: nn.Module | None) -> nn.Module:
    known, method = _read_merging(config["token_merging"])
    image_size = tuple(known["image_size"])
    model = _made(config, weights) if model is None else model
    if config.get(_FINGERPRINT) not in (None, fingerprint(model)):
        raise ValueError(
            f"the saved network was built of other layers (activations or heads, say) "
            f"than {type(model).__name__} here; {_MADE_ALIKE}"
        )
    exact = method.with_amount(counts=plain(known["token_counts"]), sites=tuple(known["blocks"]))
    with all_or_nothing(model):
        if is_merging(model):
            raise ValueError("model: it merges tokens already; give one that does not.")
        convert_(model, method, image_size, schedule=exact)
        weights = become_saved_(
            model, weights, known["active"], frozen=known["frozen"], macs=int(known["macs_after"])
        )
        load_exactly_(model, weights, advice=f"; {_MADE_ALIKE}")
        _expect_(model, config.get("pretrained_cfg") or {}, image_size)
    return model.eval()


def become_saved_(
    model: nn.Module,
    weights: dict[str, Tensor],
    active: Sequence[bool],
    *,
    frozen: bool,
    macs: int | None = None,
) -> dict[str, Tensor]:
    """Prepare a freshly converted network for saved weights; return the weights to load into it.

    Args:
        model: the network, or a model that holds it, such as a detector.
        weights: the saved weights, with the keys of the model.
        active: for each merger, whether its class statistics were in use.
        frozen: whether the saved network was frozen.
        macs: those of the frozen network; None counts them.
    """
    network = merging_network(model)
    assert network is not None
    for (_, merger), at_work in zip(mergers(network), active, strict=True):
        if at_work:
            merger.activate_()
    if frozen:
        weights = _freeze_as_(model, weights)
        embed_by_product_(network)
        counted = macs_of(network, conversion_of(network).image_size) if macs is None else macs
        note_(network, frozen=True, macs_after=counted)
    return weights


def load_exactly_(
    model: nn.Module, weights: Mapping[str, Tensor], problem: str = "", advice: str = ""
) -> None:
    """Load weights strictly; an error names the first one that does not fit.

    Merger tensors that were never set may be missing.
    """
    own = model.state_dict()
    weights = {**{name: own[name] for name in unset(model)}, **weights}
    for name, wrong in sorted(misfits(model, weights).items()):
        raise ValueError(f"{problem}{name} is {wrong}{advice}")
    model.load_state_dict(weights)


def _made(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    """The network that a folder names, as timm or transformers makes it."""
    if is_pretrained(config):
        return make_pretrained(config, weights)
    arguments = host_arguments(config)
    return remember_arguments(make_host(config["architecture"], arguments, weights), arguments)


def host_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which timm makes the network of a folder.

    The number of classes is an entry of its own, since transformers refuses it in `model_args`,
    where version 0.1.0 wrote it.
    """
    arguments: dict[str, Any] = config.get("model_args", {})
    return {**arguments, "num_classes": arguments.get("num_classes", config.get("num_classes", 0))}


def _read_merging(merging: Mapping[str, Any]) -> tuple[dict[str, Any], MethodConfig]:
    """The result of a saved network's conversion, and the settings of its method."""
    known = {name: value for name, value in merging.items() if name in _CONVERSION}
    check_entries(known, _CONVERSION, "token_merging.", required=_CONVERSION)
    check_image_size(known["image_size"])
    settings = {name: value for name, value in merging.items() if name not in _CONVERSION}
    return known, config_from_dict(settings, saved=True)


_CONVERSION: dict[str, Any] = {
    "image_size": tuple[int, int],
    "blocks": tuple[int, ...],
    "token_counts": tuple[int | tuple[int, int], ...],
    "active": tuple[bool, ...],
    "frozen": bool,
    "macs_before": float,
    "macs_after": float,
}
"""Entries of `token_merging` besides the method's settings."""


_FINGERPRINT = "fingerprint"
_MADE_ALIKE = "give load a model made with the arguments of the saved one."
_MADE_WITH = "made_with"
_NOT_ITS_SHAPE = ("pretrained", "num_classes", "drop_path_rate")


def remember_arguments(model: nn.Module, arguments: Mapping[str, Any]) -> nn.Module:
    """Store on a timm model the arguments it was made with, which `save` needs."""
    kept = {name: value for name, value in arguments.items() if name not in _NOT_ITS_SHAPE}
    setattr(model, _MADE_WITH, {**getattr(model, _MADE_WITH, {}), **kept})
    return model


def _host_arguments(model: nn.Module, image_size: tuple[int, int]) -> dict[str, Any]:
    """The entries that timm needs to make the network again and to prepare its images."""
    host: Any = model
    known = dict(getattr(host, "pretrained_cfg", None) or {})
    arguments: dict[str, Any] = {}
    patch_embed: Any = getattr(host, "patch_embed", None)
    if getattr(patch_embed, "img_size", None):
        arguments["img_size"] = list(patch_embed.img_size)
    channels = channels_of(model)
    if channels != 3:
        arguments["in_chans"] = channels
    if getattr(host, "dynamic_img_size", False):
        arguments["dynamic_img_size"] = True
    arguments |= adapter_of(conversion_of(model).family).host_arguments(model)
    if isinstance(getattr(host, "global_pool", None), str) and known:
        arguments["global_pool"] = host.global_pool
    made_with: dict[str, Any] = getattr(host, _MADE_WITH, {})
    # Its present arguments take precedence: it may have been resized since.
    arguments = {
        name: value
        for name, value in made_with.items()
        if isinstance(value, _PLAIN) and name not in FACTORY_ARGUMENTS
    } | arguments
    return {
        "architecture": known.get("architecture") or _host_name(model),
        "num_classes": int(getattr(host, "num_classes", 0) or 0),
        "model_args": arguments,
        "pretrained_cfg": _at_size(
            {k: v for k, v in image_entries(known).items() if isinstance(v, _PLAIN)},
            (channels, *image_size),
        ),
    }


def _host_name(model: nn.Module) -> str:
    """The class that a network had before its conversion."""
    kinds = type(model).__mro__
    return next(kind.__name__ for kind in kinds if not kind.__module__.startswith("ltm."))


def _at_size(known: dict[str, Any], size: tuple[int, int, int]) -> dict[str, Any]:
    """Entries of timm about images, with the size that the model was converted for."""
    before = tuple(known.get("input_size") or ())
    if not before or before == size:
        return known
    kept = {k: v for k, v in known.items() if k not in ("test_input_size", "test_crop_pct")}
    return {**kept, "input_size": size}


def _expect_(model: nn.Module, saved: Mapping[str, Any], image_size: tuple[int, int]) -> None:
    """Give a model the entries of timm about images that were saved."""
    if not saved:
        return
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
    own: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    gone = {k: None for k in ("test_input_size", "test_crop_pct") if k in own}
    host: Any = model
    size = channels_of(model), *image_size
    host.pretrained_cfg = host.default_cfg = _at_size({**own, **gone, **values}, size)


_PLAIN = (str, int, float, bool, list, tuple, type(None))


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder}: no {CONFIG} and {WEIGHTS}, which ltm.save writes.")
    config = read_config(folder)
    if "detector" in config:
        raise ValueError(f"{folder}: it holds a detector; ltm detect, segment and predict take it.")
    if "token_merging" not in config:
        raise ValueError(
            f"{folder / CONFIG}: no entry token_merging, so its network does not merge; take it by "
            f"its name and the weights in {WEIGHTS}, or as hf:FOLDER if transformers wrote it."
        )
    if "architecture" not in config and not is_pretrained(config):
        raise ValueError(f"{folder / CONFIG}: it lacks architecture.")
    return config


def misfits(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """The tensors that keep weights from loading strictly, each with its reason."""
    own = model.state_dict()
    shapes = {
        name: f"{tuple(weights[name].shape)} instead of {tuple(value.shape)}"
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    }
    missing = dict.fromkeys((name for name in own if name not in weights), "missing")
    return {**shapes, **missing, **dict.fromkeys(weights.keys() - own.keys(), "unknown")}


_TELLING = ("num_heads", "eps")
"""Settings that change outputs but no shape."""
# Layers that do nothing in evaluation.
_IDLE = ("Identity", "Dropout", "Dropout1d", "Dropout2d", "DropPath", "PatchDropout")


def fingerprint(model: nn.Module) -> str:
    """A hash of the path, kind and settings of each layer, without the conversion."""
    shadow = meta_copy(model)
    if is_merging(shadow):
        revert_(shadow)
    layers = sorted(_layers(shadow, ""))
    return hashlib.sha256(json.dumps(layers).encode()).hexdigest()[:16]


def _layers(module: nn.Module, path: str) -> Iterator[tuple[str, str, str]]:
    children = list(module.named_children())
    # Only leaf layers have a kind: versions of timm name blocks differently.
    kind = "" if children else _kind(module)
    settings = " ".join(f"{n}={getattr(module, n)}" for n in _TELLING if hasattr(module, n))
    if kind not in _IDLE and (kind or settings):
        yield path, kind, settings
    for name, child in children:
        yield from _layers(child, f"{path}.{name}")


def _kind(module: nn.Module) -> str:
    """The name of the torch class that a layer derives from, or that of its own class."""
    kinds = type(module).__mro__
    found = next(kind for kind in kinds if kind.__module__.startswith("torch.nn.modules"))
    return type(module).__name__ if found is nn.Module else found.__name__

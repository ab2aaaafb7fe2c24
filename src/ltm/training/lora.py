"""LoRA adapters through peft, on converted and unconverted networks alike."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

from torch import nn

from ltm.adapters.base import record_, stop_recording_

_ADAPTER = "default"


def add_lora_(
    model: nn.Module, *, rank: int, alpha: float = 16.0, targets: tuple[str, ...] = ("qkv", "proj")
) -> int:
    """Put LoRA adapters around the projections named `targets`; returns how many.

    Mask modules that read a projection then read it with its adapter, whether the network was
    converted before or after.
    """
    peft = _peft()
    layers = target_layers(model, targets)
    if not layers:
        raise ValueError(
            f"lora_targets: no projection of this network is named {' or '.join(targets)}"
        )
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=layers, lora_dropout=0.0)
    recorded = {name: stop_recording_(model.get_submodule(name)) for name in layers}
    peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    for name, where in recorded.items():
        if where is not None:
            record_(model.get_submodule(name), *where)
    return len(layers)


def merge_lora_(model: nn.Module) -> int:
    """Fold the adapters into their projections and take them away; returns how many."""
    layer_type: Any = import_module("peft.tuners.tuners_utils").BaseTunerLayer
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, layer_type)]
    for name, layer in found:
        recorded = stop_recording_(layer)
        adapted: Any = layer
        adapted.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, adapted.base_layer)
        if recorded is not None:
            record_(adapted.base_layer, *recorded)
    return len(found)


def has_lora(model: nn.Module) -> bool:
    """Whether the network has LoRA adapters."""
    return any(is_lora(name) for name, _ in model.named_parameters())


def without_lora(model: nn.Module) -> nn.Module:
    """A copy of the network with its adapters folded in; itself where it has none."""
    if not has_lora(model):
        return model
    folded = copy.deepcopy(model)
    merge_lora_(folded)
    return folded


def is_lora(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_" in name


def target_layers(model: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Paths of linear layers and convolutions called so, or inside something called so."""
    found = []
    for name, module in model.named_modules():
        inside = ".merger." in f".{name}." or name.startswith(("patch_embed", "stem"))
        # EfficientViT's projections are convolutions inside a layer with their normalisation.
        named = name.removesuffix(".conv").rpartition(".")[2] in targets
        if named and not inside and isinstance(module, nn.Linear | nn.Conv2d):
            found.append(name)
    return found


def _peft() -> Any:
    try:
        return import_module("peft")
    except ModuleNotFoundError as error:
        raise ValueError(
            "lora_rank needs the package peft; install it with: pip install 'ltm[train]'"
        ) from error

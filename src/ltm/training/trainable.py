"""Which parameters train, LoRA adapters among them, and which layers behave as in training."""

import copy
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import torch
from timm.layers import BatchNormAct2d
from torch import nn

from ltm.adapters.blocks import record_, stop_recording_
from ltm.api import is_merging, mergers
from ltm.extras import require
from ltm.models import did_you_mean
from ltm.training.settings import TuneSettings

_NORMS = (
    nn.modules.batchnorm._NormBase,  # noqa: SLF001 - the base of all that keep running statistics
    nn.LayerNorm,
    nn.GroupNorm,
    BatchNormAct2d,
)


def choose_trainable_(
    model: nn.Module, settings: TuneSettings, new: frozenset[str] = frozenset()
) -> None:
    """Freeze what does not train, and add LoRA adapters if asked for.

    The parameters of a `new` head always train. Call it once, before the optimiser is made.
    """
    chosen = chosen_parameters(model, settings) | new
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    if settings.rank:
        add_lora_(
            model,
            rank=settings.rank,
            alpha=settings.lora_alpha,
            targets=settings.lora_targets,
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_lora(name) or _without_wrapper(name) in chosen)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "nothing would train: this method has no parameters of its own; add unfreeze=head.*, "
            "lora_rank=8, or use trainable=all"
        )


def chosen_parameters(model: nn.Module, settings: TuneSettings) -> set[str]:
    """Names of the parameters that train, without those of LoRA."""
    names = [name for name, _ in model.named_parameters()]
    if settings.trainable == "all":
        return set(names)
    chosen = {name for name in names if in_merger(name)} if is_merging(model) else set[str]()
    if settings.trainable == "biases":
        chosen |= {name for name in names if name.endswith("bias")}
    if settings.trainable in ("norms", "biases"):
        chosen |= {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            if isinstance(module, _NORMS)
            for name, _ in module.named_parameters(recurse=False)
        }
    for pattern in settings.unfreeze:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            tops = {f"{name.split('.')[0]}.*" for name in names}
            known = did_you_mean(pattern, tops)
            raise ValueError(f"unfreeze: {pattern!r} matches no parameter; {known}")
        chosen |= matched
    return chosen


def in_merger(name: str) -> bool:
    """Whether a parameter belongs to a mask module."""
    return ".merger." in f".{name}"


def train_mode_(model: nn.Module) -> None:
    """Put the model into training mode, except normalisation layers that do not train.

    So the running statistics of frozen layers do not change.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, _NORMS) and not _trains(module, model):
            module.eval()


def _trains(module: nn.Module, model: nn.Module) -> bool:
    """Whether a layer trains; one without parameters does if the network around it does."""
    own = list(module.parameters(recurse=False))
    return any(p.requires_grad for p in (own or _outside_mergers(model)))


def _outside_mergers(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if not in_merger(name)]


@torch.no_grad()
def set_noise_(model: nn.Module, noise: float) -> None:
    """Set the scale of the noise on learned supports."""
    for _, merger in mergers(model):
        merger.set_noise_(noise)


def annealed_noise(initial: float, epoch: int, first: int, epochs: int) -> float:
    """The noise of an epoch: it falls linearly from the first merging epoch to 0 at the last."""
    merging = epochs - first
    if merging <= 1:
        return 0.0
    return initial * max(0.0, 1.0 - max(0, epoch - first) / (merging - 1))


def _without_wrapper(name: str) -> str:
    """A parameter's name before peft put its layer into an adapter."""
    return name.replace(".base_layer.", ".")


_ADAPTER = "default"


def add_lora_(
    model: nn.Module, *, rank: int, alpha: float = 16.0, targets: tuple[str, ...] = ("qkv", "proj")
) -> int:
    """Put LoRA adapters around the projections named `targets`; returns how many.

    Mask modules that read the output of a projection get it with its adapter, whether the network
    was converted before or after.
    """
    peft = require("peft")
    layers = _target_layers(model, targets)
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
    """A copy of the network with its adapters folded in; the network itself if it has none."""
    if not has_lora(model):
        return model
    folded = copy.deepcopy(model)
    merge_lora_(folded)
    return folded


def is_lora(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_" in name


def _target_layers(model: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Paths of the linear layers and convolutions with one of these names."""
    found = []
    for name, module in model.named_modules():
        inside = in_merger(f"{name}.") or name.startswith(("patch_embed", "stem"))
        # EfficientViT's projections are convolutions inside a layer with their normalisation.
        named = name.removesuffix(".conv").rpartition(".")[2] in targets
        if named and not inside and isinstance(module, nn.Linear | nn.Conv2d):
            found.append(name)
    return found

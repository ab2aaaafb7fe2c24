"""From settings to a network that can train: made, loaded, converted, with the data's classes."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ltm import models
from ltm.api import conversion_of, is_merging, load, merge_tokens_, save, set_ratio_
from ltm.api.folders import CONFIG, WEIGHTS, read_tensors, saved_folder, write_folder
from ltm.api.saving import names_for, telling_names
from ltm.core.cost import num_parameters
from ltm.core.finite import require_finite
from ltm.data.transforms import ImageSpec, image_spec
from ltm.methods import MethodConfig
from ltm.models import (
    ArgumentsError,
    Say,
    create_model,
    head_parameters,
    outline,
    read_weights,
    read_words,
    saved_config,
    silent,
)
from ltm.training.settings import MergingSettings, ModelSettings, TrainSettings


class Built(NamedTuple):
    """A network, and the parameters of its head where that starts anew on loaded weights."""

    model: nn.Module
    new_head: frozenset[str] = frozenset()


def build(settings: TrainSettings, num_classes: int, say: Say = silent) -> Built:
    """Make the network of a run, converted where a method asks for it.

    The seed must be set before: initial weights are drawn here.
    """
    _check_num_classes(settings.model, settings.data.source, num_classes)
    method = method_config(settings.merge)
    if settings.model.weights is not None:
        folder = saved_folder(Path(settings.model.weights))
        config = saved_config(folder) or {}
        if "token_merging" in config:
            host = _host_of(folder, config, settings)
            return _continue_from(folder, host, settings, method, num_classes)
    model, new = make_timm_model(settings, num_classes), False
    if settings.model.weights is not None:
        new = bool(load_weights_(model, settings.model.weights, say))
    elif settings.model.pretrained:
        known = getattr(model, "pretrained_cfg", None) or {}
        new = known.get("num_classes", num_classes) != num_classes
    convert_(model, settings, method)
    return Built(model, head_parameters(model) if new else frozenset())


def count_classes(settings: ModelSettings, class_names: Sequence[str]) -> int:
    """How many classes a run's network has: those of the data, or those of its weights.

    Folders named by class index (0000, 0001) may be some of the weights' classes, as for `ltm
    evaluate`, unless num_classes asks for a head for the data alone.
    """
    found = len(class_names)
    if settings.num_classes is not None or telling_names(class_names) is not None:
        return found
    return max(found, classes_of_weights(settings))


def classes_of_weights(settings: ModelSettings) -> int:
    """The number of classes that a network starts with; 0 where nothing is loaded."""
    if settings.weights is not None and (path := Path(settings.weights)).is_dir():
        return int((saved_config(saved_folder(path)) or {}).get("num_classes", 0))
    made = outline(settings.name, read_words(settings.model_args, owner="model_args"))
    if made is None:
        return 0
    if settings.weights is not None:
        head, weights = head_parameters(made), read_weights(Path(settings.weights))
        return max((len(value) for name, value in weights.items() if name in head), default=0)
    known: Any = getattr(made, "pretrained_cfg", None) or {}
    return int(known.get("num_classes", 0)) if settings.pretrained else 0


def convert_(model: nn.Module, settings: TrainSettings, method: MethodConfig | None) -> None:
    """Convert the network for the size of its images; one that merges already changes its ratio."""
    if is_merging(model):
        keep_merging_(model, settings.merge, method, "model")
    elif method is not None:
        merge_tokens_(model, method, image_spec(settings.data, model).size)


def keep_merging_(
    model: nn.Module, settings: MergingSettings, method: MethodConfig | None, where: str
) -> None:
    """Set the ratio that is asked for; a ValueError if a network merges in another way than that.

    Args:
        model: a network that merges tokens.
        settings: how it should merge.
        method: the config that these settings mean; None for a network without merging.
        where: what the network is called in error messages.
    """
    done = conversion_of(model)
    if method is None or done.config.name != method.name:
        raise ValueError(
            f"{where} merges tokens with {done.config.name}, not with {settings.method}; "
            f"use method={done.config.name}, or start from the original weights"
        )
    for name in sorted(models.written_settings(settings.method, settings.method_options)):
        has, wanted = (config.to_settings()[name] for config in (done.config, method))
        if has != wanted:
            raise ValueError(
                f"{where} merges tokens with {name}={has}, not {wanted}; start from the original "
                "weights, or leave the option out"
            )
    if done.frozen:
        raise ValueError(f"{where} is frozen, so it cannot train; use an unfrozen one")
    if settings.per_block not in (None, done.config.per_block):
        raise ValueError(
            f"{where} merges tokens with per_block={done.config.per_block}, not "
            f"{settings.per_block}; start from the original weights, or give a ratio"
        )
    if settings.ratio not in (None, done.config.ratio):
        set_ratio_(model, settings.ratio)


def method_of(model: nn.Module) -> str:
    """The name of the method that a network merges tokens with; none if it merges none."""
    return conversion_of(model).config.name if is_merging(model) else "none"


def spec_of(settings: TrainSettings, model: nn.Module) -> ImageSpec:
    """What images a network gets; their size is the one that its merging was planned for."""
    spec = image_spec(settings.data, model)
    return replace(spec, size=conversion_of(model).image_size) if is_merging(model) else spec


def _check_num_classes(settings: ModelSettings, source: str, num_classes: int) -> None:
    """Refuse a number of classes that is not the data's."""
    if settings.num_classes not in (None, num_classes):
        raise ValueError(
            f"num_classes is {settings.num_classes}, but {source} has {num_classes} classes; "
            "leave it out, and the head fits the data"
        )


def method_config(settings: MergingSettings) -> MethodConfig | None:
    """The config of the method; None where the network is trained without merging."""
    if settings.method == "none":
        return None
    return models.method_config(
        settings.method,
        settings.ratio,
        per_block=settings.per_block,
        options=settings.method_options,
    )


def make_timm_model(settings: TrainSettings, num_classes: int) -> nn.Module:
    """Make a timm model by name; its input size follows the data's where the model has one."""
    name = settings.model.name
    arguments: dict[str, Any] = read_words(settings.model.model_args, owner="model_args")
    download = settings.model.pretrained and settings.model.weights is None
    arguments["num_classes"] = num_classes
    if settings.model.drop_path:
        arguments["drop_path_rate"] = settings.model.drop_path
    if settings.data.image_size is not None and "img_size" not in arguments:
        sized = {**arguments, "img_size": settings.data.image_size}
        with suppress(ArgumentsError):  # convolutional networks have no img_size and take any
            return create_model(name, sized, pretrained=download)
    return create_model(name, arguments, pretrained=download)


def load_weights_(model: nn.Module, path: str | Path, say: Say = silent) -> list[str]:
    """Load weights in timm's keys; returns the names of those left out.

    A head for another number of classes is left out. Mask modules and class statistics that the
    file lacks stay as they are.
    """
    path = Path(path)
    if path.is_dir():
        path = saved_folder(path)
        read_tensors(path, saved_config(path) or {})  # refuses files that changed after saving
        path /= WEIGHTS
    weights = read_weights(path, say)
    return models.load_weights_(
        model, weights, f"weights {path} do not fit this model", new_head=True
    )


def _continue_from(
    folder: Path,
    host: nn.Module | None,
    settings: TrainSettings,
    method: MethodConfig | None,
    num_classes: int,
) -> Built:
    """Load a token-merging model, and change its ratio and its head if others are asked for."""
    model = load(folder, host)
    keep_merging_(model, settings.merge, method, str(folder))
    if int(getattr(model, "num_classes", 0)) == num_classes:
        return Built(model)
    reset: Any = model
    reset.reset_classifier(num_classes)
    return Built(model, head_parameters(model))


def _host_of(folder: Path, config: dict[str, Any], settings: TrainSettings) -> nn.Module | None:
    """The network that a saved one was converted from; None if no arguments are needed for it."""
    name, known = settings.model.name.partition(".")[0], config["architecture"]
    if known != name:
        raise ValueError(f"{folder} holds a {known}, but model is {name}; use model={known}")
    if not settings.model.model_args:
        return None
    untouched = replace(settings, model=replace(settings.model, pretrained=False))
    return make_timm_model(untouched, config["num_classes"])


def saved_architecture(folder: Path) -> str:
    """The timm name of the network in a folder that ltm wrote."""
    config = saved_config(folder)
    if config is None:
        raise FileNotFoundError(f"model {folder} has no {CONFIG}: give a folder that ltm wrote")
    return config["architecture"]


def save_model(model: nn.Module, folder: Path, *, class_names: Sequence[str] | None = None) -> None:
    """Write a trained network; one without merging as timm does, to be loaded as `weights`."""
    if is_merging(model):
        save(model, folder, class_names=class_names)
        return
    require_finite(model.state_dict(), "model: ")
    names = names_for(model, class_names)
    config: dict[str, Any] = {
        "architecture": models.name_of(model),
        "num_classes": int(getattr(model, "num_classes", 0)),
    }
    if names is not None:
        config["label_names"] = names
    write_folder(model, folder, config)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """How many parameters train, and how many there are."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trained, num_parameters(model)

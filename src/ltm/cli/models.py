"""From options to a model and a method: the one place that all commands share.

`load_model` reads what `--model`, `--pretrained`, `--weights` and `--run` name; `method_config`
reads `--methods`. What cannot work is a ValueError or FileNotFoundError of one sentence.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltm.cli.hosts import (
    check_forward,
    check_host,
    check_name,
    check_patches,
    check_positive,
    size_refused,
)
from ltm.cli.weights import first_line, load_weights_, misfits, read_weights

if TYPE_CHECKING:
    from torch import nn

    from ltm.methods import MethodConfig

ALIASES = {
    "ltm-static": "ltm:support=learned,weights=uniform",
    "ltm-uniform": "ltm:weights=uniform",
}
"""Short names for methods with settings."""

RATIO = 0.7
"""The share of the multiply-adds that remains where commands are not told."""


def load_model(
    model: str | None = None,
    *,
    pretrained: bool = False,
    weights: Path | None = None,
    run: Path | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    model_args: Sequence[str] = (),
    untrained: bool = False,
    merges: bool = False,
) -> nn.Module:
    """Make the model that the options name, in evaluation mode.

    Args:
        model: timm's name of it; beside `run` only where timm cannot make the host by itself.
        pretrained: take timm's own weights.
        weights: take those of a file in timm's keys, .safetensors or .pth; nothing is unpickled.
        run: a folder that `ltm.save` wrote.
        num_classes: by default what the weights have.
        image_size: by default what the model was made for.
        model_args: further arguments of the model, such as `depth=4`.
        untrained: allow a model without any weights, where only its speed matters.
        merges: refuse a model that cannot be converted, before its weights are read.
    """
    check_positive(image_size)
    if pretrained and weights is not None:
        raise ValueError("pretrained and weights: give one of them, not both")
    if run is not None:
        refuse_given({"pretrained": pretrained, "weights": weights}, "a saved run")
        return _load_run(run, _host(model, num_classes, image_size, model_args))
    if model is None:
        raise ValueError("model: give a timm name with --model, or a saved run with --run")
    check_host(model, _arguments(model_args, num_classes), image_size, merges=merges)
    if weights is not None:
        built = _with_weights(model, weights, num_classes, image_size, model_args)
    else:
        if not (pretrained or untrained):
            raise ValueError(
                f"model {model} has no weights yet: give --pretrained or --weights FILE"
            )
        arguments = _arguments(model_args, num_classes)
        resized = None
        if image_size is not None and not pretrained:
            resized = _create_resized(model, arguments, image_size)
        built = resized or _create(model, arguments, pretrained=pretrained)
    _resize_(built, image_size)
    check_forward(built, image_size)
    return built.eval()


def refuse_given(options: Mapping[str, object], owner: str) -> None:
    """Refuse options that would be ignored, since their owner says it all."""
    for name, value in options.items():
        if value:
            raise ValueError(f"--{name.replace('_', '-')}: {owner} has its own; leave it out")


def _host(
    model: str | None, num_classes: int | None, image_size: int | None, model_args: Sequence[str]
) -> nn.Module | None:
    """The host of a saved run where its name is given; else the run says how to make it."""
    if model is None:
        shape = {"num_classes": num_classes, "image_size": image_size, "model_args": model_args}
        refuse_given(shape, "a saved run")
        return None
    host = _create(model, _arguments(model_args, num_classes))
    _resize_(host, image_size)
    return host


def _load_run(run: Path, host: nn.Module | None) -> nn.Module:
    from safetensors import SafetensorError

    from ltm.api import load

    if not run.is_dir():
        raise FileNotFoundError(f"run is {run}: there is no such folder")
    try:
        return load(run, host)
    except SafetensorError as error:
        raise ValueError(f"run {run} has damaged weights ({error}): save it again") from error


def _create(
    name: str, arguments: Mapping[str, Any] | None = None, *, pretrained: bool = False
) -> nn.Module:
    import timm

    from ltm.api.deployment import remember_arguments

    check_name(name)
    try:
        model = timm.create_model(name, pretrained=pretrained, **(arguments or {}))
        return remember_arguments(model, arguments or {})
    except TypeError as error:
        raise ValueError(f"model {name} does not take these arguments: {error}") from error
    except (OSError, RuntimeError) as error:
        if pretrained:
            raise ValueError(
                f"the pretrained weights of {name} could not be fetched ({first_line(error)}): "
                "check the network, or give --weights FILE"
            ) from error
        raise ValueError(f"model {name} cannot be made: {first_line(error)}") from error


def _arguments(model_args: Sequence[str], num_classes: int | None = None) -> dict[str, Any]:
    arguments = dict(_setting("model_args", text) for text in model_args)
    if num_classes is not None:
        arguments["num_classes"] = num_classes
    return arguments


def _with_weights(
    name: str,
    path: Path,
    num_classes: int | None,
    image_size: int | None,
    model_args: Sequence[str],
) -> nn.Module:
    from timm.models import get_pretrained_cfg

    weights = read_weights(path)
    known = get_pretrained_cfg(name)
    classifier = None if known is None else known.classifier
    head = classifier if isinstance(classifier, str) else (classifier or ("head",))[0]
    bias = weights.get(f"{head}.bias")
    if bias is not None and num_classes not in (None, len(bias)):
        raise ValueError(
            f"weights {path} are for {len(bias)} classes, but {num_classes} are asked for: "
            "leave the number of classes out, or take other weights"
        )
    arguments = _arguments(model_args, num_classes if bias is None else len(bias))
    model = _create(name, arguments)
    # Weights trained at another size: a model of that size has their shapes.
    if image_size is not None and misfits(model, weights):
        resized = _create_resized(name, arguments, image_size)
        model = model if resized is None or misfits(resized, weights) else resized
    load_weights_(model, name, weights, path)
    return model


def _create_resized(name: str, arguments: Mapping[str, Any], size: int) -> nn.Module | None:
    try:
        return _create(name, {**arguments, "img_size": size})
    except ValueError:
        return None


def _resize_(model: nn.Module, image_size: int | None) -> None:
    """Take another input size; what takes any size, as convolutional stems do, notes it down."""
    if image_size is None:
        return
    host: Any = model
    built = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if built is None:
        known = getattr(model, "pretrained_cfg", None) or {}
        host.pretrained_cfg = {**known, "input_size": (3, image_size, image_size)}
        return
    check_patches(model, image_size)
    if tuple(built) == (image_size, image_size):
        return
    if not hasattr(model, "set_input_size"):
        raise ValueError(f"--image-size is {image_size}: this model takes only {built[0]}")
    try:
        host.set_input_size(img_size=(image_size, image_size))
    except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise size_refused(image_size) from error


def num_classes_of(model: nn.Module) -> int:
    """The number of classes of a model; none is an error."""
    number = int(getattr(model, "num_classes", 0) or 0)
    if number == 0:
        raise ValueError("model: it has no classes to evaluate; take one with a head")
    return number


def check_classes(model: nn.Module, class_names: Sequence[str], source: str) -> None:
    """Refuse data whose labels are not the model's classes.

    Fewer classes than the model's are fine where folders are named by class index (0000, 0001).
    """
    from ltm.api.deployment import telling_names

    number = num_classes_of(model)
    found = len(class_names)
    numbered = telling_names(class_names) is None
    if found == number or (found < number and numbered):
        return
    raise ValueError(
        f"{source} has {found} classes, but the model has {number}: take weights for {found} "
        "classes, or name the folders by the model's class indices (0000, 0001, ...)"
    )


def split_methods(texts: Iterable[str]) -> list[str]:
    """Split `tome,ltm:support=learned,sites=3+5,ltmp` into methods, each with its settings."""
    methods: list[str] = []
    for part in ",".join(texts).split(","):
        if "=" in part and ":" not in part and methods:
            methods[-1] += f",{part}"
        elif part:
            methods.append(part.strip())
    return methods


def require_method(text: str, *others: str) -> None:
    """Refuse what is no method, nor one of the `others` that a command knows."""
    from ltm.methods import methods

    known = [*methods(), *ALIASES, *others]
    if text.partition(":")[0] not in known:
        raise ValueError(f"method {text} is not known: choose from {', '.join(known)}")


def method_config(text: str, ratio: float | None = None, **settings: Any) -> MethodConfig:
    """Read a method, `ltm`, `tome`, or with settings, `ltm:support=learned,sites=3+5+8`.

    `ratio` holds unless the settings say how much to merge. `ltm-static` and `ltm-uniform` are
    short for LTM with a static mask, and with size weights only, and take further settings too.
    """
    from ltm.methods import config_from_dict, methods

    require_method(text)
    name, _, options = text.partition(":")
    if name in ALIASES:
        name, _, meant = ALIASES[name].partition(":")
        options = f"{meant},{options}"
    lists = {field.name for field in fields(methods()[name]) if "tuple" in str(field.type)}
    found = dict(_setting(name, option, lists) for option in options.split(",") if option)
    values = {**settings, **found}
    if not {"ratio", "per_block", "counts"} & set(values):
        values["ratio"] = ratio
    return config_from_dict({"method": name, **values})


def _setting(owner: str, text: str, lists: Collection[str] = ()) -> tuple[str, Any]:
    """Read `name=value`; `3+5+8` is several values, `7x7` a pair. One value of a list is a list."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{owner}: {text!r} is no setting; write name=value")
    values = [_value(part) for part in value.split("+")]
    return name, tuple(values) if len(values) > 1 or name in lists else values[0]


def _value(text: str) -> Any:
    sides = text.split("x")
    if len(sides) == 2 and all(side.isdecimal() for side in sides):
        return int(sides[0]), int(sides[1])
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text

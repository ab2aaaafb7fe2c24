"""From words to a network: the only loader, and the only grammar of `name=value`.

A value is read by the type of its field. `sites=3,5,8`, `sites=3+5+8`, `sites=[3, 5, 8]` and
`sites=(3,5,8)` are the same list, `counts=7x7,5x5` is a list of two grids, and `labels=true` is the
word "true" or the flag True, whichever the field takes. A `ModelSource` names a network. Errors are
a ValueError or FileNotFoundError of one sentence.

Importing this module imports neither torch nor timm.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from ltm.core.validation import first_line, require_least

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ltm.methods import MethodConfig

T = TypeVar("T")
Say = Callable[[str], None]
"""Takes one plain line for the user."""


def silent(line: str) -> None:
    """Say nothing, as verbs do outside of commands."""


# --- Suggestions for unknown names ---------------------------------------------------------------


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Suggest names like an unknown one, or list all of them."""
    names = sorted(known)
    close = closest(wrong, names)
    return f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(names)}"


def closest(wrong: str, names: Sequence[str]) -> list[str]:
    """Up to three names like an unknown one; similar beginnings and the same family come first."""
    family = [name for name in names if name.partition("_")[0] == wrong.partition("_")[0]]
    matcher = difflib.SequenceMatcher(b=wrong)

    def likeness(text: str) -> float:
        matcher.set_seq1(text)
        return matcher.ratio()

    for group in (family, names):
        rated = sorted((-likeness(name[: len(wrong)]), -likeness(name), name) for name in group)
        close = [name for start, _, name in rated if -start >= 0.5]
        if close:
            return close[:3]
    return []


# --- Values, by the type of their field ----------------------------------------------------------

_NOTHING = ("none", "null", "~")
_FLAGS = {"true": True, "false": False}
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)
_GRID = re.compile(r"\d+x\d+$")


def read_words(
    words: Iterable[str], types: Mapping[str, Any] | None = None, *, owner: str
) -> dict[str, Any]:
    """Read words that hold one or more `name=value`, separated by commas.

    Args:
        words: such as `sites=3,5,8,ratio=0.5`; a part without `=` belongs to the value before it.
        types: the type of each name; None guesses types from the form of the values.
        owner: what the settings belong to, for error messages.
    """
    values: dict[str, Any] = {}
    for word in words:
        for name, text in _assignments(word, owner):
            if types is None:
                values[name] = _guess(text)
            elif name in types:
                values[name] = read_value(text, types[name], f"{owner}: {name}")
            else:
                raise ValueError(f"{owner} has no setting {name}; {did_you_mean(name, types)}")
    return values


def _assignments(word: str, owner: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for part in filter(str.strip, _split(word, ",")):  # a final comma adds none
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if equals and name.isidentifier():
            found.append((name, text))
        elif found and not equals:
            found[-1] = found[-1][0], f"{found[-1][1]},{part.strip()}"
        else:
            raise ValueError(f"{owner}: {part.strip()!r} is no setting; write name=value")
    return found


def _split(text: str, separators: str) -> list[str]:
    """Split at separators outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in _BRACKETS) - (letter in _BRACKETS.values())
        if letter in separators and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _items(text: str, separators: str = ",+") -> list[str]:
    """The items of a list, with or without brackets; a final comma adds none."""
    text = text.strip()
    parts = _split(text, separators)
    if text[:1] in ("(", "[") and text.endswith(_BRACKETS[text[0]]) and len(parts) == 1:
        parts = _split(text[1:-1], separators)
    return [item.strip() for item in parts if item.strip()]


def _guess(text: str) -> Any:
    """A value of unknown type, such as an argument of a timm model."""
    text = text.strip()
    if text.lower() in _FLAGS or text.lower() in _NOTHING:
        return _FLAGS.get(text.lower())
    if _NUMBER.match(text):
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    if text.startswith("{"):
        return _mapping(text)
    items = _guess_items(text)
    if items is not None:
        return [_guess(item) for item in items]
    quoted = len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]
    return text[1:-1] if quoted else text


def _guess_items(text: str) -> list[str] | None:
    """The items of a value that is written as a list; None if it is a single value."""
    if text[:1] in ("(", "[") or "," in text:
        return _items(text, ",")
    summands = text.split("+")
    if len(summands) > 1 and all(_NUMBER.match(s) or _GRID.match(s) for s in summands):
        return summands
    return text.split("x") if _GRID.match(text) else None


def _mapping(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is no readable value: check its brackets") from error


def read_value(value: Any, hint: Any, where: str) -> Any:
    """Read a value by its type, from text or from YAML.

    `where` names the field in error messages.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        return read_value(value, parts[0], where)
    if origin in (Union, UnionType):
        return _read_any(value, parts, where)
    if origin is tuple:
        return _read_tuple(value, parts, where)
    if origin is Literal:
        return _read_word(value, parts, where)
    return _read_plain(value, hint, where)


def _read_any(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    nothing = value is None or (isinstance(value, str) and value.strip().lower() in _NOTHING)
    if nothing and NoneType in kinds and value not in words:
        return None
    problem: ValueError | None = None
    for kind in kinds:
        if kind is NoneType:
            continue
        try:
            return read_value(value, kind, where)
        except ValueError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _read_tuple(value: Any, kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    any_number = kinds[1:] == (...,)
    if isinstance(value, str) and (any_number or len(_items(value, ",+x")) > 1):
        value = _items(value, ",+" if any_number else ",+x")
    elif any_number and isinstance(value, int | float) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} is {value!r}, but must be a list")
    values = cast("Sequence[Any]", value)
    if any_number:
        kinds = (kinds[0],) * len(values)
    if len(values) != len(kinds):
        raise ValueError(f"{where} has {len(values)} values, but must have {len(kinds)}")
    return tuple(read_value(v, kind, where) for v, kind in zip(values, kinds, strict=True))


def _read_word(value: Any, words: tuple[Any, ...], where: str) -> Any:
    """Read one of some words, which YAML may have parsed as a number (32) or a flag (true)."""
    text = str(value).lower() if isinstance(value, bool) else str(value).strip()
    for word in words:
        if str(word) == text:
            return word
    raise ValueError(f"{where} is {value!r}; choose from {', '.join(map(str, words))}")


def _read_plain(value: Any, kind: type, where: str) -> Any:
    if kind is bool and isinstance(value, str) and value.strip().lower() in _FLAGS:
        return _FLAGS[value.strip().lower()]
    if kind is bool or isinstance(value, bool):
        fits = isinstance(value, kind) and (kind is bool or not issubclass(kind, int | float))
    elif kind in (int, float):
        return _read_number(value, kind, where)
    elif kind is str:
        fits = isinstance(value, str | int | float)
        value = str(value) if fits else value
    elif issubclass(kind, Path) and isinstance(value, str):
        return kind(value)
    else:
        fits = isinstance(value, kind)
    if fits:
        return value
    raise ValueError(f"{where} is {value!r}, but must be of type {kind.__name__}")


def _read_number(value: Any, kind: type, where: str) -> Any:
    """Read a number, which YAML may have parsed as text (1e-3) or as another kind (3 for 3.0)."""
    try:
        number = kind(value)
        if float(number) == float(value):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    said = "a whole number" if kind is int else "a number"
    raise ValueError(f"{where} is {value!r}, but must be {said}")


def changed(settings: T, changes: Mapping[str, Any], path: str = "") -> T:
    """Change some fields of a (nested) frozen dataclass, each read by its type."""
    kind = cast("type[Any]", type(settings))
    hints, values = get_type_hints(kind), {}
    fields = {field.name for field in dataclasses.fields(kind)}
    for name, value in changes.items():
        where = f"{path}{name}"
        if name not in fields:
            raise ValueError(f"{where} is no setting; {did_you_mean(str(name), fields)}")
        before = getattr(settings, name)
        if not dataclasses.is_dataclass(before) or isinstance(value, type(before)):
            values[name] = value if value is before else read_value(value, hints[name], where)
        elif isinstance(value, Mapping):
            values[name] = changed(before, cast("Mapping[str, Any]", value), f"{where}.")
        else:
            raise ValueError(f"{where} is {value!r}, but must be a group of settings")
    return dataclasses.replace(cast("Any", settings), **values)


def plain(value: Any) -> Any:
    """Turn dataclasses into dicts, tuples into lists and paths into text, for YAML and JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(part) for part in cast("Sequence[Any]", value)]
    return str(value) if isinstance(value, Path) else value


# --- Methods -------------------------------------------------------------------------------------


def split_methods(texts: Iterable[str], *others: str) -> list[str]:
    """Split `tome,ltm:sites=3,5,ratio=0.5,ltmp` into methods, each with its settings.

    `others` are further names that a command accepts.
    """
    known = {*_method_types(), *_aliases(), *others}
    found: list[str] = []
    for part in (part.strip() for part in _split(",".join(texts), ",")):
        head, colon, _ = part.partition(":")
        starts = bool(colon) or (head in known) or not found
        if starts or ("=" not in part and ":" not in found[-1]):
            found += [part] if part else []
        else:
            found[-1] += f",{part}"
    return found


def require_method(text: str, *others: str) -> None:
    """Raise a ValueError unless the name is a method or one of the `others`."""
    known = [*_method_types(), *_aliases(), *others]
    if text.partition(":")[0] not in known:
        raise ValueError(f"method {text} is not known: choose from {', '.join(known)}")


def method_config(
    text: str,
    ratio: float | None = None,
    *,
    per_block: float | None = None,
    options: Iterable[str] = (),
    **settings: Any,
) -> MethodConfig:
    """Read a method such as `tome`, or one with settings: `ltm:support=learned,sites=3,5,8`.

    Args:
        text: the method's name or alias, with settings after a colon.
        ratio: share of the multiply-adds to keep, unless the settings give an amount.
        per_block: share of tokens to keep in every block; takes precedence over `ratio`.
        options: further `name=value` words.
        settings: further settings as Python values; words take precedence.
    """
    from ltm.methods import config_from_dict
    from ltm.methods.base import AMOUNTS

    name, written = _written(text, options)
    values = {**settings, **written}
    if not values.keys() & AMOUNTS:
        values |= {"ratio": ratio} if per_block is None else {"per_block": per_block}
    return config_from_dict({"method": name, **values})


def written_settings(text: str, options: Iterable[str] = ()) -> frozenset[str]:
    """The names of the settings that a method's text and further words give."""
    return frozenset(_written(text, options)[1])


def _written(text: str, options: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """The name of a method, and the settings that its alias, its text and further words give."""
    require_method(text)
    name, _, words = text.partition(":")
    if name in _aliases():
        name, meant = _aliases()[name]
        words = f"{meant},{words}" if words else meant
    types = _method_types()[name].settings_types()
    return name, read_words([*([words] if words else []), *options], types, owner=name)


def _method_types() -> dict[str, type[MethodConfig]]:
    from ltm.methods import methods

    return methods()


def _aliases() -> dict[str, tuple[str, str]]:
    """Short names for methods with settings."""
    return {
        alias: (name, settings)
        for name, method in _method_types().items()
        for alias, settings in method.aliases.items()
    }


# --- Networks ------------------------------------------------------------------------------------


_TRANSFORMERS = "hf:"
"""The prefix of names of Hugging Face transformers."""


class SizeError(ValueError):
    """The network does not take images of the requested size."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Which network to load, and with which weights."""

    model: str | None = None
    """Name of a timm model, or hf:NAME for a Hugging Face model with its weights, from the hub or a
    folder."""
    pretrained: bool = False
    """Use timm's pretrained weights."""
    weights: Path | None = None
    """Use the weights of a .safetensors or .pth file with timm's keys. Only tensors are read."""
    run: Path | None = None
    """Use a saved network instead: a folder that ltm wrote."""
    verify: bool = True
    """Refuse a folder whose files changed after saving. Turn it off if you edited them."""
    num_classes: int | None = None
    """Number of classes; by default, as many as the weights have."""
    image_size: int | None = None
    """Image size in pixels; by default the size that the model was made for."""
    model_args: tuple[str, ...] = ()
    """Extra arguments for the model, such as depth=4."""

    def given(self) -> dict[str, bool]:
        """For each option, whether it differs from its default."""
        return {f.name: getattr(self, f.name) != f.default for f in dataclasses.fields(self)}

    def load(
        self, *, untrained: bool = False, merges: bool = False, say: Say = silent
    ) -> nn.Module:
        """Make the network, in evaluation mode.

        Args:
            untrained: allow a network without trained weights, as for measuring speed.
            merges: refuse a network that cannot be converted, before its weights are read.
            say: is told which entry of a weights file is used.
        """
        require_least("image_size", self.image_size)
        if self.pretrained and self.weights is not None:
            raise ValueError("pretrained and weights: give one of them, not both")
        if self.run is not None:
            refuse_given({"pretrained": self.pretrained, "weights": self.weights}, "a saved run")
            return _load_run(self.run, self._host(), verify=self.verify)
        if self.model is None:
            raise ValueError("model: give a timm name with --model, or a saved run with --run")
        if self.model.startswith(_TRANSFORMERS):
            return self._of_transformers(self.model.removeprefix(_TRANSFORMERS), merges=merges)
        arguments = self.arguments()
        _check_host(self.model, arguments, self.image_size, merges=merges)
        if self.weights is not None:
            built = self._with_weights(self.model, self.weights, say)
        else:
            if not (self.pretrained or untrained):
                raise ValueError(
                    f"model {self.model} has no weights yet: give --pretrained or --weights FILE"
                )
            resized = None if self.pretrained else self._resized(arguments)
            built = resized or create_model(self.model, arguments, pretrained=self.pretrained)
        _resize_(built, self.image_size)
        _check_forward(built, self.image_size)
        return built.eval()

    def arguments(self) -> dict[str, Any]:
        """The arguments for timm, besides the name."""
        arguments = read_words(self.model_args, owner="model_args")
        if self.num_classes is not None:
            arguments["num_classes"] = self.num_classes
        return arguments

    @property
    def name(self) -> str:
        """What to call the network."""
        return self.model or (self.run.name if self.run is not None else "model")

    @property
    def origin(self) -> str:
        """Where the weights come from."""
        if self.run is not None:
            return f"the saved network {self.run.name}"
        if self.model is not None and self.model.startswith(_TRANSFORMERS):
            return "its own"
        return "timm's own" if self.pretrained else str(self.weights and self.weights.name)

    def _host(self) -> nn.Module | None:
        """The network of a saved run, made by its name; None if no name is given."""
        if self.model is None:
            shape = ("num_classes", "image_size", "model_args")
            refuse_given({name: getattr(self, name) for name in shape}, "a saved run")
            return None
        host = create_model(self.model, self.arguments())
        _resize_(host, self.image_size)
        return host

    def _of_transformers(self, name: str, *, merges: bool) -> nn.Module:
        from ltm.adapters.base import select_adapter
        from ltm.api.pretrained import open_pretrained

        fixed = ("weights", "num_classes", "image_size", "model_args")
        refuse_given({name: getattr(self, name) for name in fixed}, "a network of transformers")
        built = open_pretrained(name)
        if merges:
            select_adapter(built)
        return built

    def _with_weights(self, name: str, path: Path, say: Say) -> nn.Module:
        from timm.models import get_pretrained_cfg

        from ltm.api.saving import misfits

        weights = read_weights(path, say)
        known = get_pretrained_cfg(name)
        classifier = None if known is None else known.classifier
        head = classifier if isinstance(classifier, str) else (classifier or ("head",))[0]
        bias = weights.get(f"{head}.bias")
        if bias is not None and self.num_classes not in (None, len(bias)):
            raise ValueError(
                f"weights {path} are for {len(bias)} classes, but {self.num_classes} are asked "
                "for: leave the number of classes out, or take other weights"
            )
        arguments = self.arguments()
        if bias is not None:
            arguments["num_classes"] = len(bias)
        model = create_model(name, arguments)
        # The weights may have been trained at the requested size, and have the shapes of that size.
        if misfits(model, weights):
            resized = self._resized(arguments)
            model = model if resized is None or misfits(resized, weights) else resized
        load_weights_(model, weights, f"weights {path} do not fit {name}")
        return model

    def _resized(self, arguments: Mapping[str, Any]) -> nn.Module | None:
        """The network made for the requested size; None if there is none or timm cannot make it."""
        if self.image_size is None:
            return None
        try:
            return create_model(str(self.model), {**arguments, "img_size": self.image_size})
        except ValueError:
            return None


Network = Union["nn.Module", str, Path, "ModelSource"]
"""A network; a folder that `ltm.save` wrote; a timm name, which means timm's own weights; or a
`ModelSource`."""


def open_model(model: Network, device: torch.device | None = None, **options: Any) -> nn.Module:
    """Return a network as it is, or load it.

    Args:
        model: the network, or a name of it.
        device: where the result should be; a given network is copied there.
        options: those of `ModelSource.load`.
    """
    from ltm.core.finite import require_finite

    source = source_of(model)
    network = cast("nn.Module", model) if source is None else source.load(**options)
    require_finite(network.state_dict(), "model: ")
    if source is not None:
        return network.to(device)
    return network if device is None else copy.deepcopy(network).to(device)


def source_of(model: Network) -> ModelSource | None:
    """The source that a name stands for; None if `model` is a network itself."""
    if isinstance(model, ModelSource):
        return model
    if isinstance(model, str | Path):
        if Path(model).is_dir():
            return ModelSource(run=Path(model))
        return ModelSource(model=str(model), pretrained=True)
    return None


def saved_config(run: Path) -> dict[str, Any] | None:
    """The config.json in the folder of a network, a detector or a training run; None if none."""
    from ltm.api.folders import CONFIG, read_config, saved_folder

    folder = saved_folder(run)
    return read_config(folder) if (folder / CONFIG).is_file() else None


def name_of(model: Network) -> str:
    """What to call a network in results."""
    source = source_of(model)
    if source is not None:
        return source.model or str(source.run)
    known = getattr(model, "pretrained_cfg", None) or {}
    return str(known.get("architecture") or type(model).__name__)


def refuse_given(options: Mapping[str, object], owner: str) -> None:
    """Raise a ValueError for options that would be ignored, because the owner decides them."""
    for name, value in options.items():
        if value:
            raise ValueError(f"--{name.replace('_', '-')}: {owner} has its own; leave it out")


def create_model(
    name: str, arguments: Mapping[str, Any] | None = None, *, pretrained: bool = False
) -> nn.Module:
    """Make a timm model, which remembers its arguments for `ltm.save`."""
    import timm

    from ltm.api.pretrained import reaching_hub

    if name.startswith(_TRANSFORMERS):
        raise ValueError(
            f"model is {name}: only timm's networks are made anew here; networks of transformers "
            "come with their weights, for the verbs that train nothing"
        )
    check_name(name)
    known = timm.get_pretrained_cfg(name) if pretrained else None
    on_hub = known is not None and known.hf_hub_id and known.file is None
    with reaching_hub() if on_hub else nullcontext("") as unreached:
        return _created(name, arguments or {}, pretrained=pretrained, unreached=unreached)


def _created(
    name: str, arguments: Mapping[str, Any], *, pretrained: bool, unreached: str
) -> nn.Module:
    import timm

    from ltm.api.saving import remember_arguments

    try:
        model = timm.create_model(name, pretrained=pretrained, **arguments)
        return remember_arguments(model, arguments)
    except TypeError as error:
        raise ArgumentsError(f"model {name} does not take these arguments: {error}") from error
    except Exception as error:  # networks and hubs fail in ways of their own
        if pretrained:
            reason = f"{unreached} cannot be reached" if unreached else first_line(error)
            raise ValueError(
                f"the pretrained weights of {name} could not be fetched ({reason}): "
                "check the network, or give --weights FILE"
            ) from error
        raise ValueError(f"model {name} cannot be made: {first_line(error)}") from error


class ArgumentsError(ValueError):
    """A timm model does not take these arguments."""


def check_name(name: str) -> None:
    """Raise a ValueError with suggestions for a name that timm does not know."""
    import timm

    if name.startswith(("ltm_", "demo_")):
        import ltm.zoo  # noqa: F401 - registers its names
    architecture = name.partition(".")[0]
    if ":" in name or timm.is_model(architecture):
        return
    close = closest(architecture, timm.list_models())
    hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() names them"
    raise ValueError(f"model {name} is not known to timm; {hint}")


def _load_run(run: Path, host: nn.Module | None, *, verify: bool) -> nn.Module:
    from ltm.api import load
    from ltm.api.pretrained import give_scores_

    if not run.is_dir():
        raise FileNotFoundError(f"run is {run}: there is no such folder")
    model = load(run, host, verify=verify)
    give_scores_(model)
    return model


def _resize_(model: nn.Module, image_size: int | None) -> None:
    """Set another input size; a network that takes any size only records it."""
    from ltm.core.cost import channels_of

    if image_size is None:
        return
    host: Any = model
    built = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if built is None:
        known = getattr(model, "pretrained_cfg", None) or {}
        size = channels_of(model), image_size, image_size
        host.pretrained_cfg = {**known, "input_size": size}
        return
    _check_patches(model, image_size)
    if tuple(built) == (image_size, image_size):
        return
    if not hasattr(model, "set_input_size"):
        raise ValueError(f"--image-size is {image_size}: this model takes only {built[0]}")
    try:
        host.set_input_size(img_size=(image_size, image_size))
    except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise _size_refused(image_size) from error


# --- Checks of names and sizes, before any weights are read --------------------------------------


def _check_host(
    name: str, arguments: Mapping[str, Any], image_size: int | None, *, merges: bool
) -> None:
    """Raise a ValueError for an unknown name, a size that does not fit, or what cannot merge."""
    check_name(name)
    made = outline(name, arguments)
    if made is None:
        return
    if merges:
        from ltm.adapters.base import select_adapter

        select_adapter(made)
    _check_patches(made, image_size)


def outline(name: str, arguments: Mapping[str, Any]) -> nn.Module | None:
    """The network on `meta`, which takes no time; None if that fails."""
    import timm
    import torch

    if ":" in name or name.startswith("ltm_"):  # on a hub, or converted already
        return None
    try:
        with torch.device("meta"):
            return timm.create_model(name, **arguments)
    except Exception:  # noqa: BLE001 - creating the real one says what is wrong
        return None


def _check_patches(model: nn.Module, image_size: int | None) -> None:
    """Raise an error for a size that patches do not divide, unless it is the network's own."""
    embedding: Any = getattr(model, "patch_embed", None)
    sides = getattr(embedding, "patch_size", None)
    if image_size is None or not isinstance(sides, tuple):
        return
    built = tuple(getattr(embedding, "img_size", None) or ())
    if built == (image_size, image_size) or getattr(embedding, "dynamic_img_pad", False):
        return
    multiple = math.lcm(*cast("tuple[int, ...]", sides))
    if image_size % multiple:
        raise SizeError(
            f"--image-size is {image_size}: it must be a multiple of {multiple}, the side of this "
            "network's patches"
        )


def _check_forward(model: nn.Module, image_size: int | None) -> None:
    """Raise an error for a size at which the network fails; tried on `meta`."""
    from ltm.adapters.base import select_adapter
    from ltm.core.cost import meta_copy, meta_images, run_on_meta

    if image_size is None:
        return
    try:
        select_adapter(model)
    except ValueError:
        return
    try:
        run_on_meta(meta_copy(model), meta_images(model, (image_size, image_size)))
    except (RuntimeError, AssertionError, ValueError, ZeroDivisionError) as error:
        raise _size_refused(image_size) from error


def _size_refused(image_size: int) -> SizeError:
    return SizeError(
        f"--image-size is {image_size}: this network cannot take it; leave it out, or give a "
        "multiple of 32"
    )


# --- Weights: only tensors are read, and loaded strictly or not at all ---------------------------

_ENTRIES = {
    "state_dict_ema": "the moving average of the weights",
    "model_ema": "the moving average of the weights",
    "state_dict": "the weights",
    "model": "the weights",
}
"""The entries of checkpoints that may hold a state dict; averaged weights take precedence."""
_WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")
"""What DistributedDataParallel and torch.compile write before the name of a parameter."""
_PICKLED = (".pth", ".pt", ".bin", ".tar", ".ckpt")
_DAMAGED = "the file is damaged, or holds more than tensors; copy it again or save its state dict"


def read_weights(path: Path, say: Say = silent) -> dict[str, Tensor]:
    """Read a state dict, in float32 whatever its precision; nothing but tensors is unpickled.

    `say` is told which entry of a checkpoint is used.
    """
    import torch

    stored = _read_file(path)
    for entry, content in _ENTRIES.items():
        if isinstance(stored, Mapping) and isinstance(stored.get(entry), Mapping):
            stored = stored[entry]
            say(f"Weights: {content}, entry {entry} of {path.name}")
    if not isinstance(stored, Mapping):
        raise ValueError(f"weights {path} hold a {type(stored).__name__}, not a state dict")
    found: dict[str, Tensor] = {}
    for name, value in cast("Mapping[str, Any]", stored).items():
        if torch.is_tensor(value):
            found[_WRAPPERS.sub("", name)] = value.float() if value.is_floating_point() else value
    return found


def _read_file(path: Path) -> Any:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise FileNotFoundError(f"weights is {path}: there is no such file")
    suffix = path.suffix.lower()
    if suffix not in (".safetensors", *_PICKLED):
        known = ", ".join((".safetensors", *_PICKLED))
        raise ValueError(f"weights is {path}: its name must end in one of {known}")
    try:
        if suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of files that it then refuses
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message advises to unpickle anyway
        raise ValueError(f"weights {path} cannot be read: {_DAMAGED}") from error
    except (SafetensorError, RuntimeError, EOFError, KeyError) as error:
        raise ValueError(
            f"weights {path} cannot be read ({first_line(error)}): {_DAMAGED}"
        ) from error


def load_weights_(
    model: nn.Module, weights: Mapping[str, Tensor], problem: str, *, new_head: bool = False
) -> list[str]:
    """Load weights strictly; if they do not fit, raise a ValueError and change nothing.

    Args:
        model: takes the weights; mergers without weights in the file stay as they are.
        weights: with the keys of the model.
        problem: how the error message begins.
        new_head: leave out a head for other classes, so that the model keeps its own.

    Returns:
        The names that were left out.
    """
    from ltm.api.saving import misfits
    from ltm.core.finite import require_finite

    left_out: list[str] = []
    if new_head:
        own, head = model.state_dict(), head_parameters(model)
        left_out = [n for n in weights if n in head and weights[n].shape != own[n].shape]
        weights = {name: value for name, value in weights.items() if name not in left_out}
    found = [
        f"{name} is {wrong}"
        for name, wrong in misfits(model, weights).items()
        if name not in left_out and (name in weights or ".merger." not in name)
    ]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"{problem}: {'; '.join(found[:3])}{more}; name the model that they were saved from"
        )
    require_finite(weights, f"{problem}: ")
    model.load_state_dict(weights, strict=False)
    return left_out


def head_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the classifier's parameters."""
    named: Any = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or "head"
    prefixes = tuple(f"{name}." for name in ([named] if isinstance(named, str) else named))
    return frozenset(n for n, _ in model.named_parameters() if n.startswith(prefixes))


# --- Classes -------------------------------------------------------------------------------------


def num_classes_of(model: nn.Module) -> int:
    """The number of classes of a model; a ValueError if it has none."""
    number = int(getattr(model, "num_classes", 0) or 0)
    if number == 0:
        raise ValueError("model: it has no classes to evaluate; take one with a head")
    return number


def read_class_names(path: Path) -> tuple[str, ...]:
    """Names from a text file, one per line, or from the `label_names` of a config.json."""
    if not path.is_file():
        raise FileNotFoundError(f"class names are to come from {path}: there is no such file")
    text = path.read_text(encoding="utf-8")
    if path.suffix.lower() != ".json":
        return tuple(line.strip() for line in text.splitlines() if line.strip())
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON ({error})") from error
    names = found.get("label_names") if isinstance(found, dict) else found
    if not isinstance(names, list):
        raise ValueError(f"{path} holds no class names: a list, or an entry label_names, is needed")
    return tuple(str(name) for name in names)


def check_classes(model: nn.Module, class_names: Sequence[str], source: str) -> None:
    """Raise a ValueError if the classes of the data are not those of the model.

    Data may have fewer classes if its folders are named by class index (0000, 0001).
    """
    from ltm.api.saving import telling_names

    number = num_classes_of(model)
    found = len(class_names)
    numbered = telling_names(class_names) is None
    if found == number or (found < number and numbered):
        return
    raise ValueError(
        f"{source} has {found} classes, but the model has {number}: take weights for {found} "
        "classes, or name the folders by the model's class indices (0000, 0001, ...)"
    )

"""What travels with an exported model: how images are prepared, what the classes are called."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo
from torch import nn

from ltm.api import conversion_of, is_merging, token_counts
from ltm.data.config import DataConfig
from ltm.data.transforms import ImageSpec
from ltm.deployment.settings import InputSettings
from ltm.evaluation.images import expected_images
from ltm.models import name_of, read_class_names, saved_config

_PREFIX = "ltm."


@dataclass(frozen=True, kw_only=True)
class ModelInformation:
    """All that a user of the file needs besides the file."""

    model: str
    """timm's name of the architecture."""
    spec: ImageSpec
    class_names: tuple[str, ...] | None = None
    token_merging: Mapping[str, Any] | None = None
    """The method's settings and the tokens after each site; None for an original network."""

    def to_strings(self) -> dict[str, str]:
        """The entries of a file's metadata, JSON each."""
        entries = {
            "model": self.model,
            "preprocessing": dataclasses.asdict(self.spec),
            "class_names": self.class_names,
            "token_merging": self.token_merging,
        }
        return {
            _PREFIX + name: json.dumps(value)
            for name, value in entries.items()
            if value is not None
        }

    def adjusted(self, num_classes: int, given: InputSettings) -> ModelInformation:
        """With the class names and the crop that the user gives."""
        names, spec = self.class_names, self.spec
        if given.class_names is not None:
            names = read_class_names(given.class_names)
            _check_class_names(names, num_classes)
        if given.crop_ratio is not None:
            spec = dataclasses.replace(spec, crop_ratio=given.crop_ratio)
        return dataclasses.replace(self, class_names=names, spec=spec)

    @staticmethod
    def from_strings(entries: Mapping[str, str]) -> ModelInformation:
        """Read what `to_strings` wrote; anything else is a ValueError."""
        try:
            found = {
                name.removeprefix(_PREFIX): json.loads(value)
                for name, value in entries.items()
                if name.startswith(_PREFIX)
            }
            stored: dict[str, Any] = found["preprocessing"]
            for name in ("size", "mean", "std"):
                stored[name] = tuple(stored[name])
            names = found.get("class_names")
            return ModelInformation(
                model=found["model"],
                spec=ImageSpec(**stored),
                class_names=None if names is None else tuple(names),
                token_merging=found.get("token_merging"),
            )
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                "it does not say how images are prepared: `ltm export` did not write it"
            ) from error


def describe(
    model: nn.Module, *, class_names: Sequence[str] | None = None, spec: ImageSpec | None = None
) -> ModelInformation:
    """What is known about a model.

    Class names are the given ones, or those that timm knows: from a hub's config, or ImageNet's
    if the model was made for it. A converted model takes images of the size it was planned for.
    """
    known: Any = getattr(model, "pretrained_cfg", None) or {}
    number = int(getattr(model, "num_classes", 0) or 0)
    names = tuple(class_names) if class_names is not None else _known_names(known, number)
    _check_class_names(names, number)
    return ModelInformation(
        model=name_of(model),
        spec=spec or expected_images(model, DataConfig(source="images")),
        class_names=names,
        token_merging=_merging(model) if is_merging(model) else None,
    )


def known_about(
    model: nn.Module, given: InputSettings, *, run: Path | None = None, source: str = "images"
) -> ModelInformation:
    """What the user, the saved folder `run` or timm, in this order, say about a network.

    `source` is where its images come from.
    """
    names = None if run is None or given.class_names is not None else saved_class_names(run)
    spec = expected_images(model, DataConfig(source=source))
    known = describe(model, class_names=names, spec=spec)
    return known.adjusted(int(getattr(model, "num_classes", 0) or 0), given)


def _check_class_names(names: Sequence[str] | None, number: int) -> None:
    """Refuse names that are not as many as the classes."""
    if names is not None and len(names) != number:
        raise ValueError(f"class_names: got {len(names)} for a model of {number} classes.")


def saved_class_names(run: Path) -> tuple[str, ...] | None:
    """The class names in a saved model's folder, if it has any."""
    names = (saved_config(run) or {}).get("label_names")
    return None if not names else tuple(str(name) for name in names)


def _merging(model: nn.Module) -> dict[str, Any]:
    done = conversion_of(model)
    return {
        **done.config.to_dict(),
        "family": done.family,
        "token_counts": token_counts(model),
        "macs_share": done.macs_after / done.macs_before,
        "frozen": done.frozen,
    }


def _known_names(known: Mapping[str, Any], number: int) -> tuple[str, ...] | None:
    labels = known.get("label_names")
    if labels and len(labels) == number:
        descriptions = known.get("label_descriptions") or {}
        return tuple(str(descriptions.get(label, label)) for label in labels)
    if number == 1000 and known.get("num_classes") == 1000:
        imagenet = ImageNetInfo("imagenet-1k")
        return tuple(str(imagenet.index_to_description(index)) for index in range(number))
    return None

"""Zero-shot classifiers: an image tower, with text features of prompts as its classes.

`hf:NAME` is a CLIP or SigLIP of transformers. `open_clip:NAME:TAG`, `open_clip:hf-hub:NAME` and
`open_clip:local-dir:FOLDER` are models of open_clip; those with an image tower of timm can merge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ltm.api.pretrained import SCHEME, load_pretrained, preprocessing
from ltm.core.validation import first_line
from ltm.extras import require

OPEN_CLIP = "open_clip:"
TEMPLATES = ("a photo of a {}.",)


class ZeroShotClassifier(nn.Module):
    """Scores images by their similarity to the prompts of each class."""

    classes: Tensor
    """One direction per class, `k d`."""

    def __init__(
        self,
        tower: nn.Module,
        classes: Tensor,
        *,
        scale: float = 100.0,
        bias: float = 0.0,
        pretrained_cfg: Mapping[str, Any] | None = None,
    ) -> None:
        """Take an image tower, which gives features `b d`, and class features `k d`."""
        super().__init__()
        self.tower = tower
        self.register_buffer("classes", functional.normalize(classes.float(), dim=-1))
        self.scale, self.bias = scale, bias
        self.num_classes = len(classes)
        self.pretrained_cfg = dict(pretrained_cfg or {})

    def forward(self, images: Tensor) -> Tensor:
        features = functional.normalize(self.tower(images), dim=-1)
        return self.scale * features @ self.classes.to(features.dtype).T + self.bias


class _Towers(NamedTuple):
    """Both towers of a model."""

    images: nn.Module
    read: Callable[[list[str]], Tensor]
    """Gives the features of texts, `k d`."""
    scale: float
    bias: float
    pretrained_cfg: dict[str, Any]


def open_zero_shot(
    name: str, class_names: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> ZeroShotClassifier:
    """Make a classifier from a model of images and texts.

    Args:
        name: `hf:NAME`, `open_clip:NAME:TAG`, or another form of this module's docstring.
        class_names: the names of the classes.
        templates: texts with {} in place of the name; a class is the mean over its prompts.
    """
    for template in templates:
        if "{}" not in template:
            raise ValueError(f"templates: {template!r} has no {{}} in the place of the class name")
    towers = _open(name)
    classes = torch.stack([_direction(towers, class_name, templates) for class_name in class_names])
    known = {**towers.pretrained_cfg, "architecture": name, "num_classes": len(class_names)}
    known["label_names"] = list(class_names)
    model = ZeroShotClassifier(
        towers.images, classes, scale=towers.scale, bias=towers.bias, pretrained_cfg=known
    )
    return model.eval()


@torch.no_grad()
def _direction(towers: _Towers, class_name: str, templates: Sequence[str]) -> Tensor:
    prompts = [template.format(class_name) for template in templates]
    return functional.normalize(towers.read(prompts), dim=-1).mean(dim=0)


def _open(name: str) -> _Towers:
    for scheme, opened in ((SCHEME, _of_transformers), (OPEN_CLIP, _of_open_clip)):
        if name.startswith(scheme):
            try:
                return opened(name.removeprefix(scheme))
            except (OSError, RuntimeError, KeyError) as error:
                raise ValueError(f"model {name} cannot be opened: {first_line(error)}") from error
    raise ValueError(
        f"zero-shot: model is {name}, which has no text tower; give hf:NAME of a CLIP or SigLIP, "
        "or open_clip:NAME:TAG"
    )


def _number(value: Any, otherwise: float) -> float:
    return otherwise if value is None else float(value.detach())


# --- transformers --------------------------------------------------------------------------------


_TWO_TOWERS = (
    "AltCLIPModel",
    "ChineseCLIPModel",
    "CLIPModel",
    "MetaClip2Model",
    "Siglip2Model",
    "SiglipModel",
)
"""Networks of transformers with a tower for images and one for texts."""


class _ProjectedTower(nn.Module):
    """A vision tower of transformers with the projection that CLIP puts on it."""

    def __init__(self, tower: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.tower, self.projection = tower, projection

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(self.tower(images).pooler_output)


def _of_transformers(name: str) -> _Towers:
    transformers = require("transformers")
    model: Any = load_pretrained(name, {kind: getattr(transformers, kind) for kind in _TWO_TOWERS})
    model.eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    length = model.config.text_config.max_position_embeddings

    def read(texts: list[str]) -> Tensor:
        words = tokenizer(
            texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        found = model.get_text_features(**words)
        return getattr(found, "pooler_output", found)

    tower = _ProjectedTower(
        model.vision_model, getattr(model, "visual_projection", None) or nn.Identity()
    )
    scale, bias = model.logit_scale.detach().exp(), getattr(model, "logit_bias", None)
    return _Towers(tower, read, float(scale), _number(bias, 0.0), preprocessing(name, model.config))


# --- open_clip -----------------------------------------------------------------------------------


def _of_open_clip(name: str) -> _Towers:
    open_clip = require("open_clip")
    architecture, tag = name, None
    if not name.startswith(("hf-hub:", "local-dir:")):
        architecture, _, tag = name.partition(":")
        if not tag:
            tags = open_clip.list_pretrained_tags_by_model(architecture)
            named = f"model open_clip:{name}"
            raise ValueError(
                f"{named}: write open_clip:{architecture}:TAG, where TAG is {', '.join(tags)}"
                if tags
                else f"{named}: open_clip has no weights for {architecture}; "
                "open_clip.list_pretrained() lists what it has"
            )
    model: Any = open_clip.create_model(architecture, pretrained=tag).eval()
    tokenizer: Any = open_clip.get_tokenizer(architecture)
    bias = getattr(model, "logit_bias", None)
    return _Towers(
        cast("nn.Module", model.visual),
        lambda texts: model.encode_text(tokenizer(texts)),
        float(model.logit_scale.detach().exp()),
        _number(bias, 0.0),
        _entries(open_clip.get_model_preprocess_cfg(model)),
    )


def _entries(known: Mapping[str, Any]) -> dict[str, Any]:
    """The preprocessing of open_clip as entries of timm."""
    size = known.get("size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return {
        "input_size": (3, int(height), int(width)),
        "crop_pct": 1.0,
        "crop_mode": "squash" if known.get("resize_mode") == "squash" else "center",
        "interpolation": known.get("interpolation", "bicubic"),
        "mean": tuple(known["mean"]),
        "std": tuple(known["std"]),
    }

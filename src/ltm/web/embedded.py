"""Networks that come with the package: small, trained on generated shapes, kept in half precision.

`python -m reproduction.benchmarks.embedded_networks` trains them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ltm.data.config import DataConfig
from ltm.data.shapes import ShapesClassification
from ltm.data.transforms import ImageSpec, evaluation_transform, image_spec
from ltm.web.networks import Network

SIDE, CLASSES = 96, 20
SAMPLE = 64
"""Images for class statistics and thresholds."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """timm's name of a network, and the arguments that make it small."""

    model: str
    arguments: Mapping[str, Any]

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments as settings of a training write them."""
        return tuple(f"{name}={value}".replace(" ", "") for name, value in self.arguments.items())


EMBEDDED = {
    "ViT": Architecture(
        model="vit_tiny_patch16_224",
        arguments={
            "img_size": SIDE,
            "patch_size": 8,
            "embed_dim": 64,
            "depth": 6,
            "num_heads": 2,
        },
    ),
    "Swin": Architecture(
        model="swin_tiny_patch4_window7_224",
        arguments={
            "img_size": SIDE,
            "patch_size": 4,
            "window_size": 6,
            "embed_dim": 32,
            "depths": (2, 2),
            "num_heads": (2, 4),
        },
    ),
}
"""By short names."""


def display_name(name: str) -> str:
    """What the page calls a network, lest it be taken for one that knows photographs."""
    return f"{name} (generated shapes)"


def weights_path(name: str) -> Path:
    """Where the package keeps a network's weights."""
    return Path(__file__).with_name("weights") / f"{name.lower()}.safetensors"


def embedded_network(name: str) -> Network:
    """A network of the package, by its short name."""
    if name not in EMBEDDED:
        raise ValueError(f"embedded is {name}: known are {', '.join(EMBEDDED)}")
    found = EMBEDDED[name]
    model = timm.create_model(found.model, num_classes=CLASSES, **found.arguments)
    weights = load_file(weights_path(name))
    model.load_state_dict({key: value.float() for key, value in weights.items()}, strict=True)
    images = ShapesClassification("train", SAMPLE, SIDE, CLASSES)
    spec = shapes_spec(model)
    return Network(
        name=display_name(name),
        model=model.eval().requires_grad_(False),
        spec=spec,
        class_names=tuple(images.class_names),
        sample=_inputs(images, spec),
    )


def shapes_spec(model: nn.Module) -> ImageSpec:
    """Images of generated shapes as a network expects them."""
    return image_spec(DataConfig(source="shapes"), model)


def _inputs(images: ShapesClassification, spec: ImageSpec) -> Tensor:
    dataset = images.with_transform(evaluation_transform(spec, normalize=True))
    return torch.stack([dataset[index][0] for index in range(len(dataset))])

"""Models by name: importing this registers them with timm.

`ltm_<timm name>` are the paper's: `timm.create_model("ltm_vit_small_patch16_224", pretrained=True)`
loads timm's own weights and converts; `token_merging=` takes another config than `LTM(ratio=0.7)`.

`demo_vit` comes with the package, weights included, and merges nothing yet. It classifies the
generated shapes of `DEMO_DATA`, and has enough tokens for merging to pay on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
from safetensors.torch import load_file
from timm.models import register_model
from torch import nn

from ltm.api import merge_tokens_
from ltm.api.saving import remember_arguments
from ltm.methods import LTM, MethodConfig

MODELS = {
    "ltm_mobilevit_xs": "mobilevit_xs",
    "ltm_mobilevit_s": "mobilevit_s",
    "ltm_efficientvit_b1": "efficientvit_b1.r224_in1k",
    "ltm_efficientvit_b1_288": "efficientvit_b1.r288_in1k",
    "ltm_vit_small_patch16_224": "vit_small_patch16_224",
    "ltm_vit_base_patch16_224": "vit_base_patch16_224",
    "ltm_swin_tiny_patch4_window7_224": "swin_tiny_patch4_window7_224",
    "ltm_swin_base_patch4_window7_224": "swin_base_patch4_window7_224",
}

DEMO_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "demo_vit": ("vit_tiny_patch16_224", {"patch_size": 8, "depth": 6}),
}
"""timm's network, and the arguments that make it small."""
DEMO_CLASSES = 20
DEMO_DATA = f"shapes:classes={DEMO_CLASSES},size=224,small=1"


def demo_weights(name: str) -> Path:
    """Where the package keeps the weights of a demo model, in half precision."""
    return Path(__file__).with_name("weights") / f"{name}.safetensors"


def _paper_model(host: str) -> Callable[..., nn.Module]:
    def create(
        pretrained: bool = False, token_merging: MethodConfig | None = None, **arguments: Any
    ) -> nn.Module:
        model = timm.create_model(host, pretrained=pretrained, **arguments)
        merge_tokens_(model, token_merging or LTM(ratio=0.7))
        return model

    create.__doc__ = f"timm's `{host}`, converted."
    return create


def _demo_model(name: str) -> Callable[..., nn.Module]:
    host, small = DEMO_MODELS[name]

    def create(pretrained: bool = False, **arguments: Any) -> nn.Module:
        model = timm.create_model(host, **{"num_classes": DEMO_CLASSES, **small, **arguments})
        if pretrained:
            weights = load_file(demo_weights(name))
            model.load_state_dict({key: value.float() for key, value in weights.items()})
        return remember_arguments(model, {**small, **arguments})

    create.__doc__ = f"A small `{host}` that classifies generated shapes."
    return create


def _register(name: str, create: Callable[..., nn.Module]) -> None:
    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__
    setattr(sys.modules[__name__], name, create)
    register_model(create)


for _name, _host in MODELS.items():
    _register(_name, _paper_model(_host))
for _name in DEMO_MODELS:
    _register(_name, _demo_model(_name))

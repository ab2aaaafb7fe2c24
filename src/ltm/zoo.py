"""The paper's models by name: importing this registers `ltm_<timm name>` with timm.

`timm.create_model("ltm_vit_small_patch16_224", pretrained=True)` loads timm's own weights and
converts; `token_merging=` takes another config than `LTM(ratio=0.7)`.
"""

from __future__ import annotations

import sys
from typing import Any

import timm
from timm.models import register_model
from torch import nn

from ltm.api import merge_tokens_
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

__all__: list[str] = []
default_cfgs: dict[str, Any] = {}


def _register(name: str, host: str) -> None:
    def create(
        pretrained: bool = False, token_merging: MethodConfig | None = None, **arguments: Any
    ) -> nn.Module:
        model = timm.create_model(host, pretrained=pretrained, **arguments)
        merge_tokens_(model, token_merging or LTM(ratio=0.7))
        return model

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"timm's `{host}`, converted."
    setattr(sys.modules[__name__], name, create)
    register_model(create)


for _name, _host in MODELS.items():
    _register(_name, _host)

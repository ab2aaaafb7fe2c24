"""Small networks of every family, quick enough for tables of tests."""

import copy
import functools
from collections.abc import Callable

import timm
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.efficientvit_mit import EfficientVit
from timm.models.eva import Eva
from timm.models.mobilevit import MobileVitBlock
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

NUM_CLASSES = 10


def _vit(**arguments: object) -> nn.Module:
    settings = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 6, "num_heads": 2}
    return VisionTransformer(**{**settings, "num_classes": NUM_CLASSES, **arguments})


def _mobilevit() -> nn.Module:
    """The smallest one with a single transformer layer a block, two in the first."""
    model = timm.create_model("mobilevit_xxs", num_classes=NUM_CLASSES)
    hosts = [module for module in model.modules() if isinstance(module, MobileVitBlock)]
    for index, host in enumerate(hosts):
        host.transformer = host.transformer[: 2 if index == 0 else 1]
    return model


def _efficientvit() -> nn.Module:
    return EfficientVit(
        widths=(8, 16, 24, 32, 48),
        depths=(1, 1, 1, 2, 1),
        head_dim=16,
        head_widths=(64, 80),
        num_classes=NUM_CLASSES,
    )


def _swin() -> nn.Module:
    return SwinTransformer(
        img_size=112, embed_dim=16, depths=(2, 2), num_heads=(1, 2), num_classes=NUM_CLASSES
    )


def _eva(**arguments: object) -> nn.Module:
    """DINOv3 in small."""
    settings = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 6, "num_heads": 2}
    rotary = {"use_rot_pos_emb": True, "use_abs_pos_emb": False, "rope_type": "dinov3"}
    settings["head_init_scale"] = 1.0
    return Eva(**{**settings, **rotary, "num_classes": NUM_CLASSES, **arguments})


SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "vit": _vit,
    "layer_scale": lambda: _vit(init_values=0.1, no_embed_class=True),
    "registers": lambda: _vit(reg_tokens=4, no_embed_class=True),
    "pooled": lambda: _vit(class_token=False, global_pool="avg"),
    "qk_norm": lambda: _vit(qk_norm=True),
    "distilled": lambda: VisionTransformerDistilled(
        img_size=48, patch_size=8, embed_dim=32, depth=6, num_heads=2, num_classes=NUM_CLASSES
    ),
    "headless": lambda: _vit(num_classes=0),
    "attention_pooled": lambda: _vit(class_token=False, global_pool="map"),
    "eva": lambda: _eva(num_reg_tokens=4, init_values=0.1, attn_type="rope", global_pool="token"),
    "eva02": lambda: _eva(
        rope_type="mixed", qkv_fused=False, swiglu_mlp=True, scale_mlp=True, global_pool="map"
    ),
}
GRIDS: dict[str, Callable[[], nn.Module]] = {
    "swin": _swin,
    "mobilevit": _mobilevit,
    "efficientvit": _efficientvit,
}
TOYS = SEQUENCES | GRIDS
SIZES = {"swin": 112, "mobilevit": 96, "efficientvit": 96}


def toy(name: str) -> nn.Module:
    """A toy network in evaluation mode, the same weights every time."""
    return copy.deepcopy(_toy(name))


@functools.cache
def _toy(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = TOYS[name]()
    for parameter in model.parameters():
        if parameter.ndim == 1 and bool((parameter == 0).all()):
            torch.nn.init.normal_(parameter, std=0.02)
    return settled(model, size_of(name))


def settled(model: nn.Module, size: int) -> nn.Module:
    """In evaluation mode, with the running statistics of noise.

    Without statistics activations fade away, all tokens are alike, and any may match.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    if norms:
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad():
            model.train()(torch.randn(16, 3, size, size))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return model.eval()


def size_of(name: str) -> int:
    return SIZES.get(name, 48)


def pictures(name: str, batch: int = 2) -> Tensor:
    """Smooth random images: neighbouring patches are alike, as in pictures."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(batch, 3, 12, 12, generator=generator)
    size = size_of(name)
    return nn.functional.interpolate(coarse, (size, size), mode="bilinear")

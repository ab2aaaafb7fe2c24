"""Small networks of every family, quick enough for tables of tests."""

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import timm
import torch
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.efficientvit_mit import EfficientVit
from timm.models.eva import Eva
from timm.models.mobilevit import MobileVitBlock
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.swin_transformer_v2_cr import SwinTransformerV2Cr
from timm.models.vision_transformer import (
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos
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


def _swinv2(kind: Callable[..., nn.Module], **arguments: object) -> nn.Module:
    settings = {"img_size": 64, "window_size": 4, "embed_dim": 32, "num_classes": NUM_CLASSES}
    return kind(**settings, depths=(2, 2), num_heads=(2, 4), **arguments)


def _eva(**arguments: object) -> nn.Module:
    """DINOv3 in small."""
    settings = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 6, "num_heads": 2}
    rotary = {"use_rot_pos_emb": True, "use_abs_pos_emb": False, "rope_type": "dinov3"}
    settings["head_init_scale"] = 1.0
    return Eva(**{**settings, **rotary, "num_classes": NUM_CLASSES, **arguments})


def _relative(**arguments: object) -> nn.Module:
    settings = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
    settings["num_classes"] = NUM_CLASSES
    return VisionTransformerRelPos(**{**settings, "init_values": 1.0, **arguments})


def _beit(**arguments: object) -> nn.Module:
    settings = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
    settings |= {"head_init_scale": 1.0, "use_abs_pos_emb": False, "use_rel_pos_bias": True}
    settings["num_classes"] = NUM_CLASSES
    model = Beit(**{**settings, **arguments})
    for name, parameter in model.named_parameters():
        if name.endswith("bias_table"):
            torch.nn.init.normal_(parameter)
    return model


def _naflex(**arguments: object) -> nn.Module:
    settings = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
    settings["init_values"] = 1.0  # timm's own, 1e-5, would hide what the blocks do
    return timm.create_model(
        "naflexvit_base_patch16_gap", num_classes=NUM_CLASSES, **{**settings, **arguments}
    )


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
    "parallel": lambda: _vit(block_fn=ParallelScalingBlock, qk_norm=True),
    "diff": lambda: _vit(attn_layer="diff", qk_norm=True, depth=4),
    "relative": lambda: _relative(class_token=True),
    "beit": lambda: _beit(use_shared_rel_pos_bias=True),
    "naflex": lambda: _naflex(reg_tokens=2),
}
GRIDS: dict[str, Callable[[], nn.Module]] = {
    "swin": _swin,
    "swinv2": lambda: _swinv2(SwinTransformerV2),
    "mobilevit": _mobilevit,
    "efficientvit": _efficientvit,
}
TOYS = SEQUENCES | GRIDS
VARIANTS: dict[str, Callable[[], nn.Module]] = {
    "post_norm": lambda: _vit(block_fn=ResPostBlock),
    "parallel_things": lambda: _vit(block_fn=ParallelThingsBlock, depth=3),
    "diff_parallel": lambda: _vit(block_fn=DiffParallelScalingBlock, depth=4),
    "relative_shared": lambda: _relative(
        block_fn=ResPostRelPosBlock, rel_pos_type="bias", shared_rel_pos=True
    ),
    "beit_alone": lambda: _beit(swiglu_mlp=True, init_values=0.5, global_pool="token"),
    "naflex_rotary": lambda: _naflex(rope_type="axial", class_token=True, global_pool="map"),
    "swinv2_cr": lambda: _swinv2(SwinTransformerV2Cr, init_values=1.0),
}
"""Other blocks of the same families, for one test of everything."""
SIZES = {"swin": 112, "swinv2": 64, "swinv2_cr": 64, "mobilevit": 96, "efficientvit": 96}


def toy(name: str) -> nn.Module:
    """A toy network in evaluation mode, the same weights every time."""
    return copy.deepcopy(_toy(name))


@functools.cache
def _toy(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = (TOYS | VARIANTS)[name]()
    for parameter in model.parameters():
        if parameter.ndim == 1 and bool((parameter == 0).all()):
            torch.nn.init.normal_(parameter, std=0.02)
    return settled(model, size_of(name))


def fits(config: Any, name: str) -> bool:
    """Whether a method can merge this toy."""
    return name in SEQUENCES or not config.sequences_only


def pairs(names: Iterable[str] = TOYS) -> list[tuple[str, str]]:
    """Every method with each of these toys that it can merge, as `(method, name)`."""
    from ltm.methods import methods  # not before conftest has had the shapes checked

    known = sorted(methods().items())
    return [(method, name) for name in names for method, config in known if fits(config, name)]


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

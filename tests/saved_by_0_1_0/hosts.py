"""The tiny networks behind the folders that version 0.1.0 saved: about 6,000 parameters each."""

from collections.abc import Callable

import torch
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
from timm.models.efficientvit_mit import EfficientVit
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

NUM_CLASSES = 4


def _vit(**arguments: object) -> nn.Module:
    return VisionTransformer(
        img_size=24, patch_size=4, embed_dim=12, depth=4, num_heads=2, mlp_ratio=2,
        num_classes=NUM_CLASSES, **arguments,
    )  # fmt: skip


def _swin() -> nn.Module:
    return SwinTransformer(
        img_size=56, embed_dim=8, depths=(2, 2), num_heads=(1, 2), mlp_ratio=2,
        num_classes=NUM_CLASSES,
    )  # fmt: skip


def _mobilevit() -> nn.Module:
    def block(channels: int) -> ByoBlockCfg:
        return ByoBlockCfg(
            type="mobilevit", d=1, c=channels, s=1,
            block_kwargs={
                "transformer_dim": 12, "transformer_depth": 2, "patch_size": 2, "mlp_ratio": 2.0,
                "num_heads": 2,
            },
        )  # fmt: skip

    def down(channels: int) -> ByoBlockCfg:
        return ByoBlockCfg(type="bottle", d=1, c=channels, s=2, gs=1, br=1.0)

    return ByobNet(
        ByoModelCfg(
            blocks=(down(4), (down(8), block(8))),
            stem_chs=4, stem_type="3x3", stem_pool="", num_features=16, act_layer="silu",
        ),
        num_classes=NUM_CLASSES,
    )  # fmt: skip


def _efficientvit() -> nn.Module:
    return EfficientVit(
        widths=(4, 4, 8, 8, 16), depths=(1, 1, 1, 2, 1), head_dim=8, expand_ratio=2,
        head_widths=(16, 16), num_classes=NUM_CLASSES,
    )  # fmt: skip


HOSTS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "vit": (_vit, 24),
    "vit_pooled": (lambda: _vit(class_token=False, global_pool="avg"), 24),
    "swin": (_swin, 56),
    "mobilevit": (_mobilevit, 80),
    "efficientvit": (_efficientvit, 96),
}


def host(name: str) -> nn.Module:
    """The network behind a folder, with the same random weights every time."""
    torch.manual_seed(0)
    return HOSTS[name][0]().eval()


def images(name: str, batch: int = 3) -> Tensor:
    """Smooth random images: neighbouring patches are alike, as in photos."""
    coarse = torch.randn(batch, 3, 7, 7, generator=torch.Generator().manual_seed(1))
    size = HOSTS[name][1]
    return nn.functional.interpolate(coarse, (size, size), mode="bicubic")

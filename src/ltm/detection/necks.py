"""What stands between a network of one resolution and a pyramid."""

import math

from timm.layers import LayerNorm2d
from torch import nn


def simple_neck(channels: int, width: int, base: int, stride: int) -> nn.Sequential:
    """One level of ViTDet's simple pyramid: up or down to the stride, then two convolutions."""
    layers: list[nn.Module] = []
    steps = round(math.log2(base / stride))
    for step in range(steps):
        narrower = max(channels // 2, 32)
        layers.append(nn.ConvTranspose2d(channels, narrower, kernel_size=2, stride=2))
        channels = narrower
        if step < steps - 1:
            layers += [LayerNorm2d(channels), nn.GELU()]
    if steps < 0:
        layers.append(nn.MaxPool2d(kernel_size=2**-steps, ceil_mode=True))
    return nn.Sequential(
        *layers,
        nn.Conv2d(channels, width, kernel_size=1, bias=False),
        LayerNorm2d(width),
        nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
        LayerNorm2d(width),
    )

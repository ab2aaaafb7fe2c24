"""SSDLite on any pyramid, with torchvision's heads, default boxes and losses."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD
from torchvision.models.detection.ssdlite import SSDLiteHead
from torchvision.ops import Conv2dNormActivation

from ltm.core.validation import require_least
from ltm.detection.pyramid import DetectorConfig, Pyramid, Size, clean_batch, in_full_precision

_STRIDES = (16, 32)
_EXTRA_CHANNELS = (512, 256, 256, 128)
# torchvision has a momentum of 0.03, which is too slow for short runs.
_norm = partial(nn.BatchNorm2d, eps=1e-3)


@dataclass(frozen=True, kw_only=True)
class SSDLiteConfig(DetectorConfig):
    """The settings of an SSDLite detector."""

    task = "ssdlite"

    backbone: str = "mobilevit_s"
    image_size: Size = (320, 320)
    """Height and width to which images are resized."""
    restore: bool = True
    """Resample maps that merging has shrunk to their nominal size."""

    def maps(self) -> dict[str, Any]:
        return {"strides": _STRIDES, "restore": self.restore}

    def on(self, pyramid: Pyramid) -> SSDLite:
        return SSDLite(pyramid, self.num_classes, self.image_size)


class SSDLite(SSD):
    """SSDLite: two maps of the network and four smaller ones after them, with a light head on each.

    As in SSD, images are resized to one size, whatever their aspect. The heads' outputs and the
    default boxes are in full precision, also under autocast: half precision moves boxes by a pixel.
    """

    def __init__(
        self, pyramid: Pyramid, num_classes: int, image_size: Size = (320, 320), **options: Any
    ) -> None:
        """Assemble the detector.

        Args:
            pyramid: The network, with strides 16 and 32.
            num_classes: Classes, the background not counted.
            image_size: Height and width to which images are resized.
            options: torchvision's own (`score_thresh`, `nms_thresh`, `detections_per_img`, ...).
        """
        require_least("num_classes", num_classes)
        mean, std = pyramid.normalisation
        boxes = DefaultBoxGenerator([[2, 3] for _ in range(6)], min_ratio=0.2, max_ratio=0.95)
        backbone = _ExtendedPyramid(pyramid)
        head = SSDLiteHead(
            backbone.out_channels, boxes.num_anchors_per_location(), num_classes + 1, _norm
        )
        super().__init__(
            backbone,
            boxes,
            (image_size[1], image_size[0]),
            num_classes + 1,
            image_mean=mean,
            image_std=std,
            head=in_full_precision(head),
            **{**_TORCHVISION_SSDLITE, **options},
        )
        self.image_size = image_size

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        """Losses by name in training, boxes, labels and scores per image otherwise.

        Images may be of any size, 8 bit or from 0 to 1; targets are cleaned (`clean_target`).
        """
        if self.training and len(images) < 2:
            raise ValueError("images: got one; SSDLite normalises batches, and needs two to train.")
        images, targets = clean_batch(images, targets)
        return super().forward(images, targets)


_TORCHVISION_SSDLITE = {
    "score_thresh": 0.001,
    "nms_thresh": 0.55,
    "detections_per_img": 300,
    "topk_candidates": 300,
}


class _ExtendedPyramid(nn.Module):
    """A pyramid with smaller maps added at its end."""

    def __init__(self, pyramid: Pyramid) -> None:
        super().__init__()
        self.pyramid = pyramid
        widths = (pyramid.channels[-1], *_EXTRA_CHANNELS)
        self.extra = nn.ModuleList(
            _extra_block(before, after) for before, after in itertools.pairwise(widths)
        )
        self.out_channels = [*pyramid.channels, *_EXTRA_CHANNELS]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = self.pyramid(x)
        for block in self.extra:
            maps.append(block(maps[-1]))
        return OrderedDict((str(level), feature.float()) for level, feature in enumerate(maps))


def _extra_block(in_channels: int, out_channels: int) -> nn.Sequential:
    """Half the resolution: 1 x 1, depthwise 3 x 3 of stride 2, 1 x 1."""
    middle = out_channels // 2
    layer = partial(Conv2dNormActivation, norm_layer=_norm, activation_layer=nn.ReLU6)
    block = nn.Sequential(
        layer(in_channels, middle, kernel_size=1),
        layer(middle, middle, kernel_size=3, stride=2, groups=middle),
        layer(middle, out_channels, kernel_size=1),
    )
    for module in block.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.03)
    return block

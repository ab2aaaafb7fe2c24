"""Mask R-CNN with a feature pyramid network on any pyramid, from torchvision's parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import (
    MaskRCNN as TorchvisionMaskRCNN,
    MaskRCNNHeads,
    MaskRCNNPredictor,
)
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.ops.poolers import initLevelMapper

from ltm.core.validation import require_least
from ltm.detection.pyramid import DetectorConfig, Pyramid, Size, clean_batch, in_full_precision

_FINEST = 8
"""If the finest stride of a network is coarser, finer maps are made from its first map."""
_POOLED = {"box": 7, "mask": 14}


@dataclass(frozen=True, kw_only=True)
class MaskRCNNConfig(DetectorConfig):
    """The settings of a Mask R-CNN detector."""

    task = "mask_rcnn"

    backbone: str = "efficientvit_b1"
    image_size: Size = (800, 1333)
    """The shorter side of resized images, and the limit of the longer one."""
    width: int = 256
    """Channels of the feature pyramid network and of the heads."""
    regions_per_image: int = 512
    """Regions per image on which the heads are trained."""

    @property
    def padded_size(self) -> Size:
        return padded(self.image_size[0]), padded(self.image_size[1])

    def on(self, pyramid: Pyramid) -> MaskRCNN:
        return MaskRCNN(
            pyramid,
            self.num_classes,
            self.image_size,
            width=self.width,
            box_batch_size_per_image=self.regions_per_image,
        )


class MaskRCNN(TorchvisionMaskRCNN):
    """Mask R-CNN + FPN on a pyramid.

    Anchors and pooled regions follow the pyramid's strides, whatever the aspect of an image. Boxes
    are in full precision, also under autocast.
    """

    def __init__(
        self,
        pyramid: Pyramid,
        num_classes: int,
        image_size: Size = (800, 1333),
        *,
        width: int = 256,
        anchor_scale: int = 8,
        **options: Any,
    ) -> None:
        """Assemble the detector.

        Args:
            pyramid: The network.
            num_classes: Classes, the background not counted.
            image_size: Shorter side of resized images, and the limit of the longer one.
            width: Channels of the feature pyramid network and of the heads; a multiple of 32.
            anchor_scale: Side of a level's anchors in strides.
            options: torchvision's own (`box_detections_per_img`, `rpn_post_nms_top_n_test`, ...).
        """
        require_least("num_classes", num_classes)
        if not pyramid.restore:
            raise ValueError(
                "restore: got False; Mask R-CNN cuts regions out of maps at their nominal strides."
            )
        if width < 32 or width % 32:
            raise ValueError(f"width: got {width}; a multiple of 32 is needed.")
        short, long = image_size
        if pyramid.canvas is not None:
            long = min(long, *pyramid.canvas)
        mean, std = pyramid.normalisation
        backbone = _PyramidFPN(pyramid, width)
        strides = (*backbone.strides, 2 * backbone.strides[-1])
        super().__init__(
            backbone,
            min_size=short,
            max_size=long,
            image_mean=mean,
            image_std=std,
            rpn_anchor_generator=StridedAnchors(strides, anchor_scale),
            rpn_head=in_full_precision(RPNHead(width, 3)),
            box_roi_pool=strided_pool(backbone.strides, _POOLED["box"]),
            box_head=TwoMLPHead(width * _POOLED["box"] ** 2, 4 * width),
            box_predictor=in_full_precision(FastRCNNPredictor(4 * width, num_classes + 1)),
            mask_roi_pool=strided_pool(backbone.strides, _POOLED["mask"]),
            mask_head=MaskRCNNHeads(width, [width] * 4, 1),
            mask_predictor=in_full_precision(MaskRCNNPredictor(width, width, num_classes + 1)),
            **options,
        )
        self.image_size = image_size

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        """Losses by name in training, boxes, labels, scores and masks per image otherwise.

        Images may be of any size, 8 bit or from 0 to 1; targets are cleaned (`clean_target`).
        """
        images, targets = clean_batch(images, targets)
        return super().forward(images, targets)


class _PyramidFPN(nn.Module):
    """A pyramid and its top-down pathway, all maps of one width."""

    def __init__(self, pyramid: Pyramid, width: int) -> None:
        super().__init__()
        # Maps of stride 2 cost more than they help.
        self.skipped = sum(stride < 4 for stride in pyramid.strides)
        strides = list(pyramid.strides[self.skipped :])
        channels = list(pyramid.channels[self.skipped :])
        finer: list[nn.Module] = []
        while strides[0] > _FINEST:
            finer.append(_finer(channels[0]))
            strides.insert(0, strides[0] // 2)
            channels.insert(0, channels[0])
        self.pyramid = pyramid
        self.finer = nn.ModuleList(finer)
        # With normalisation it also trains from scratch.
        self.fpn = FeaturePyramidNetwork(
            channels, width, extra_blocks=LastLevelMaxPool(), norm_layer=_group_norm
        )
        self.strides = tuple(strides)
        self.out_channels = width

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = self.pyramid(x)[self.skipped :]
        for block in self.finer:
            maps.insert(0, block(maps[0]))
        maps = self.fpn(OrderedDict((str(level), feature) for level, feature in enumerate(maps)))
        return OrderedDict((name, feature.float()) for name, feature in maps.items())


def padded(side: int) -> int:
    """The side of an image after torchvision has padded it."""
    return -(-side // 32) * 32


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(32, channels)


def _finer(channels: int) -> nn.Sequential:
    """A map of twice the resolution."""
    return nn.Sequential(
        nn.ConvTranspose2d(channels, channels, kernel_size=2, stride=2, bias=False),
        nn.BatchNorm2d(channels),
        nn.GELU(),
    )


class StridedAnchors(AnchorGenerator):
    """Anchors at known strides; torchvision guesses strides from sizes, rounding down."""

    def __init__(self, strides: Sequence[int], scale: int) -> None:
        super().__init__(
            tuple((scale * stride,) for stride in strides), ((0.5, 1.0, 2.0),) * len(strides)
        )
        self.strides = tuple(strides)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        device = feature_maps[0].device
        self.set_cell_anchors(torch.float32, device)
        steps = [[torch.tensor(stride, device=device)] * 2 for stride in self.strides]
        grids = [list(feature.shape[-2:]) for feature in feature_maps]
        anchors = torch.cat(self.grid_anchors(grids, steps))
        return [anchors for _ in image_list.image_sizes]


def strided_pool(strides: Sequence[int], size: int) -> MultiScaleRoIAlign:
    """Region pooling at known strides; torchvision guesses strides from the first batch."""
    names = [str(level) for level in range(len(strides))]
    pool = MultiScaleRoIAlign(featmap_names=names, output_size=size, sampling_ratio=2)
    pool.scales = [1 / stride for stride in strides]
    first, last = (stride.bit_length() - 1 for stride in (strides[0], strides[-1]))
    pool.map_levels = initLevelMapper(first, last)
    return pool

"""Parameters and MACs of whole detectors, counted on `meta`: nothing is run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ltm.core.cost import meta_copy, meta_images, num_parameters, run_on_meta
from ltm.detection.mask_rcnn import MaskRCNN, padded
from ltm.detection.pyramid import Size
from ltm.detection.ssdlite import SSDLite

_PROPOSALS = 1000
_DETECTIONS = 100


@dataclass(frozen=True)
class DetectorCost:
    """What a detector costs for one image. Pooling of regions, sorting and suppression are free."""

    num_parameters: int
    macs: int
    parts: dict[str, int]
    """MACs by part."""
    image_size: Size
    note: str

    @property
    def gmacs(self) -> float:
        """Billions of multiply-adds."""
        return self.macs / 1e9

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {macs / 1e9:.3f}" for name, macs in self.parts.items())
        return (
            f"{self.num_parameters / 1e6:.2f} M parameters, {self.gmacs:.3f} GMACs at "
            f"{self.image_size[0]} x {self.image_size[1]} ({parts}); {self.note}"
        )


def detector_cost(model: nn.Module) -> DetectorCost:
    """The cost of a detector at its own image size."""
    size, parts, note = _parts(model)
    return DetectorCost(num_parameters(model), sum(parts.values()), parts, size, note)


@singledispatch
def _parts(model: nn.Module) -> tuple[Size, dict[str, int], str]:
    raise ValueError(f"model: got {type(model).__name__}; SSDLite or MaskRCNN is needed.")


@_parts.register
def _ssdlite(model: SSDLite) -> tuple[Size, dict[str, int], str]:
    shadow: Any = meta_copy(model)
    backbone, maps = _counted(shadow.backbone, meta_images(shadow.backbone, model.image_size))
    head, _ = _counted(shadow.head, list(maps.values()))
    return model.image_size, {"backbone": backbone, "head": head}, "suppression not counted"


@_parts.register
def _mask_rcnn(model: MaskRCNN) -> tuple[Size, dict[str, int], str]:
    size = (padded(model.image_size[0]), padded(model.image_size[1]))
    shadow: Any = meta_copy(model)
    heads = shadow.roi_heads
    backbone, maps = _counted(shadow.backbone, meta_images(shadow.backbone, size))
    rpn, _ = _counted(shadow.rpn.head, list(maps.values()))
    width, device = shadow.backbone.out_channels, "meta"
    regions = torch.empty(_PROPOSALS, width, 7, 7, device=device)
    box, _ = _counted(nn.Sequential(heads.box_head, heads.box_predictor), regions)
    regions = torch.empty(_DETECTIONS, width, 14, 14, device=device)
    mask, _ = _counted(nn.Sequential(heads.mask_head, heads.mask_predictor), regions)
    parts = {"backbone": backbone, "proposals": rpn, "boxes": box, "masks": mask}
    note = f"{_PROPOSALS} proposals, {_DETECTIONS} masks; pooling and suppression not counted"
    return size, parts, note


def _counted(module: nn.Module, inputs: Any) -> tuple[int, Any]:
    with FlopCounterMode(display=False) as counter:
        out = run_on_meta(module, inputs)
    return counter.get_total_flops() // 2, out

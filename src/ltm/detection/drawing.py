"""Detections drawn on their image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

SMALLEST_SIDE = 360
"""Pixels; smaller images are enlarged by a whole number."""
_COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000")


def draw_detections(
    image: Tensor,
    prediction: Mapping[str, Tensor],
    class_names: Sequence[str],
    *,
    threshold: float = 0.3,
) -> Tensor:
    """The image (3 h w, 8 bit) with boxes, names, scores and masks of what was found.

    Predictions without scores (the truth) are drawn as they are. Small images are enlarged, so
    that the names can be read.
    """
    pixels = image.detach().cpu().as_subclass(Tensor)
    if pixels.is_floating_point():
        pixels = (255 * pixels.clamp(0, 1)).round().to(torch.uint8)
    scale = max(1, round(SMALLEST_SIDE / min(pixels.shape[-2:])))
    pixels = _enlarged(pixels, scale)
    labels = prediction["labels"].cpu()
    scores = prediction.get("scores")
    kept = torch.ones(len(labels), dtype=torch.bool)
    if scores is not None:
        scores = scores.cpu()
        kept = scores >= threshold
    boxes = prediction["boxes"].detach().cpu().as_subclass(Tensor)
    kept = kept & (boxes[:, 2:] >= boxes[:, :2]).all(dim=1)
    if not kept.any():
        return pixels
    chosen = labels[kept].tolist()
    colours = [_COLOURS[label % len(_COLOURS)] for label in chosen]
    texts = [str(class_names[label - 1]) for label in chosen]
    if scores is not None:
        shown = scores[kept].tolist()
        texts = [f"{text} {score:.2f}" for text, score in zip(texts, shown, strict=True)]
    if "masks" in prediction:
        masks = prediction["masks"].detach().cpu().as_subclass(Tensor)[kept]
        masks = masks.reshape(len(masks), *masks.shape[-2:])
        inside = masks >= 0.5 if masks.is_floating_point() else masks.bool()
        pixels = draw_segmentation_masks(pixels, _enlarged(inside, scale), 0.4, colours)
    width = max(1, round(min(pixels.shape[-2:]) / 200))
    return draw_bounding_boxes(pixels, scale * boxes[kept], texts, colours, width=width)


def _enlarged(pixels: Tensor, scale: int) -> Tensor:
    return pixels.repeat_interleave(scale, dim=-2).repeat_interleave(scale, dim=-1)

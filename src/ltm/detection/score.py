"""How good a detector is, by COCO's average precision, and what it costs for an image."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ltm.core.cost import evaluating, meta_copy, meta_images, num_parameters, run_on_meta
from ltm.data.targets import encode_mask
from ltm.detection.mask_rcnn import MaskRCNN, padded
from ltm.detection.pyramid import Size
from ltm.detection.ssdlite import SSDLite
from ltm.extras import require
from ltm.files import write_text
from ltm.processes import gather_objects

Result = dict[str, Any]
"""A detection in COCO's format: image_id, category_id, score, bbox, and maybe segmentation."""


@dataclass(frozen=True, kw_only=True)
class CocoScores:
    """COCO's averages, from 0 to 1. As in COCO, -1 means that there is no object to find."""

    ap: float
    """Mean over the classes and over IoU thresholds from 0.50 to 0.95."""
    ap50: float
    ap75: float
    ap_small: float
    """Of objects below 32 x 32 pixels."""
    ap_medium: float
    ap_large: float
    """Of objects above 96 x 96 pixels."""


@dataclass(frozen=True, kw_only=True)
class DetectionScores:
    """A detector on a data set."""

    num_images: int
    num_detections: int
    box: CocoScores
    mask: CocoScores | None


def coco_scores(
    annotations: Mapping[str, Any], results: Sequence[Result], kind: Literal["bbox", "segm"]
) -> CocoScores:
    """COCO's averages of detections.

    Args:
        annotations: The truth in COCO's format, as `coco_dict()` of a data set gives it.
        results: The detections, as `coco_results` gives them.
        kind: Whether to compare boxes or masks.
    """
    coco = require_evaluator()
    _check_results(annotations, results, kind)
    # Without a box, COCO takes a detection's area from its mask.
    left_out = {"bbox"} if kind == "segm" else {"segmentation"}
    entries = [{k: v for k, v in item.items() if k not in left_out} for item in results]
    truth = coco.COCO(json.loads(json.dumps(annotations)))
    found = truth.loadRes(entries)
    run = coco.COCOeval_faster(truth, found, iouType=kind, print_function=lambda *_: None)
    run.evaluate()
    run.accumulate()
    run.summarize()
    ap, ap50, ap75, small, medium, large = (float(value) for value in run.stats[:6])
    return CocoScores(ap=ap, ap50=ap50, ap75=ap75, ap_small=small, ap_medium=medium, ap_large=large)


def evaluate_detections(
    annotations: Mapping[str, Any], results: Sequence[Result], *, masks: bool
) -> DetectionScores:
    """Score detections by their boxes, and by their masks if asked for."""
    return DetectionScores(
        num_images=len(annotations["images"]),
        num_detections=len(results),
        box=coco_scores(annotations, results, "bbox"),
        mask=coco_scores(annotations, results, "segm") if masks else None,
    )


def detect(
    model: nn.Module,
    batches: Iterable[Any],
    category_ids: Sequence[int],
    *,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = lambda batches: batches,
) -> list[Result]:
    """Show a detector batches of `(images, targets)`, and return what it finds.

    Of several processes, each has batches of its own, and all get the results of all.
    """
    device = next(model.parameters()).device
    results: dict[int, list[Result]] = {}
    with evaluating(model), torch.no_grad():
        for images, targets in progress(batches):
            found = model([image.to(device) for image in images])
            for target, prediction in zip(targets, found, strict=True):
                # An image that takes the place of an unreadable one comes twice.
                image_id = int(target["image_id"])
                results[image_id] = coco_results(image_id, prediction, category_ids)
    # An image that several processes saw counts once.
    once = {
        image_id: found for share in gather_objects(results) for image_id, found in share.items()
    }
    return [result for found in once.values() for result in found]


def coco_results(
    image_id: int, prediction: Mapping[str, Tensor], category_ids: Sequence[int]
) -> list[Result]:
    """The detections of an image in COCO's format; label 1 is the first category."""
    boxes = prediction["boxes"].detach().float().cpu()
    boxes = torch.cat((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), dim=1)
    masks = prediction.get("masks")
    results: list[Result] = []
    for place, (box, label, score) in enumerate(
        zip(boxes, prediction["labels"].tolist(), prediction["scores"].tolist(), strict=True)
    ):
        result: Result = {
            "image_id": image_id,
            "category_id": int(category_ids[label - 1]),
            "bbox": [round(value, 3) for value in box.tolist()],
            "score": round(score, 6),
        }
        if masks is not None:
            result["segmentation"] = encode_mask(masks[place])
        results.append(result)
    return results


def write_results(path: str | Path, results: Sequence[Result]) -> Path:
    """Write a result file in COCO's format."""
    path = Path(path)
    write_text(path, json.dumps(list(results)) + "\n")
    return path


def require_evaluator() -> Any:
    """COCO's evaluator; call it early, so that a long run does not fail at its end."""
    return require("faster_coco_eval")


def _check_results(annotations: Mapping[str, Any], results: Sequence[Result], kind: str) -> None:
    known = {image["id"] for image in annotations["images"]}
    strange = next((item["image_id"] for item in results if item["image_id"] not in known), None)
    if strange is not None:
        raise ValueError(f"results: image_id is {strange}, which no image of the annotations has")
    field = {"bbox": "bbox", "segm": "segmentation"}[kind]
    if any(field not in item for item in results):
        raise ValueError(f"results: some have no {field}, which {kind} scores need")
    if kind == "segm":
        without = (item["id"] for item in annotations["annotations"] if not item.get(field))
        number = next(without, None)
        if number is not None:
            raise ValueError(f"annotation {number}: segmentation is missing, and masks need it")


# --- Parameters and MACs, counted on `meta`: nothing is run ------------------------------------

_PROPOSALS = 1000
_DETECTIONS = 100


@dataclass(frozen=True)
class DetectorCost:
    """What a detector costs for one image, without pooling of regions, sorting and suppression."""

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

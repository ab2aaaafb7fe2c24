"""Average precision as COCO measures it, of boxes and masks, and its result files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ltm.core.cost import evaluating
from ltm.data.targets import encode_mask
from ltm.extras import require
from ltm.files import write_text

Result = dict[str, Any]
"""One detection as COCO writes it: image_id, category_id, score, bbox, and maybe segmentation."""


@dataclass(frozen=True, kw_only=True)
class CocoScores:
    """COCO's averages, from 0 to 1; -1 where there is nothing to find, as COCO has it."""

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
        kind: Whether boxes or masks are compared.
    """
    coco = require_evaluator()
    _check_results(annotations, results, kind)
    # By masks, COCO takes a detection's area from its mask, unless a box is there as well.
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

    In several processes each goes through its own batches, and all get everybody's results.
    """
    device = next(model.parameters()).device
    results: dict[int, list[Result]] = {}
    with evaluating(model), torch.no_grad():
        for images, targets in progress(batches):
            found = model([image.to(device) for image in images])
            for target, prediction in zip(targets, found, strict=True):
                # Where an image cannot be read, another one takes its place and comes twice.
                image_id = int(target["image_id"])
                results[image_id] = coco_results(image_id, prediction, category_ids)
    return [result for found in _gather(results).values() for result in found]


def coco_results(
    image_id: int, prediction: Mapping[str, Tensor], category_ids: Sequence[int]
) -> list[Result]:
    """One image's detections as COCO writes them; label 1 is the first category."""
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
    """COCO's evaluator; call it early where scores are computed at the end."""
    return require("faster_coco_eval", extra="detection")


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


def _gather(results: dict[int, list[Result]]) -> dict[int, list[Result]]:
    """Every image's results, once, whichever processes saw it."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return results
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, results)
    return {image_id: found for share in shares for image_id, found in share.items()}

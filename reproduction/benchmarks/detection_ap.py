"""COCO's average precision in NumPy, for machines without faster-coco-eval: the same numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ltm.data.targets import decode_mask

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
MOST = 100
"""Detections per image and category that count."""

Entry = Mapping[str, Any]


def average_precision(
    annotations: Mapping[str, Any], results: Sequence[Entry], kind: str
) -> dict[str, float]:
    """AP, AP50 and AP75 of boxes ("bbox") or masks ("segm"); -1 where there is nothing to find."""
    truths, found = _by_place(annotations["annotations"]), _by_place(results)
    sizes = {image["id"]: (image["height"], image["width"]) for image in annotations["images"]}
    per_category: list[np.ndarray] = []
    for category in sorted(entry["id"] for entry in annotations["categories"]):
        images = [_match(truths[i, category], found[i, category], kind, sizes[i]) for i in sizes]
        precision = _precision(images)
        if precision is not None:
            per_category.append(precision)
    if not per_category:
        return {"ap": -1.0, "ap50": -1.0, "ap75": -1.0}
    mean = np.mean(per_category, axis=0)
    return {"ap": float(mean.mean()), "ap50": float(mean[0]), "ap75": float(mean[5])}


def _by_place(entries: Sequence[Entry]) -> dict[tuple[int, int], list[Entry]]:
    places: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        places[entry["image_id"], entry["category_id"]].append(entry)
    return places


def _match(
    truths: list[Entry], found: list[Entry], kind: str, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Scores, hits and ignored ones (threshold x detection), and the number of objects."""
    order = np.argsort([-entry["score"] for entry in found], kind="mergesort")[:MOST]
    found = [found[place] for place in order]
    crowd = np.array([bool(entry.get("iscrowd", 0)) for entry in truths], dtype=bool)
    truths = [truths[place] for place in np.argsort(crowd, kind="mergesort")]
    crowd = np.sort(crowd)
    scores = np.array([entry["score"] for entry in found])
    hits = np.zeros((len(THRESHOLDS), len(found)), dtype=bool)
    ignored = np.zeros_like(hits)
    if truths and found:
        overlaps = _overlaps(truths, found, crowd, kind, size)
        taken = np.zeros((len(THRESHOLDS), len(truths)), dtype=bool)
        for place in range(len(found)):
            for level, threshold in enumerate(THRESHOLDS):
                best = _best(overlaps[place], taken[level], crowd, threshold)
                if best is not None:
                    taken[level, best] = True
                    hits[level, place], ignored[level, place] = not crowd[best], crowd[best]
    return scores, hits, ignored, int((~crowd).sum())


def _best(overlap: np.ndarray, taken: np.ndarray, crowd: np.ndarray, least: float) -> int | None:
    """The object that a detection is; a crowd only where there is no other, and any number."""
    for group in (~crowd & ~taken, crowd):
        values = np.where(group, overlap, -1.0)
        if values.size and values.max() >= min(least, 1 - 1e-10):
            # Of equals COCO takes the last.
            return int(len(values) - 1 - values[::-1].argmax())
    return None


def _overlaps(
    truths: list[Entry], found: list[Entry], crowd: np.ndarray, kind: str, size: tuple[int, int]
) -> np.ndarray:
    if kind == "bbox":
        one, other = (np.array([e["bbox"] for e in entries], float) for entries in (found, truths))
        ends = np.minimum(
            one[:, None, :2] + one[:, None, 2:], other[None, :, :2] + other[None, :, 2:]
        )
        both = (ends - np.maximum(one[:, None, :2], other[None, :, :2])).clip(0).prod(-1)
        areas, truth_areas = one[:, 2:].prod(-1), other[:, 2:].prod(-1)
    else:
        one, other = (
            np.stack([_mask(e, size).ravel() for e in entries]).astype(np.float32)
            for entries in (found, truths)
        )
        # Whole numbers below 2^24, so exact; what is divided is in double precision.
        both = (one @ other.T).astype(np.float64)
        areas, truth_areas = one.sum(1, dtype=np.float64), other.sum(1, dtype=np.float64)
    # In a crowd, only the detection's own area counts.
    whole = np.where(crowd, areas[:, None], areas[:, None] + truth_areas - both)
    return both / np.maximum(whole, 1e-9)


def _mask(entry: Entry, size: tuple[int, int]) -> np.ndarray:
    return decode_mask(entry["segmentation"], *size)


def _precision(images: list[tuple[np.ndarray, np.ndarray, np.ndarray, int]]) -> np.ndarray | None:
    """Mean interpolated precision at each threshold; None where there are no objects."""
    num_objects = sum(image[3] for image in images)
    if num_objects == 0:
        return None
    order = np.argsort(-np.concatenate([image[0] for image in images]), kind="mergesort")
    hits = np.concatenate([image[1] for image in images], axis=1)[:, order]
    ignored = np.concatenate([image[2] for image in images], axis=1)[:, order]
    means = np.zeros(len(THRESHOLDS))
    for level in range(len(THRESHOLDS)):
        right = np.cumsum(hits[level])
        wrong = np.cumsum(~hits[level] & ~ignored[level])
        recall, precision = right / num_objects, right / np.maximum(right + wrong, 1e-12)
        precision = np.maximum.accumulate(precision[::-1])[::-1]
        places = np.searchsorted(recall, RECALLS, side="left")
        reached = places < len(precision)
        means[level] = precision[places[reached]].sum() / len(RECALLS)
    return means

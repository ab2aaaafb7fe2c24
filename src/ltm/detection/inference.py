"""Use a saved detector: measure its average precision, and find objects on images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from ltm.api.folders import saved_folder
from ltm.data.loading import build_loader
from ltm.detection.coco import collate_detection, detection_transforms, open_detection
from ltm.detection.saving import LoadedDetector, load_detector
from ltm.detection.score import (
    DetectionScores,
    DetectorCost,
    Result,
    coco_results,
    detect,
    detector_cost,
    evaluate_detections,
    require_evaluator,
    write_results,
)
from ltm.detection.settings import (
    COMMANDS,
    EvaluateDetectorSettings,
    PredictDetectorSettings,
    Task,
)
from ltm.files import results_in, write_metrics
from ltm.models import changed
from ltm.processes import local_device
from ltm.progress import Progress
from ltm.report.pictures import read_pictures

_GENERATED = 8
"""How many generated images are drawn on."""
SMALLEST_SIDE = 360
"""Pixels; smaller images are enlarged by a whole number."""
_COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000")


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class DetectorEvaluation:
    """How good a detector is, and what it costs. Print it."""

    scores: DetectionScores
    cost: DetectorCost
    results: list[Result]
    pictures: tuple[tuple[str, Tensor], ...]
    """Some of the images, by name, with the objects drawn on them."""

    def __repr__(self) -> str:
        found = (("boxes", self.scores.box), ("masks", self.scores.mask))
        lines = [
            f"{name}: AP {_percent(score.ap)}  AP50 {_percent(score.ap50)}  "
            f"AP75 {_percent(score.ap75)}"
            for name, score in found
            if score is not None
        ]
        return "\n".join([*lines, str(self.cost)])

    def save(self, folder: str | Path) -> Path:
        """Write metrics.json, results.json (COCO's format) and pictures/."""
        folder = Path(folder)
        cost = {"parameters": self.cost.num_parameters, "gmacs": self.cost.gmacs}
        with results_in(folder) as aside:
            write_results(aside / "results.json", self.results)
            _write_pictures(self.pictures, aside / "pictures")
            write_metrics(aside, {**asdict(self.scores), **cost})
        return folder


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Predictions:
    """What a detector found on images. Image ids are their places, from 1."""

    results: list[Result]
    pictures: tuple[tuple[str, Tensor], ...]
    """The images, by name, with the objects drawn on them."""
    num_objects: int
    """How many objects have at least the threshold's score."""

    def __repr__(self) -> str:
        return f"{self.num_objects} objects on {len(self.pictures)} images"

    def save(self, folder: str | Path) -> Path:
        """Write a picture per image, results.json (COCO's format) and metrics.json."""
        folder = Path(folder)
        files = {number: name for number, (name, _) in enumerate(self.pictures, start=1)}
        with results_in(folder) as aside:
            _write_pictures(self.pictures, aside)
            write_results(aside / "results.json", self.results)
            write_metrics(aside, {"images": files, "detections": self.num_objects})
        return folder


def evaluate_detector(
    run: str | Path,
    data: str | Path,
    settings: EvaluateDetectorSettings | None = None,
    *,
    task: Task | None = None,
    **changes: Any,
) -> DetectorEvaluation:
    """Measure the average precision of a saved detector on annotated images.

    Args:
        run: the folder of a training run, or its `model/`.
        data: a folder or .zip of images with annotations in COCO's format, or shapes (generated).
        settings: which images, and how to batch them.
        task: refuse a detector of another task.
        changes: changes of the settings, such as `split="test"`.
    """
    settings = changed(settings or EvaluateDetectorSettings(), changes)
    require_evaluator()
    device = local_device(settings.device)
    loaded = _load(run, task, device)
    dataset = open_detection(
        data,
        split=settings.split,
        annotations=settings.annotations,
        transforms=detection_transforms(training=False),
        masks=False,
    )
    if dataset.category_ids != loaded.category_ids:
        raise ValueError(
            f"data {data}: its {len(dataset.category_ids)} categories are not the "
            f"{len(loaded.category_ids)} that {run} was trained on"
        )
    batches = build_loader(
        dataset,
        batch_size=settings.batch_size,
        workers=settings.workers,
        device=device,
        collate=collate_detection,
    )
    progress = Progress("images")
    results = detect(loaded.model, batches, loaded.category_ids, progress=progress)
    if progress.interrupted:
        raise KeyboardInterrupt
    masks = loaded.config.task == "mask_rcnn"
    chosen = range(min(settings.pictures, len(dataset)))
    named = [(f"{dataset.image_ids[i]}", dataset[i][0]) for i in chosen]
    return DetectorEvaluation(
        scores=evaluate_detections(dataset.coco_dict(), results, masks=masks),
        cost=detector_cost(loaded.model),
        results=results,
        pictures=_find(loaded, named, settings.threshold).pictures,
    )


def predict_objects(
    run: str | Path,
    images: Sequence[str | Path],
    settings: PredictDetectorSettings | None = None,
    *,
    task: Task | None = None,
    **changes: Any,
) -> Predictions:
    """Find objects on images with a saved detector.

    Args:
        run: the folder of a training run, or its `model/`.
        images: image files, folders of them, or shapes (generated ones).
        settings: what to draw, and where the detector runs.
        task: refuse a detector of another task.
        changes: changes of the settings, such as `threshold=0.5`.
    """
    settings = changed(settings or PredictDetectorSettings(), changes)
    if not images:
        raise ValueError("images: give image files, folders of them, or shapes")
    loaded = _load(run, task, local_device(settings.device))
    return _find(loaded, _read(images), settings.threshold)


def _load(run: str | Path, task: Task | None, device: torch.device) -> LoadedDetector:
    loaded = load_detector(saved_folder(Path(run)))
    found = loaded.config.task
    if task not in (None, found):
        raise ValueError(f"run {run} is for ltm {COMMANDS[found]}, not ltm {COMMANDS[task]}")
    loaded.model.to(device)
    return loaded


def _read(images: Sequence[str | Path]) -> list[tuple[str, Tensor]]:
    """Images by name, 8 bit."""
    named: list[tuple[str, Tensor]] = []
    for text in map(str, images):
        if text.partition(":")[0] == "shapes":
            dataset = open_detection(text)
            shown = range(min(_GENERATED, len(dataset)))
            named += [(f"shapes-{i}", dataset[i][0]) for i in shown]
        else:
            named += [(name, pil_to_tensor(image)) for name, image in read_pictures([text])]
    return named


@torch.no_grad()
def _find(
    loaded: LoadedDetector, named: Sequence[tuple[str, Tensor]], threshold: float
) -> Predictions:
    """Find objects on images, and draw those with at least the threshold's score."""
    device = next(loaded.model.parameters()).device
    results: list[Result] = []
    pictures: list[tuple[str, Tensor]] = []
    for number, (name, image) in enumerate(named, start=1):
        found = loaded.model([image.to(device)])[0]
        results += coco_results(number, found, loaded.category_ids)
        drawn = draw_detections(image, found, loaded.class_names, threshold=threshold)
        pictures.append((name, drawn))
    kept = sum(result["score"] >= threshold for result in results)
    return Predictions(results=results, pictures=tuple(pictures), num_objects=kept)


def draw_detections(
    image: Tensor,
    prediction: Mapping[str, Tensor],
    class_names: Sequence[str],
    *,
    threshold: float = 0.3,
) -> Tensor:
    """The image (3 h w, 8 bit) with the boxes, names, scores and masks of objects.

    Objects without scores (the truth) are all drawn. Small images are enlarged, so that names can
    be read.
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


def _write_pictures(pictures: Sequence[tuple[str, Tensor]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, picture) in enumerate(pictures, start=1):
        to_pil_image(picture).save(folder / f"{number:03d}-{name}.png")


def _percent(value: float) -> str:
    return "none" if value < 0 else f"{100 * value:.1f}"

"""`ltm.predict`: streams of images through a model, answered in order.

An `ImageModel` prepares an image and answers a batch of them: a network, an ONNX file or a saved
detector. The config.json of a saved folder says which of them it holds.
"""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import torch
from torch import Tensor, nn
from torchvision.transforms.v2.functional import to_dtype, to_image

from ltm.api.folders import saved_folder
from ltm.core.validation import require_least
from ltm.data.reading import Chunk, Content, Preparation, Readings, read_chunks
from ltm.data.sources import ImageRef, check_inputs, find_images
from ltm.deployment.embedding import make_predictor, write_tables
from ltm.deployment.predictor import NOT_FINITE, BatchPredictor
from ltm.deployment.settings import LineFormat, PredictSettings, TableFormat
from ltm.files import results_in, write_metrics
from ltm.models import (
    ModelSource,
    Say,
    changed,
    refuse_given,
    saved_config,
    silent,
    source_of,
)
from ltm.progress import Progress

if TYPE_CHECKING:
    from ltm.detection.saving import LoadedDetector

Answer = dict[str, Any]
Write = Callable[["Prediction"], None]


# --- The verb ------------------------------------------------------------------------------------


class Predictions:
    """Predictions of a model, one per image, made as you iterate over them or save them.

    Memory does not grow with the number of images.
    """

    def __init__(self, model: ImageModel, images: Sequence[str], settings: PredictSettings) -> None:
        self.model, self.images, self.settings = model, tuple(images), settings
        self.num_images = self.num_unreadable = 0
        self.interrupted = False

    def __iter__(self) -> Iterator[Prediction]:
        self.num_images = self.num_unreadable = 0
        loop, settings = Progress("images"), self.settings
        images = find_images(self.images, split=settings.split)
        found = stream(
            images,
            self.model,
            batch_size=settings.batch_size,
            threads=settings.threads,
            workers=settings.workers,
        )
        for prediction in loop(found):
            self.num_images += 1
            self.num_unreadable += prediction.error is not None
            yield prediction
        self.interrupted = loop.interrupted

    def write(self, file: TextIO, form: LineFormat = "jsonl") -> None:
        """Write one line for each image, as it comes; no images at all are an error."""
        write = open_writer(form, file, self.model)
        for prediction in self:
            write(prediction)
        if not self.num_images and not self.interrupted:
            raise ValueError(f"there are no images in {', '.join(self.images[:3])}")

    def save(self, folder: Path | str, form: TableFormat = "jsonl") -> Path:
        """Write predictions.jsonl or .csv, or Parquet files, and metrics.json, into a folder."""
        if form == "parquet":
            return self._save_tables(Path(folder))
        name = f"predictions.{form}"
        with results_in(folder, replaced=("predictions.jsonl", "predictions.csv")) as aside:
            path = aside / name
            with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                self.write(file, form)
            counts = {"images": self.num_images, "unreadable": self.num_unreadable}
            write_metrics(aside, {**counts, "interrupted": self.interrupted})
        return Path(folder) / name

    def _save_tables(self, folder: Path) -> Path:
        if not isinstance(self.model, Classifier):
            raise ValueError("format is parquet: boxes do not fit a table; choose jsonl or csv")
        done = write_tables(
            self.model.predictor, self.images, folder, self.settings, overwrite=True
        )
        self.num_images, self.num_unreadable = done.images, done.unreadable
        self.interrupted = done.interrupted
        return folder

    def __repr__(self) -> str:
        inputs = ", ".join(self.images[:3]) + (", ..." if len(self.images) > 3 else "")
        columns = ", ".join(self.model.columns)
        return f"Predictions for {inputs}: iterate over them, or save(folder); each has {columns}"


def predict(
    model: nn.Module | str | Path | ModelSource | ImageModel,
    images: str | Path | Iterable[str | Path],
    settings: PredictSettings = PredictSettings(),
    *,
    say: Say = silent,
    **changes: Any,
) -> Predictions:
    """Predict images: classes, or boxes where the model is a saved detector.

    Args:
        model: a network, a saved folder, an .onnx file of `ltm.export`, a timm name, or a
            `ModelSource`.
        images: images, folders (sorted by path), .zip archives, tar shards, Parquet files,
            `hf:NAME`, text files of paths (.txt), and - for paths from standard input.
        settings: how images are prepared, and what is written about them.
        say: called with each line of progress.
        changes: fields of the settings to change, such as `top=1`.
    """
    settings = changed(settings, changes)
    inputs = check_inputs(images)
    return Predictions(_open_predictor(model, settings, say), inputs, settings)


def _open_predictor(
    model: nn.Module | str | Path | ModelSource | ImageModel,
    settings: PredictSettings,
    say: Say,
) -> ImageModel:
    """Open what predicts, by its type, the ending of its name, or a saved folder's config."""
    if isinstance(model, ImageModel):
        return model
    if isinstance(model, str | Path) and Path(model).suffix.lower() == ".pt2":
        raise ValueError(
            f"onnx is {model}: a torch.export program is read by unpickling, which can run "
            "anything; export to ONNX instead"
        )
    onnx = isinstance(model, str | Path) and Path(model).suffix.lower() == ".onnx"
    source = None if onnx else source_of(model)
    run = None if source is None else source.run
    if source is not None and run is not None and is_detector(run):
        known = {**source.given(), "run": None, "verify": None, **settings.given()}
        refuse_given(known, "a saved detector")
        from ltm.detection.saving import load_detector  # noqa: PLC0415 - an optional extra

        loaded = load_detector(saved_folder(run), verify=source.verify)
        return Detector(loaded, settings.threshold)
    if source is not None and run is None and source.model is None:
        raise ValueError("model: give --onnx FILE, --run FOLDER, or a timm name with --model")
    predictor = make_predictor(model, ("top5",), settings, top=settings.top)
    predictor.load(say)
    return Classifier(predictor)


def is_detector(run: Path) -> bool:
    """Whether a saved folder, or that of a training run, holds a detector."""
    return "detector" in (saved_config(run) or {})


# --- Models --------------------------------------------------------------------------------------


class ImageModel(ABC):
    """What can predict."""

    columns: ClassVar[tuple[str, ...]]
    """The keys of its answers."""

    @abstractmethod
    def prepare(self, image: Content) -> Tensor:
        """One image, or array of 8-bit pixels, as the model expects it."""

    @abstractmethod
    def answer(self, images: Sequence[Tensor]) -> Sequence[Answer | None]:
        """One answer per image; None where the model's scores are not finite."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says about one image, or why it could not be read."""

    path: str
    answer: Answer | None = None
    error: str | None = None


class Classifier(ImageModel):
    """The likeliest classes, from anything that a `BatchPredictor` runs."""

    columns = ("classes", "indices", "probabilities")

    def __init__(self, predictor: BatchPredictor) -> None:
        self.predictor = predictor
        self._preparation = Preparation(predictor.loaded.information.spec)

    def prepare(self, image: Content) -> Tensor:
        return self._preparation(image)

    def answer(self, images: Sequence[Tensor]) -> list[Answer | None]:
        found = self.predictor({"image": torch.stack(list(images))})
        columns = (found[name].tolist() for name in (*self.columns, "error"))
        return [
            None if error else {"classes": names, "indices": indices, "probabilities": _rounded(p)}
            for names, indices, p, error in zip(*columns, strict=True)
        ]


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 6) for value in values]


class Detector(ImageModel):
    """Boxes above a score, in pixels of the image."""

    columns = ("classes", "scores", "boxes")

    def __init__(self, loaded: LoadedDetector, threshold: float = 0.5) -> None:
        self.loaded, self.threshold = loaded, threshold

    def prepare(self, image: Content) -> Tensor:
        return to_dtype(to_image(image), scale=True)

    @torch.inference_mode()
    def answer(self, images: Sequence[Tensor]) -> list[Answer]:
        detector: nn.Module = self.loaded.model
        answers = []
        for found in detector(list(images)):
            kept = found["scores"] >= self.threshold
            labels = found["labels"][kept].tolist()
            answers.append(
                {
                    # Label 0 is the background.
                    "classes": [self.loaded.class_names[label - 1] for label in labels],
                    "scores": [round(value, 4) for value in found["scores"][kept].tolist()],
                    "boxes": [
                        [round(side, 1) for side in box] for box in found["boxes"][kept].tolist()
                    ],
                }
            )
        return answers


# --- Images in, answers out ----------------------------------------------------------------------


def stream(
    images: Iterable[ImageRef],
    model: ImageModel,
    *,
    batch_size: int = 32,
    threads: int = 2,
    workers: int = 0,
) -> Iterator[Prediction]:
    """One prediction per image, in order; an image that cannot be read gets an error.

    Memory does not grow with the number of images.
    """
    require_least("batch_size", batch_size)
    require_least("threads", threads)
    remaining = iter(images)
    chunks = map(Chunk, iter(lambda: tuple(islice(remaining, batch_size)), ()))
    for read in read_chunks(chunks, model.prepare, workers=workers, threads=threads):
        yield from _predict_batch(read, model)


def _predict_batch(read: Readings, model: ImageModel) -> Iterator[Prediction]:
    images = [image for image in read.images if image is not None]
    answers = iter(model.answer(images) if images else ())
    for image, error in zip(read.chunk.images, read.errors, strict=True):
        answer = None if error is not None else next(answers)
        if answer is None and error is None:
            error = NOT_FINITE  # noqa: PLW2901
        yield Prediction(path=image.path, answer=answer, error=error)


# --- Lines ---------------------------------------------------------------------------------------


def open_writer(kind: LineFormat, stream: TextIO, model: ImageModel) -> Write:
    """A function that writes one prediction a line."""
    return _WRITERS[kind](stream, model)


def _json_lines(stream: TextIO, _: ImageModel) -> Write:
    def write(prediction: Prediction) -> None:
        found = {"error": prediction.error} if prediction.answer is None else prediction.answer
        stream.write(json.dumps({"path": prediction.path, **found}, ensure_ascii=False) + "\n")

    return write


def _csv(stream: TextIO, model: ImageModel) -> Write:
    """One row an image; several values are JSON, and the first class has a column of its own."""
    table = csv.writer(stream, lineterminator="\n")
    table.writerow(["path", "error", "class", *model.columns])

    def write(prediction: Prediction) -> None:
        found = prediction.answer or {}
        first = next(iter(found.get("classes", ())), "")
        values = (json.dumps(found[name]) if name in found else "" for name in model.columns)
        table.writerow([prediction.path, prediction.error or "", first, *values])

    return write


_WRITERS: dict[str, Callable[[TextIO, ImageModel], Write]] = {"jsonl": _json_lines, "csv": _csv}

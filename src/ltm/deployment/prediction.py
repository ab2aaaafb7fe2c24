"""`ltm.predict`: streams of images through a model, decoded by threads, answered in order.

Whatever can `prepare` an image and answer a batch of them can predict (`ImageModel`): a network, an
ONNX file, a saved detector. A saved folder says by its config.json which of them it holds.
"""

from __future__ import annotations

import csv
import json
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import pil_to_tensor, to_dtype

from ltm.api.folders import saved_folder
from ltm.core.validation import require_least
from ltm.data.decoding import read_image
from ltm.data.folders import walk_images
from ltm.data.limits import split_limits
from ltm.data.transforms import evaluation_transform
from ltm.deployment.formats import onnx_information
from ltm.deployment.information import ModelInformation, known_about
from ltm.deployment.settings import LineFormat, PredictSettings
from ltm.evaluation.modes import OnnxModel
from ltm.files import results_in, write_metrics
from ltm.models import (
    ModelSource,
    Say,
    changed,
    open_model,
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

_STDIN = "-"
_LISTS = (".txt", ".lst", ".list")
"""Text files with these endings are lists of paths."""


# --- The verb ------------------------------------------------------------------------------------


class Predictions:
    """Predictions of a model, one for each image, made while they are iterated over or saved.

    Memory does not grow with the number of images.
    """

    def __init__(self, model: ImageModel, images: Sequence[str], settings: PredictSettings) -> None:
        self.model, self.images, self.settings = model, tuple(images), settings
        self.num_images = self.num_unreadable = 0
        self.interrupted = False

    def __iter__(self) -> Iterator[Prediction]:
        self.num_images = self.num_unreadable = 0
        loop, settings = Progress("images"), self.settings
        paths = image_paths(self.images)
        found = stream(paths, self.model, batch_size=settings.batch_size, threads=settings.threads)
        for prediction in loop(found):
            self.num_images += 1
            self.num_unreadable += prediction.error is not None
            yield prediction
        self.interrupted = loop.interrupted

    def write(self, file: TextIO, form: LineFormat = "jsonl") -> None:
        """Write one line for each image, as it comes."""
        write = open_writer(form, file, self.model)
        for prediction in self:
            write(prediction)

    def save(self, folder: Path | str, form: LineFormat = "jsonl") -> Path:
        """Write predictions.jsonl or predictions.csv, and metrics.json, into a folder."""
        name = f"predictions.{form}"
        with results_in(folder, replaced=("predictions.jsonl", "predictions.csv")) as aside:
            path = aside / name
            with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                self.write(file, form)
            counts = {"images": self.num_images, "unreadable": self.num_unreadable}
            write_metrics(aside, {**counts, "interrupted": self.interrupted})
        return Path(folder) / name

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
        images: images, folders (sorted by path), text files of paths (.txt), and - for paths from
            standard input.
        settings: how images are prepared, and what is said about them.
        say: told what is done, line by line.
        changes: fields of the settings to change, such as `top=1`.
    """
    settings = changed(settings, changes)
    inputs = [str(name) for name in ([images] if isinstance(images, str | Path) else images)]
    if not inputs:
        raise ValueError("inputs: give images, folders, a list of paths, or - for standard input")
    check_inputs(inputs)
    return Predictions(_open_predictor(model, settings, say), inputs, settings)


def _open_predictor(
    model: nn.Module | str | Path | ModelSource | ImageModel,
    settings: PredictSettings,
    say: Say = silent,
) -> ImageModel:
    """Whatever predicts: found by its type, the ending of its name, or a saved folder's config."""
    if isinstance(model, ImageModel):
        return model
    if isinstance(model, str | Path) and Path(model).suffix.lower() == ".pt2":
        raise ValueError(
            f"onnx is {model}: a torch.export program is read by unpickling, which can run "
            "anything; export to ONNX instead"
        )
    if isinstance(model, str | Path) and Path(model).suffix.lower() == ".onnx":
        file = OnnxModel(Path(model))
        known = onnx_information(file).adjusted(file.num_classes, settings)
        return Classifier(file, known, settings.top)
    source = source_of(model)
    run = None if source is None else source.run
    if source is not None and run is not None and is_detector(run):
        given = {"class_names": settings.class_names, "crop_ratio": settings.crop_ratio}
        known = {**source.given(), "run": None, "verify": None, **given}
        refuse_given(known, "a saved detector")
        from ltm.detection.saving import load_detector  # noqa: PLC0415 - an optional extra

        loaded = load_detector(saved_folder(run), verify=source.verify)
        return Detector(loaded, settings.threshold)
    if source is not None and run is None and source.model is None:
        raise ValueError("model: give --onnx FILE, --run FOLDER, or a timm name with --model")
    network: Any = open_model(model, say=say)
    if not getattr(network, "num_classes", 0):
        raise ValueError("model: it has no classes to predict; take one with a head")
    return Classifier(network, known_about(network, settings, run=run), settings.top)


def is_detector(run: Path) -> bool:
    """Whether a saved folder, or that of a training run, holds a detector."""
    return "detector" in (saved_config(run) or {})


# --- Models --------------------------------------------------------------------------------------


class ImageModel(ABC):
    """What can predict."""

    columns: ClassVar[tuple[str, ...]]
    """The keys of its answers."""

    @abstractmethod
    def prepare(self, image: Image.Image) -> Tensor:
        """One image as the model expects it."""

    @abstractmethod
    def answer(self, images: Sequence[Tensor]) -> Sequence[Answer | None]:
        """One answer per image; None where the model's scores are not finite."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says about one image, or why it could not be read."""

    path: str
    answer: Answer | None = None
    error: str | None = None


def likeliest(scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The classes of the highest scores, or all if there are fewer, and their probabilities."""
    best = scores.float().softmax(dim=-1).topk(min(top, scores.shape[-1]))
    return best.indices, best.values


class Classifier(ImageModel):
    """The likeliest classes, from anything that gives scores."""

    columns = ("classes", "indices", "probabilities")

    def __init__(
        self, scores: Callable[[Tensor], Tensor], information: ModelInformation, top: int = 5
    ) -> None:
        self.scores, self.information, self.top = scores, information, top
        self._transform = evaluation_transform(information.spec, normalize=True)

    def prepare(self, image: Image.Image) -> Tensor:
        return self._transform(image)

    @torch.inference_mode()
    def answer(self, images: Sequence[Tensor]) -> list[Answer | None]:
        indices, values = likeliest(self.scores(torch.stack(list(images))), self.top)
        # Softmax passes on what is not finite, to the whole row.
        finite = values[:, 0].isfinite().tolist()
        found = zip(indices.tolist(), values.tolist(), finite, strict=True)
        return [self._answer(best, shares) if known else None for best, shares, known in found]

    def _answer(self, indices: list[int], values: list[float]) -> Answer:
        return {
            "classes": [self._name(index) for index in indices],
            "indices": indices,
            "probabilities": [round(value, 6) for value in values],
        }

    def _name(self, index: int) -> str:
        names = self.information.class_names
        return str(index) if names is None else names[index]


class Detector(ImageModel):
    """Boxes above a score, in pixels of the image."""

    columns = ("classes", "scores", "boxes")

    def __init__(self, loaded: LoadedDetector, threshold: float = 0.5) -> None:
        self.loaded, self.threshold = loaded, threshold

    def prepare(self, image: Image.Image) -> Tensor:
        return to_dtype(pil_to_tensor(image), scale=True)

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
    paths: Iterable[str], model: ImageModel, *, batch_size: int = 32, threads: int = 2
) -> Generator[Prediction, None, None]:
    """One prediction per path, in order; images that cannot be read are reported and passed over.

    At most two batches of images are decoded ahead, so memory does not grow with their number.
    """
    require_least("batch_size", batch_size)
    require_least("threads", threads)
    waiting: deque[tuple[str, Future[Tensor]]] = deque()
    remaining = iter(paths)
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        try:
            while True:
                for path in islice(remaining, 3 * batch_size - len(waiting)):
                    waiting.append((path, pool.submit(_read, path, model.prepare)))
                if not waiting:
                    return
                batch = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
                yield from _predict_batch(batch, model)
        finally:
            for _, future in waiting:
                future.cancel()


def _read(path: str, prepare: Callable[[Image.Image], Tensor]) -> Tensor:
    name, limits, _ = split_limits(path)
    return prepare(read_image(name, limits))


def _predict_batch(
    batch: list[tuple[str, Future[Tensor]]], model: ImageModel
) -> Iterator[Prediction]:
    found: list[Tensor | str] = []
    for _, future in batch:
        try:
            found.append(future.result())
        except Exception as error:  # noqa: BLE001 - decoders raise anything on damaged bytes
            found.append(_sentence(error))
    images = [value for value in found if isinstance(value, Tensor)]
    answers = iter(model.answer(images) if images else ())
    for (path, _), value in zip(batch, found, strict=True):
        if isinstance(value, str):
            yield Prediction(path=split_limits(path).name, error=value)
        else:
            answer = next(answers)
            error = None if answer is not None else "the model's scores are NaN or infinite"
            yield Prediction(path=split_limits(path).name, answer=answer, error=error)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def check_inputs(inputs: Iterable[str]) -> None:
    """Refuse what does not exist before any work is done."""
    for name in inputs:
        if name != _STDIN and not Path(split_limits(name).name).exists():
            raise FileNotFoundError(f"{name}: there is no such image, folder or list of paths")


def image_paths(inputs: Iterable[str], stdin: TextIO | None = None) -> Iterator[str]:
    """Paths of images, folders (with all they contain), lists of paths, and `-`, standard input.

    Inputs keep their order; what a folder contains is sorted by path. Limits that are written
    behind an input (`data.limits`) are passed on, behind each of its paths. Memory holds only the
    names in the folders on the way down to the current image, and one line of a list.
    """
    for name, _, words in map(split_limits, inputs):
        if name == _STDIN:
            yield from _lines(sys.stdin if stdin is None else stdin)
        elif Path(name).is_dir():
            yield from (path + words for path in walk_images(name))
        elif name.lower().endswith(_LISTS):
            with Path(name).open(encoding="utf-8", errors="surrogateescape") as lines:
                yield from (path + words for path in _lines(lines))
        else:
            yield name + words


def _lines(lines: Iterable[str]) -> Iterator[str]:
    return filter(None, (line.rstrip("\r\n") for line in lines))


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
    """One row an image; a column's several values are JSON, the first class has its own column."""
    table = csv.writer(stream, lineterminator="\n")
    table.writerow(["path", "error", "class", *model.columns])

    def write(prediction: Prediction) -> None:
        found = prediction.answer or {}
        first = next(iter(found.get("classes", ())), "")
        values = (json.dumps(found[name]) if name in found else "" for name in model.columns)
        table.writerow([prediction.path, prediction.error or "", first, *values])

    return write


_WRITERS: dict[str, Callable[[TextIO, ImageModel], Write]] = {"jsonl": _json_lines, "csv": _csv}

"""Streams of images through a model: decoded by threads, predicted in batches, in order.

Whatever can `prepare` an image and answer a batch of them can predict: a network, an ONNX file, a
detector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn

from ltm.data.images import decode
from ltm.data.transforms import evaluation_transform
from ltm.deployment.information import ModelInformation
from ltm.detection.saving import LoadedDetector

Answer = dict[str, Any]


class ImageModel(ABC):
    """What can predict."""

    columns: ClassVar[tuple[str, ...]]
    """The keys of its answers."""

    @abstractmethod
    def prepare(self, image: Image.Image) -> Tensor:
        """One image as the model expects it."""

    @abstractmethod
    def answer(self, images: Sequence[Tensor]) -> list[Answer]:
        """One answer per image."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says about one image, or why it could not be read."""

    path: str
    answer: Answer | None = None
    error: str | None = None


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
    def answer(self, images: Sequence[Tensor]) -> list[Answer]:
        probabilities = self.scores(torch.stack(list(images))).float().softmax(dim=-1)
        best = probabilities.topk(min(self.top, probabilities.shape[1]), dim=1)
        return [
            {
                "classes": [self._name(index) for index in indices],
                "indices": indices,
                "probabilities": [round(value, 6) for value in values],
            }
            for indices, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def _name(self, index: int) -> str:
        names = self.information.class_names
        return str(index) if names is None else names[index]


class Detector(ImageModel):
    """Boxes above a score, in pixels of the image."""

    columns = ("classes", "scores", "boxes")

    def __init__(self, loaded: LoadedDetector, threshold: float = 0.5) -> None:
        self.loaded, self.threshold = loaded, threshold

    def prepare(self, image: Image.Image) -> Tensor:
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.reshape(image.height, image.width, 3).permute(2, 0, 1).float() / 255

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


def predict(
    paths: Iterable[str], model: ImageModel, *, batch_size: int = 32, threads: int = 2
) -> Generator[Prediction, None, None]:
    """One prediction per path, in order; images that cannot be read are reported and passed over.

    At most two batches of images are decoded ahead, so memory does not grow with their number.
    """
    if batch_size < 1 or threads < 1:
        raise ValueError(f"batch_size is {batch_size}, threads is {threads}: at least 1 is needed")
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
    return prepare(decode(Path(path).read_bytes()))


def _predict_batch(
    batch: list[tuple[str, Future[Tensor]]], model: ImageModel
) -> Iterator[Prediction]:
    errors: dict[int, str] = {}
    images: dict[int, Tensor] = {}
    for place, (_, future) in enumerate(batch):
        try:
            images[place] = future.result()
        except Exception as error:  # noqa: BLE001 - decoders raise anything on damaged bytes
            errors[place] = _sentence(error)
    answers = iter(model.answer(list(images.values())) if images else ())
    for place, (path, _) in enumerate(batch):
        if place in errors:
            yield Prediction(path=path, error=errors[place])
        else:
            yield Prediction(path=path, answer=next(answers))


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # Pillow names the buffer that it read from, which says nothing to anybody.
    text = str(error).partition("<_io.BytesIO")[0].strip()
    return " ".join(text.split()) or type(error).__name__

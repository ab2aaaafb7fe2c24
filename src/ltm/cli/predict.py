"""`ltm predict`: images through a model, as many as there are."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import tyro

from ltm.files import check_folder, write_metrics
from ltm.models import ModelSource, refuse_given
from ltm.progress import Progress

if TYPE_CHECKING:
    from ltm.deployment.information import ModelInformation
    from ltm.deployment.prediction import ImageModel

    Known = tuple[Any, ModelInformation]


def predict(
    inputs: Annotated[tuple[str, ...], tyro.conf.Positional],
    *,
    run: Path | None = None,
    onnx: Path | None = None,
    model: str | None = None,
    pretrained: bool = False,
    weights: Path | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    model_args: tuple[str, ...] = (),
    class_names: Path | None = None,
    crop_ratio: float | None = None,
    top: int = 5,
    threshold: float = 0.5,
    form: Annotated[Literal["jsonl", "csv"], tyro.conf.arg(name="format")] = "jsonl",
    batch_size: int = 32,
    threads: int = 2,
    output: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Predict images: one line each, in order, as JSON or CSV.

    Takes images, folders (sorted by path), text files of paths (.txt), and paths from standard
    input (-). Memory does not grow with their number, but for the names in a folder. What cannot be
    read gets a line that says why.

    Example:
        ltm predict photos/ cat.jpg --run runs/small > predictions.jsonl
        find /data -name '*.jpg' | ltm predict - --onnx runs/export/model.onnx --format csv

    Args:
        inputs: images, folders, lists of paths, or - for standard input.
        run: a saved network, or a saved detector.
        onnx: a file that ltm export wrote.
        model: timm's name of a network, where there is neither.
        pretrained: take timm's own weights.
        weights: take those of a file in timm's keys, .safetensors or .pth; nothing is unpickled.
        num_classes: by default what the weights have.
        image_size: by default what the model was made for.
        model_args: further arguments of the model, such as depth=4.
        class_names: text file, one name a line, or JSON; by default what is known.
        crop_ratio: evaluation crop as a share of the resized side; by default the model's.
        top: how many classes to give.
        threshold: least score of a detector's boxes.
        form: jsonl or csv.
        batch_size: images per batch.
        threads: threads that read images.
        output: folder for predictions and metrics.json; by default they are printed.
        overwrite: replace another run's results there.
    """
    from ltm.deployment.sources import check_inputs

    if not inputs:
        raise ValueError("inputs: give images, folders, a list of paths, or - for standard input")
    if top < 1:
        raise ValueError(f"top is {top}: at least 1 is needed")
    check_inputs(inputs)
    check_folder(output, overwrite=overwrite)

    from ltm.deployment.prediction import Classifier, predict as stream
    from ltm.deployment.sources import image_paths
    from ltm.deployment.writing import open_writer

    options = {
        "pretrained": pretrained,
        "weights": weights,
        "num_classes": num_classes,
        "image_size": image_size,
        "model_args": model_args,
    }
    others = {"onnx": onnx, "model": model, "class_names": class_names, "crop_ratio": crop_ratio}
    predictor = _detector(run, threshold, others | options)
    if predictor is None:
        scores, known = _onnx(onnx, run, model, options) or _network(run, model, options)
        known = _adjusted(known, scores.num_classes, class_names, crop_ratio)
        predictor = Classifier(scores, known, top)
    number = unreadable = 0
    loop = Progress("images")
    with _opened(output, form) as sink:
        write = open_writer(form, sink, predictor)
        found = stream(image_paths(inputs), predictor, batch_size=batch_size, threads=threads)
        for prediction in loop(found):
            write(prediction)
            number += 1
            unreadable += prediction.error is not None
    if not number:
        print("there are no images among the inputs", file=sys.stderr)
    if unreadable:
        print(f"{unreadable} of {number} images could not be read", file=sys.stderr)
    counts = {"images": number, "unreadable": unreadable, "interrupted": loop.interrupted}
    write_metrics(output, counts)


def _detector(run: Path | None, threshold: float, others: dict[str, Any]) -> ImageModel | None:
    """A saved detector, if the folder holds one; it takes no other options."""
    from ltm.api.deployment import saved_folder

    config = None if run is None else saved_folder(run) / "config.json"
    if config is None or not config.is_file():
        return None
    try:
        known = json.loads(config.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None  # Loading the network will say what is wrong.
    if not isinstance(known, dict) or "detector" not in known:
        return None
    from ltm.deployment.prediction import Detector
    from ltm.detection.saving import load_detector

    refuse_given(others, "a saved detector")
    return Detector(load_detector(config.parent), threshold)


def _onnx(
    path: Path | None, run: Path | None, model: str | None, options: dict[str, Any]
) -> Known | None:
    """What gives scores, and what is known about it: an ONNX file, if there is one."""
    if path is None:
        return None
    from ltm.deployment.formats import OnnxModel

    if run is not None or model is not None:
        raise ValueError("onnx: give one of --onnx, --run and --model")
    refuse_given(options, "an ONNX file")
    if path.suffix.lower() == ".pt2":
        raise ValueError(
            f"onnx is {path}: a torch.export program is read by unpickling, which can run "
            "anything; export to ONNX instead"
        )
    scores = OnnxModel(path)
    return scores, scores.information


def _network(run: Path | None, model: str | None, options: dict[str, Any]) -> Known:
    """The same of a network."""
    from ltm.deployment.information import describe, saved_class_names

    if run is None and model is None:
        raise ValueError("model: give --onnx FILE, --run FOLDER, or a timm name with --model")
    scores: Any = ModelSource(model=model, run=run, **options).load()
    if not getattr(scores, "num_classes", 0):
        raise ValueError("model: it has no classes to predict; take one with a head")
    return scores, describe(scores, class_names=None if run is None else saved_class_names(run))


def _adjusted(
    known: ModelInformation, num_classes: int, names: Path | None, crop_ratio: float | None
) -> ModelInformation:
    from ltm.deployment.information import check_class_names, read_class_names

    if names is not None:
        known = dataclasses.replace(known, class_names=read_class_names(names))
        check_class_names(known.class_names, num_classes)
    if crop_ratio is not None:
        spec = dataclasses.replace(known.spec, crop_ratio=crop_ratio)
        known = dataclasses.replace(known, spec=spec)
    return known


@contextmanager
def _opened(output: Path | None, form: str) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"predictions.{form}"
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        yield stream

"""`ltm detect`: object detection with SSDLite on token-merging backbones.

`ltm segment` has the same actions, for Mask R-CNN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ltm.cli.commands import Flat, Inputs, OptionalPath, RunFolder, read_ahead, say
from ltm.detection.settings import (
    COMMANDS,
    DetectionSettings,
    EvaluateDetectorSettings,
    PredictDetectorSettings,
    Task,
    find_detection_recipe,
)
from ltm.files import output_folder
from ltm.training.settings import read_settings


def detect(action: Train | Evaluate | Predict) -> None:
    """Train, evaluate or run SSDLite, an object detector, on a merging backbone.

    A backbone is any network of timm: MobileViT and EfficientViT merge, convolutional ones such as
    MobileNet do not. Data are images with annotations in COCO's format, or generated shapes. Every
    action writes its results into the folder --output.

    Example:
        ltm detect train --recipe shapes_ssdlite --output runs/shapes
        ltm detect train --data coco --backbone mobilevit_s --pretrained --output runs/ltm
        ltm detect train --data coco --backbone mobilenetv2_100 --method none --output runs/base
        ltm detect evaluate --run runs/ltm --data coco --output runs/ltm-scores
        ltm detect predict --run runs/ltm photo.jpg folder/ --output runs/pictures

    Args:
        action: What to do; each has its own --help.
    """
    action("ssdlite")


def prepare(options: Sequence[str]) -> Callable[..., None]:
    """The command, with the defaults of its recipe and its file."""
    return actions_of(detect, "ssdlite", options)


@dataclass(frozen=True, kw_only=True)
class Train(RunFolder):
    """Train a detector on a token-merging backbone.

    Settings are read from a recipe, then from a YAML file, then from the options below. The
    defaults shown are those of the recipe. The folder gets config.yaml, log.csv, curves.png,
    metrics.json, results.json (COCO's format), checkpoints/ and model/, which evaluate and predict
    read. For several processes: torchrun --nproc-per-node 4 --no-python ltm detect train ...
    """

    settings: Flat[DetectionSettings]
    recipe: str
    """Named settings to start from: the paper's, or small ones for a CPU (shapes_...)."""

    def __call__(self, task: Task) -> None:
        """Run the action, for detectors of one kind."""
        from ltm.detection.task import train_detector

        train_detector(self.settings, **self.keywords(), say=say)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure the average precision of a trained detector on annotated images.

    The folder gets metrics.json, results.json (COCO's format) and some pictures.
    """

    run: Path
    """The model/ folder of a training run, or the run's own folder."""
    data: str
    """A folder or .zip of images with COCO annotations, or the word shapes for
    generated images."""
    settings: Flat[EvaluateDetectorSettings]
    output: OptionalPath = None
    """Folder for metrics.json, results.json and pictures/."""
    overwrite: bool = False
    """Replace another run's results there."""

    def __call__(self, task: Task) -> None:
        """Run the action, for detectors of one kind."""
        with output_folder(self.output, overwrite=self.overwrite, written=("results.json",)):
            from ltm.detection.inference import evaluate_detector

            result = evaluate_detector(self.run, self.data, self.settings, task=task)
            print(result)
            if self.output is not None:
                result.save(self.output)


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Draw what a trained detector finds on images.

    The folder gets one picture per image, results.json (COCO's format; image ids count from 1 in
    the order of the images) and metrics.json with the images' names.
    """

    images: Inputs
    """Image files and folders, or the word shapes for generated images."""
    run: Path
    """The model/ folder of a training run, or the run's own folder."""
    settings: Flat[PredictDetectorSettings]
    output: Path = Path("runs/predictions")
    """Folder for the pictures."""
    overwrite: bool = False
    """Replace another run's results there."""

    def __call__(self, task: Task) -> None:
        """Run the action, for detectors of one kind."""
        with output_folder(self.output, overwrite=self.overwrite, written=("results.json",)):
            from ltm.detection.inference import predict_objects

            result = predict_objects(self.run, self.images, self.settings, task=task)
            print(f"{result}: {result.save(self.output)}")


def actions_of(
    command: Callable[..., None], task: Task, options: Sequence[str]
) -> Callable[..., None]:
    """The command with its three actions; recipe and file decide the defaults of `train`."""
    output = Path("runs") / COMMANDS[task]
    train = Train(settings=_starting_point(options, task), recipe=task, output=output)
    Actions = (  # noqa: N806 - a type, made on the spot
        Annotated[Train, tyro.conf.subcommand("train", default=train)]
        | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
        | Annotated[Predict, tyro.conf.subcommand("predict")]
    )

    command.__annotations__["action"] = Annotated[Actions, tyro.conf.arg(name="")]
    flat = tyro.conf.configure(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    return flat(command)


def _starting_point(options: Sequence[str], task: Task) -> DetectionSettings:
    """The defaults of the settings: those of the recipe, changed by the file."""
    given = read_ahead(options, "recipe", "config") or {"recipe": None, "config": None}
    settings = find_detection_recipe(given["recipe"] or task, task)
    if given["config"] is None:
        return settings
    changed = read_settings(given["config"], settings)
    if changed.detector.task != task:
        other = COMMANDS[changed.detector.task]
        raise ValueError(f"{given['config']} is for ltm {other}, not ltm {COMMANDS[task]}")
    return changed

"""What `ltm detect` and `ltm segment` share: train, evaluate, predict."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ltm.cli.commands import say
from ltm.detection.settings import (
    DetectionSettings,
    Task,
    find_detection_recipe,
)
from ltm.files import check_folder, write_metrics
from ltm.progress import Progress
from ltm.training.settings import read_settings

if TYPE_CHECKING:
    import torch

    from ltm.detection.saving import LoadedDetector

Device = Literal["auto", "cpu", "cuda", "mps"]
COMMANDS: dict[Task, str] = {"ssdlite": "detect", "mask_rcnn": "segment"}


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a detector on a token-merging backbone.

    Settings come from a recipe, then from a YAML file, then from the options below, whose defaults
    are those of the recipe. The folder gets config.yaml, log.csv, curves.png, metrics.json,
    results.json (COCO's format), checkpoints/ and model/, which evaluate and predict read. Several
    processes: torchrun --nproc-per-node 4 --no-python ltm detect train ...
    """

    settings: Annotated[DetectionSettings, tyro.conf.arg(name="")]
    recipe: str
    """NamedPicture settings to start from: the paper's, or small ones for a CPU (shapes_...)."""
    config: Path | None = None
    """YAML file of settings, such as the config.yaml of an earlier run."""
    output: Path = Path("runs/detect")
    """Folder of the run."""
    resume: Literal["auto", "never"] = "never"
    """auto continues from the last complete checkpoint in output, if there is one."""
    overwrite: bool = False
    """Start over in a folder that holds a run."""

    def __call__(self, task: Task) -> None:
        """Run the action, for detectors of one kind."""
        from ltm.detection.task import train_detector

        assert self.settings.detector.task == task
        train_detector(
            self.settings,
            output=self.output,
            resume=self.resume,
            overwrite=self.overwrite,
            say=say,
        )


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure the average precision of a trained detector on annotated images.

    The folder gets metrics.json, results.json (COCO's format) and some pictures.
    """

    run: Path
    """The model/ folder of a training run, or the run's own folder."""
    data: str
    """A folder or .zip of images with annotations in COCO's format, or shapes (generated)."""
    split: str = "val"
    """Split to evaluate on."""
    annotations: str | None = None
    """Annotation file, where it has no usual name."""
    batch_size: int = 1
    """Images per batch."""
    workers: int = 2
    """Loader processes; 0 loads in the process itself."""
    device: Device = "auto"
    """Where the detector runs."""
    pictures: int = 4
    """How many images to draw what was found on."""
    threshold: float = 0.3
    """Least score of what is drawn."""
    output: Path | None = None
    """Folder for metrics.json, results.json and pictures/."""

    def __call__(self, task: Task) -> None:
        """Run the action, for detectors of one kind."""
        check_folder(self.output)
        _check_threshold(self.threshold)
        from ltm.data.loading import build_loader
        from ltm.detection.cost import detector_cost
        from ltm.detection.data import collate_detection, open_detection
        from ltm.detection.score import (
            detect,
            evaluate_detections,
            require_evaluator,
            write_results,
        )
        from ltm.detection.transforms import detection_transforms

        require_evaluator()
        device = _device(self.device)
        loaded = _load(self.run, task, device)
        dataset = open_detection(
            self.data,
            split=self.split,
            annotations=self.annotations,
            transforms=detection_transforms(training=False),
            masks=False,
        )
        if dataset.category_ids != loaded.category_ids:
            raise ValueError(
                f"data {self.data} has {len(dataset.category_ids)} categories that are not the "
                f"{len(loaded.category_ids)} which {self.run} was trained on"
            )
        batches = build_loader(
            dataset,
            batch_size=self.batch_size,
            workers=self.workers,
            device=device,
            collate=collate_detection,
        )
        progress = Progress("images")
        results = detect(loaded.model, batches, loaded.category_ids, progress=progress)
        if progress.interrupted:
            raise SystemExit(130)
        scores = evaluate_detections(dataset.coco_dict(), results, masks=task == "mask_rcnn")
        cost = detector_cost(loaded.model)
        for name, found in (("boxes", scores.box), ("masks", scores.mask)):
            if found is not None:
                print(f"{name}: AP {_percent(found.ap)}", end="  ")
                print(f"AP50 {_percent(found.ap50)}  AP75 {_percent(found.ap75)}")
        print(cost)
        write_metrics(
            self.output,
            {**scores.to_dict(), "parameters": cost.num_parameters, "gmacs": cost.gmacs},
        )
        if self.output is not None:
            write_results(self.output / "results.json", results)
            chosen = range(min(self.pictures, len(dataset)))
            named = [(f"{dataset.image_ids[i]}", dataset[i][0]) for i in chosen]
            _draw(loaded, named, self.output / "pictures", self.threshold, device)


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Draw what a trained detector finds on images.

    The folder gets one picture per image, results.json (COCO's format; image ids count from 1 in
    the order of the images) and metrics.json with the images' names.
    """

    images: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Image files, folders of them, or shapes (generated ones)."""
    run: Path
    """The model/ folder of a training run, or the run's own folder."""
    threshold: float = 0.3
    """Least score of what is drawn."""
    device: Device = "auto"
    """Where the detector runs."""
    output: Path = Path("runs/predictions")
    """Folder for the pictures."""

    def __call__(self, task: Task) -> None:
        """Run the action, for detectors of one kind."""
        check_folder(self.output)
        _check_threshold(self.threshold)
        from ltm.detection.score import write_results

        if not self.images:
            raise ValueError("images: give image files, folders of them, or shapes")
        device = _device(self.device)
        loaded = _load(self.run, task, device)
        named = _read(self.images)
        results = _draw(loaded, named, self.output, self.threshold, device)
        write_results(self.output / "results.json", results)
        kept = sum(result["score"] >= self.threshold for result in results)
        files = {number: name for number, (name, _) in enumerate(named, start=1)}
        write_metrics(self.output, {"images": files, "detections": kept})
        print(f"{kept} objects on {len(named)} images: {self.output}")


def actions_of(
    command: Callable[..., None], task: Task, default: str, options: Sequence[str]
) -> Callable[..., None]:
    """The command with its three actions, whose defaults follow from the recipe and the file."""
    settings = _starting_point(options, task, default)
    output = Path("runs") / COMMANDS[task]
    train = Train(settings=settings, recipe=default, output=output)
    Actions = (  # noqa: N806 - a type, made on the spot
        Annotated[Train, tyro.conf.subcommand("train", default=train)]
        | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
        | Annotated[Predict, tyro.conf.subcommand("predict")]
    )

    def prepared(action: Any) -> None:
        action(task)

    prepared.__doc__ = command.__doc__
    prepared.__annotations__["action"] = Annotated[Actions, tyro.conf.arg(name="")]
    flat = tyro.conf.configure(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    return flat(prepared)


def _starting_point(options: Sequence[str], task: Task, default: str) -> DetectionSettings:
    """The settings before options: those of the recipe, changed by the file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--recipe", default=default)
    parser.add_argument("--config", default=None)
    try:
        given, _ = parser.parse_known_args(options)
    except argparse.ArgumentError:
        return find_detection_recipe(default, task)  # The full parser will say what is wrong.
    settings = find_detection_recipe(given.recipe, task)
    if given.config is None:
        return settings
    changed = read_settings(given.config, settings)
    if changed.detector.task != task:
        raise ValueError(
            f"{given.config} is for ltm {COMMANDS[changed.detector.task]}, not ltm {COMMANDS[task]}"
        )
    return changed


def _device(name: Device) -> torch.device:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but this machine has none that torch can use")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(found if name == "auto" else name)


def _load(run: Path, task: Task, device: torch.device) -> LoadedDetector:
    from ltm.api.deployment import saved_folder
    from ltm.detection.saving import TASKS, load_detector

    loaded = load_detector(saved_folder(run))
    kind: Task = next(name for name, made in TASKS.items() if isinstance(loaded.config, made))
    if kind != task:
        raise ValueError(f"run {run} is for ltm {COMMANDS[kind]}, not ltm {COMMANDS[task]}")
    loaded.model.to(device)
    return loaded


def _read(images: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
    """Images by name, 8 bit."""
    from torchvision.transforms.v2.functional import pil_to_tensor

    from ltm.detection.data import open_detection
    from ltm.report.pictures import read_pictures

    named: list[tuple[str, torch.Tensor]] = []
    for text in images:
        if text.partition(":")[0] == "shapes":
            dataset = open_detection(text)
            named += [(f"shapes-{i}", dataset[i][0]) for i in range(min(8, len(dataset)))]
        else:
            named += [(name, pil_to_tensor(image)) for name, image in read_pictures([Path(text)])]
    return named


def _check_threshold(threshold: float) -> None:
    if not 0 <= threshold <= 1:
        raise ValueError(f"--threshold is {threshold:g}: scores are from 0 to 1")


def _draw(
    loaded: LoadedDetector,
    named: Sequence[tuple[str, torch.Tensor]],
    folder: Path,
    threshold: float,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Write a picture of every image with what was found on it, and return all of that."""
    import torch
    from torchvision.transforms.v2.functional import to_pil_image

    from ltm.detection.drawing import draw_detections
    from ltm.detection.score import coco_results

    folder.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with torch.no_grad():
        for number, (name, image) in enumerate(named, start=1):
            found = loaded.model([image.to(device)])[0]
            results += coco_results(number, found, loaded.category_ids)
            drawn = draw_detections(image, found, loaded.class_names, threshold=threshold)
            to_pil_image(drawn).save(folder / f"{number:03d}-{name}.png")
    return results


def _percent(value: float) -> str:
    return "none" if value < 0 else f"{100 * value:.1f}"

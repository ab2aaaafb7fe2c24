"""Pictures for commands: images to look at, and what converted networks make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import nn

    from ltm.report.heatmaps import Traces
    from ltm.report.pictures import Scenes
    from ltm.report.report import Illustration

GENERATED = "generated"
NUM_PICTURES = 5

Named = tuple[str, "Image"]


def read_pictures(paths: Sequence[Path], limit: int | None = None) -> list[Named]:
    """Read image files, and those of folders; what is no image is a ValueError."""
    from ltm.data.images import EXTENSIONS, decode

    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in EXTENSIONS)
            if not found:
                raise ValueError(f"{path} holds no images: give image files or a folder of them")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise FileNotFoundError(f"{path}: there is no such image or folder")
    pictures: list[Named] = []
    for file in files[:limit]:
        try:
            pictures.append((file.stem, decode(file.read_bytes())))
        except (OSError, ValueError, SyntaxError) as error:
            raise ValueError(f"{file} is no readable image: remove it or save it again") from error
    return pictures


def generated_pictures(number: int = NUM_PICTURES) -> list[Named]:
    """Paint pictures, for when no photographs may be shown."""
    from ltm.data.shapes import example_pictures

    return [
        (picture.name.replace(", ", ",\n"), picture.image) for picture in example_pictures(number)
    ]


def data_pictures(dataset: Any, number: int = NUM_PICTURES) -> list[Named]:
    """Take a few evenly spread images of a data set, named by their classes."""
    if not hasattr(dataset, "take"):
        return []
    few = dataset.take(number).with_transform(None)
    # Generated data take the first images; files are spread over the classes.
    items = [few[index] for index in range(len(few))]
    return [(few.class_names[label], image) for image, label in items]


def trace_models(models: Mapping[str, nn.Module], scenes: Scenes) -> Traces:
    """Follow the tokens of the pictures through every network."""
    import torch

    from ltm.report.tracing import trace

    traces = {}
    for name, model in models.items():
        device = next(model.parameters()).device
        with torch.no_grad():
            traces[name] = trace(model, scenes.inputs.to(device))
    return traces


def illustrate(scenes: Scenes, traces: Traces, block: int) -> list[Illustration]:
    """The report's pictures: merge weights, groups, and a film through the blocks."""
    from ltm.report.groups import film_bytes, layer_frames
    from ltm.report.heatmaps import groups_figure, weights_figure
    from ltm.report.pictures import data_uri, figure_bytes
    from ltm.report.report import Illustration

    names = " and ".join(traces)
    shown = "; ".join(name.replace("\n", " ") for name in scenes.names)
    weights = figure_bytes(weights_figure(scenes, traces, block))
    groups = figure_bytes(groups_figure(scenes, traces, block))
    film = film_bytes(layer_frames(scenes, traces, 0))
    return [
        Illustration(
            address=data_uri(weights, "image/png"),
            alt=f"Merge weights of one target patch per picture ({shown}), by {names}.",
            caption=(
                f"Merge weights after block {block}: the token that the patch in the red box went "
                "into, and how much each patch weighs in it."
            ),
            wide=True,
        ),
        Illustration(
            address=data_uri(groups, "image/png"),
            alt=f"Which patches are one token after block {block} ({shown}), by {names}.",
            caption=(
                f"Groups after block {block}: patches that became one token are painted in their "
                "mean colour; patches still alone keep their pixels; blank ones were dropped."
            ),
            wide=True,
        ),
        Illustration(
            address=data_uri(film, "image/gif"),
            alt=f"Film: the groups of the first picture, block after block, by {names}.",
            caption="The first picture through the blocks.",
        ),
    ]


def telling_block(model: nn.Module) -> int | None:
    """The last merging block whose tokens are attended to; None where nothing merges.

    Nobody attends to tokens after the last block of all: a site there may leave next to none.
    """
    from ltm.api import conversion_of

    sites = [site for site in conversion_of(model).sites if site.merges]
    attended = [site.block for site in sites if site.block < site.depth - 1]
    return (attended or [site.block for site in sites] or [None])[-1]

"""`ltm train`: a token-merging network from scratch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ltm.cli.commands import Flat, RunFolder, read_ahead, say
from ltm.training.recipes import SCRATCH, SMALLEST, starting_settings
from ltm.training.settings import TrainSettings


@dataclass(frozen=True, kw_only=True)
class TrainFolder(RunFolder):
    """What the training of a classifier starts from, and the folder that it writes."""

    recipe: str | None = None
    """Named settings to start from: mobilevit_xs, mobilevit_s, efficientvit_b1_r224,
    efficientvit_b1_r288, vit_small, vit_base, swin_tiny, swin_base, general, or, for a CPU,
    shapes_vit, shapes_swin, shapes_mobilevit, shapes_efficientvit; demo_vit retrains the bundled
    network. ltm finetune also has distil_mergers, distil_norms, distil_biases, distil_lora and
    distil_all, in which the original teaches without labels. By
    default that of the model, if it has one, or shapes_vit if no model is named."""


def train(settings: Flat[TrainSettings], folder: Flat[TrainFolder]) -> None:
    """Train a token-merging network from scratch on labelled images.

    Settings are read from a recipe, then from a YAML file, then from the options below. The
    defaults shown are those of the recipe. The folder gets config.yaml, log.csv, curves.png,
    metrics.json, checkpoints/ and model/, which ltm.load reads. For several processes:
    torchrun --nproc-per-node 4 --no-python ltm train ...

    Example:
        ltm train --recipe shapes_swin --epochs 4 --output runs/swin
        ltm train --recipe vit_small --data /data/imagenet --devices 4 --output runs/vit-s
        ltm train --recipe vit_small --data /data/imagenet --output runs/vit-s --resume auto

    Args:
        settings: All settings of the run.
        folder: What it starts from, and where its results go.
    """
    from ltm.training import run

    run.train(settings=settings, **folder.keywords(), say=say)


def prepare(options: Sequence[str]) -> Callable[..., None]:
    """The command, with the defaults of its recipe and its file."""
    return with_defaults(train, options, SCRATCH)


def with_defaults(
    command: Callable[..., None], options: Sequence[str], recipes: Mapping[str, TrainSettings]
) -> Callable[..., None]:
    """A command whose settings have the defaults that the options decide."""
    folder = TrainFolder(output=Path("runs") / command.__name__)
    return partial(command, settings=starting_point(options, recipes), folder=folder)


def starting_point(options: Sequence[str], recipes: Mapping[str, TrainSettings]) -> TrainSettings:
    """The defaults of the settings, which recipe, file, model and method decide."""
    given = read_ahead(options, "recipe", "config", "model", "method")
    return recipes[SMALLEST] if given is None else starting_settings(recipes, **given)

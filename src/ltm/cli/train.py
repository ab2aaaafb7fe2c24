"""`ltm train`: a token-merging network from scratch."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from ltm.cli.commands import Flat, say
from ltm.training.recipes import SCRATCH, SMALLEST, starting_settings
from ltm.training.settings import TrainSettings


def train(
    settings: Flat[TrainSettings],
    *,
    recipe: str | None = None,
    config: Path | None = None,
    output: Path = Path("runs/train"),
    resume: Literal["auto", "never"] = "never",
    overwrite: bool = False,
) -> None:
    """Train a token-merging network from scratch on labelled images.

    Settings come from a recipe, then from a YAML file, then from the options below, whose defaults
    are those of the recipe. The folder gets config.yaml, log.csv, curves.png, metrics.json,
    checkpoints/ and model/, which ltm.load reads. Several processes: torchrun --nproc-per-node 4
    --no-python ltm train ...

    Example:
        ltm train --recipe shapes_swin --epochs 4 --output runs/swin
        ltm train --recipe vit_small --data /data/imagenet --devices 4 --output runs/vit-s
        ltm train --recipe vit_small --data /data/imagenet --output runs/vit-s --resume auto

    Args:
        settings: all settings of the run.
        recipe: named settings to start from: mobilevit_xs, mobilevit_s, efficientvit_b1_r224,
            efficientvit_b1_r288, vit_small, vit_base, swin_tiny, swin_base, general, or, for a
            CPU, shapes_vit, shapes_swin, shapes_mobilevit, shapes_efficientvit. By default that
            of the model, if it has one, and shapes_vit where no model is named.
        config: YAML file of settings, such as the config.yaml of an earlier run.
        output: folder of the run.
        resume: auto continues from the last complete checkpoint in output, if there is one.
        overwrite: start over in a folder that holds a run.
    """
    from ltm.training import run

    del recipe, config  # They were read before the other options, in `prepare`.
    run.train(settings=settings, output=output, resume=resume, overwrite=overwrite, say=say)


def prepare(options: Sequence[str]) -> Callable[..., None]:
    """The command with the defaults that its recipe and its file say."""
    return with_defaults(train, starting_point(options, SCRATCH))


def starting_point(options: Sequence[str], recipes: Mapping[str, TrainSettings]) -> TrainSettings:
    """The settings before options, which the recipe, the file, the model and the method decide."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--recipe", "--config", "--model", "--method"):
        parser.add_argument(name)
    try:
        given, _ = parser.parse_known_args(options)
    except argparse.ArgumentError:
        return recipes[SMALLEST]  # The full parser will say what is wrong.
    return starting_settings(recipes, **vars(given))


def with_defaults(command: Callable[..., None], defaults: TrainSettings) -> Callable[..., None]:
    """A copy of a command whose settings have these defaults."""

    def prepared(
        settings: Flat[TrainSettings] = defaults,
        *,
        recipe: str | None = None,
        config: Path | None = None,
        output: Path = Path("runs") / command.__name__,
        resume: Literal["auto", "never"] = "never",
        overwrite: bool = False,
    ) -> None:
        command(
            settings,
            recipe=recipe,
            config=config,
            output=output,
            resume=resume,
            overwrite=overwrite,
        )

    prepared.__doc__ = command.__doc__
    return prepared

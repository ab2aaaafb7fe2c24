"""`ltm train`: a token-merging network from scratch."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ltm.training.recipes import SCRATCH, SMALLEST, find_recipe, recipe_of
from ltm.training.settings import TrainSettings, read_settings


def train(
    settings: Annotated[TrainSettings, tyro.conf.arg(name="")],
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
    run.train(settings, output, resume=resume, overwrite=overwrite)


def prepare(options: Sequence[str]) -> Callable[..., None]:
    """The command with the defaults that its recipe and its file say."""
    return with_defaults(train, starting_point(options, SCRATCH))


def starting_point(options: Sequence[str], recipes: dict[str, TrainSettings]) -> TrainSettings:
    """The settings before options: those of the recipe, changed by the file.

    A model without a recipe is looked up among them. What a recipe says for its own model or
    method alone does not go over to another.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--recipe", "--config", "--model", "--method"):
        parser.add_argument(name)
    try:
        given, _ = parser.parse_known_args(options)
    except argparse.ArgumentError:
        return recipes[SMALLEST]  # The full parser will say what is wrong.
    recipe = given.recipe or (recipe_of(given.model) if given.model else SMALLEST)
    settings = find_recipe(recipe, recipes)
    if given.config is not None:
        settings = read_settings(given.config, settings)
    if given.model not in (None, settings.model.name):
        settings = replace(settings, model=replace(settings.model, model_args=()))
    if given.method not in (None, settings.merge.method):
        settings = replace(settings, merge=replace(settings.merge, method_options=()))
    return settings


def with_defaults(command: Callable[..., None], settings: TrainSettings) -> Callable[..., None]:
    """A copy of a command whose settings have these defaults."""

    def prepared(
        settings: Annotated[TrainSettings, tyro.conf.arg(name="")] = settings,
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

"""`ltm finetune`: mask modules, thresholds, heads or adapters of a pretrained network."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from ltm.cli.commands import Flat, say
from ltm.cli.train import starting_point, with_defaults
from ltm.training.recipes import FINETUNE
from ltm.training.settings import TrainSettings


def finetune(
    settings: Flat[TrainSettings],
    *,
    recipe: str | None = None,
    config: Path | None = None,
    output: Path = Path("runs/finetune"),
    resume: Literal["auto", "never"] = "never",
    overwrite: bool = False,
) -> None:
    """Make a pretrained network merge tokens and train its mask modules, all else frozen.

    Start from timm's weights (--pretrained) or from a file or folder (--weights). A head for other
    classes than the weights' starts anew and trains. More trains with --unfreeze 'blocks.11.*' or
    --lora-rank 8. LTMP learns its thresholds with a budget loss (--method ltmp), and meets --ratio
    at the end.

    Example:
        ltm finetune --recipe vit_small --data /data/imagenet --epochs 5 --output runs/vit-s-5
        ltm finetune --recipe vit_small --method ltmp --data /data/imagenet --output runs/ltmp
        ltm finetune --recipe shapes_vit --weights runs/base/model --output runs/tuned

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
    run.finetune(settings=settings, output=output, resume=resume, overwrite=overwrite, say=say)


def prepare(options: Sequence[str]) -> Callable[..., None]:
    """The command with the defaults that its recipe and its file say."""
    return with_defaults(finetune, starting_point(options, FINETUNE))

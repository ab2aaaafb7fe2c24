"""`ltm finetune`: mask modules, thresholds, heads or adapters of a pretrained network."""

from collections.abc import Callable, Sequence

from ltm.cli.commands import Flat, say
from ltm.cli.train import TrainFolder, with_defaults
from ltm.training.recipes import FINETUNE
from ltm.training.settings import TrainSettings


def finetune(settings: Flat[TrainSettings], folder: Flat[TrainFolder]) -> None:
    """Convert a pretrained network and train its mask modules; everything else stays frozen.

    Weights are timm's (--pretrained) or those of a file or folder (--weights). If the data have
    different classes, a new head is trained. To train more, use --unfreeze 'blocks.11.*' or
    --lora-rank 8. LTMP (--method ltmp) learns thresholds, with a loss that pulls it towards
    --ratio.

    Example:
        ltm finetune --recipe vit_small --data /data/imagenet --epochs 5 --output runs/vit-s-5
        ltm finetune --recipe vit_small --method ltmp --data /data/imagenet --output runs/ltmp
        ltm finetune --recipe shapes_vit --weights runs/base/model --output runs/tuned

    Args:
        settings: All settings of the run.
        folder: What it starts from, and where its results go.
    """
    from ltm.training import run

    run.finetune(settings=settings, **folder.keywords(), say=say)


def prepare(options: Sequence[str]) -> Callable[..., None]:
    """The command, with the defaults of its recipe and its file."""
    return with_defaults(finetune, options, FINETUNE)

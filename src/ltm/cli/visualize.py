"""`ltm visualize`: what is merged with what, and with which weights, over images."""

from pathlib import Path

from ltm.cli.commands import Flat, Inputs, say
from ltm.files import output_folder
from ltm.models import ModelSource
from ltm.report.settings import VisualizeSettings


def visualize(
    source: Flat[ModelSource],
    settings: Flat[VisualizeSettings],
    images: Inputs = (),
    *,
    output: Path = Path("runs/visualize"),
    overwrite: bool = False,
) -> None:
    """Draw which patches merge into which token.

    Every block gets two sheets. One follows a marked patch of each image and shows, for each
    method, the weights of the token that the patch went into (the layout of the paper's figure).
    The other shows the groups of patches that became one token. Without images it draws generated
    ones. A saved network is drawn with its own method and schedule.

    Example:
        ltm visualize photos/ --model vit_small_patch16_224 --pretrained --against tome
            --sites all --gif --output runs/pictures

    Args:
        source: Which network.
        settings: What is drawn.
        images: Image files and folders.
        output: Folder for the pictures and metrics.json.
        overwrite: Replace another run's results there.
    """
    with output_folder(output, overwrite=overwrite):
        from ltm.report import visualization

        result = visualization.visualize(source, images, settings, say=say)
        for path in result.save(output):
            print(path)

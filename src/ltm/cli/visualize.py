"""`ltm visualize`: what is merged with what, and with which weights, over images."""

from pathlib import Path

import tyro

from ltm.cli.commands import Flat
from ltm.files import output_folder
from ltm.models import ModelSource
from ltm.report.settings import VisualizeSettings


def visualize(
    source: Flat[ModelSource],
    settings: Flat[VisualizeSettings],
    images: tyro.conf.Positional[tuple[Path, ...]] = (),
    *,
    output: Path = Path("runs/visualize"),
    overwrite: bool = False,
) -> None:
    """Draw merge weights as heatmaps, and which patches became one token.

    One sheet per block in the layout of the paper's figure: images with a marked target patch
    above, then for each method the weights of the token that the target went into. Another sheet
    shows the groups of patches. Without images, generated pictures are drawn. A saved network is
    drawn with its own method and schedule.

    Example:
        ltm visualize photos/ --model vit_small_patch16_224 --pretrained --against tome
            --sites all --gif --output runs/pictures

    Args:
        source: which network.
        settings: what is drawn.
        images: image files and folders of them.
        output: folder for the pictures and metrics.json.
        overwrite: replace another run's results there.
    """
    with output_folder(output, overwrite=overwrite):
        from ltm.report import visualization

        for path in visualization.visualize(source, images, settings).save(output):
            print(path)

"""`ltm segment`: instance segmentation with Mask R-CNN on token-merging backbones."""

from collections.abc import Callable, Sequence

from ltm.cli.detect import Evaluate, Predict, Train, actions_of


def segment(action: Train | Evaluate | Predict) -> None:
    """Train, evaluate or run Mask R-CNN (boxes and masks) on a merging backbone.

    A backbone is any network of timm. Data are images with annotations in COCO's format, or
    generated shapes. Every action writes its results into the folder --output.

    Example:
        ltm segment train --recipe shapes_mask_rcnn --output runs/shapes
        ltm segment train --data coco --backbone efficientvit_b1 --pretrained --output runs/ltm
        ltm segment train --data coco --backbone efficientvit_m4 --method none --output runs/evit
        ltm segment evaluate --run runs/ltm --data coco --output runs/ltm-scores
        ltm segment predict --run runs/ltm photo.jpg folder/ --output runs/pictures

    Args:
        action: What to do; each has its own --help.
    """
    action("mask_rcnn")


def prepare(options: Sequence[str]) -> Callable[..., None]:
    """The command, with the defaults of its recipe and its file."""
    return actions_of(segment, "mask_rcnn", options)

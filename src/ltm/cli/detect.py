"""`ltm detect`: object detection with SSDLite on token-merging backbones."""

from collections.abc import Callable, Sequence

from ltm.cli.detectors import Evaluate, Predict, Train, actions_of


def detect(action: Train | Evaluate | Predict) -> None:
    """Train, evaluate or use SSDLite, an object detector, on a token-merging backbone.

    Backbones are LTM-MobileViT, LTM-EfficientViT and whatever else timm has (MobileNet, MixNet,
    MNASNet); data are images with annotations in COCO's format, or generated shapes. Every action
    writes its results into the folder given as --output.

    Example:
        ltm detect train --recipe shapes_ssdlite --output runs/shapes
        ltm detect train --data coco --backbone mobilevit_s --pretrained --output runs/ltm
        ltm detect train --data coco --backbone mobilenetv2_100 --method none --output runs/base
        ltm detect evaluate --run runs/ltm --data coco --output runs/ltm-scores
        ltm detect predict --run runs/ltm photo.jpg folder/ --output runs/pictures

    Args:
        action: what to do; each has its own --help.
    """
    action("ssdlite")


def prepare(options: Sequence[str]) -> Callable[..., None]:
    """The command with the defaults that its recipe and its file say."""
    return actions_of(detect, "ssdlite", "ssdlite", options)

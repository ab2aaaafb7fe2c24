"""Dense tasks on converted networks: feature pyramids, detection, instance segmentation.

`train_detector`, `evaluate_detector` and `predict_objects` do what `ltm detect` and `ltm segment`
do. Import further names from the modules: `pyramid` (any network as feature maps), `ssdlite`,
`mask_rcnn`, `saving`, `score` (average precision, parameters, MACs), `coco` (data). Only `settings`
imports no torch. The folder needs the extra `detection`, and nothing below `cli` and `deployment`
imports it.
"""

from typing import TYPE_CHECKING

from ltm.extras import lazy_names

if TYPE_CHECKING:
    from ltm.detection.inference import (
        evaluate_detector as evaluate_detector,
        predict_objects as predict_objects,
    )
    from ltm.detection.saving import load_detector as load_detector
    from ltm.detection.task import train_detector as train_detector

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ltm.detection.inference": ("evaluate_detector", "predict_objects"),
        "ltm.detection.saving": ("load_detector",),
        "ltm.detection.task": ("train_detector",),
    },
)

"""Dense tasks on converted networks: feature pyramids, detection, instance segmentation.

`train_detector`, `evaluate_detector` and `predict_objects` do what `ltm detect` and `ltm segment`
do. Import further names from the modules: `pyramid` (any network as feature maps), `ssdlite`,
`mask_rcnn`, `cost` (parameters and MACs), `saving`, `score`, `coco`. Only `settings` imports no
torch. The folder needs the extra `detection`, and nothing below `cli` and `deployment` imports it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ltm.extras import named as _named

if TYPE_CHECKING:
    from ltm.detection.inference import (
        evaluate_detector as evaluate_detector,
        predict_objects as predict_objects,
    )
    from ltm.detection.saving import load_detector as load_detector
    from ltm.detection.task import train_detector as train_detector

_HOME_OF = {
    "evaluate_detector": "inference",
    "load_detector": "saving",
    "predict_objects": "inference",
    "train_detector": "task",
}


def __getattr__(name: str) -> object:
    """Import a verb from its module, once."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ltm.detection' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"ltm.detection.{_HOME_OF[name]}"), name)
    except ModuleNotFoundError as error:
        raise _named(error) from error
    globals()[name] = value
    return value

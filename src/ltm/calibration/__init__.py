"""Where a network merges, how much and how: chosen on unlabelled images, within a budget."""

from importlib import import_module
from typing import TYPE_CHECKING

from ltm.calibration.settings import CalibrateSettings as CalibrateSettings, Settings as Settings

if TYPE_CHECKING:
    from ltm.calibration.calibration import Calibration as Calibration, calibrate as calibrate
    from ltm.calibration.schedules import CalibrateResult as CalibrateResult, Trial as Trial

_HOME_OF = {
    "CalibrateResult": "schedules",
    "Calibration": "calibration",
    "Trial": "schedules",
    "calibrate": "calibration",
}


def __getattr__(name: str) -> object:
    """Import a name from its module when it is first used: settings are light, the rest is not."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ltm.calibration' has no attribute {name!r}")
    return getattr(import_module(f"ltm.calibration.{_HOME_OF[name]}"), name)

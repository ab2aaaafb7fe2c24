"""Where a network merges, how much and how: chosen on unlabelled images, within a budget."""

from typing import TYPE_CHECKING

from ltm.calibration.settings import CalibrateSettings as CalibrateSettings, Settings as Settings
from ltm.extras import lazy_names

if TYPE_CHECKING:
    from ltm.calibration.calibration import (
        CalibrateResult as CalibrateResult,
        Calibration as Calibration,
        calibrate as calibrate,
    )
    from ltm.calibration.search import Trial as Trial

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ltm.calibration.calibration": ("CalibrateResult", "Calibration", "calibrate"),
        "ltm.calibration.search": ("Trial",),
    },
)

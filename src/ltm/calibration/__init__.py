"""Where a network merges, how much and how: chosen on unlabelled images, within a budget."""

from ltm.calibration.calibrate import Calibration, calibrate
from ltm.calibration.result import CalibrationResult, Trial
from ltm.calibration.settings import Settings

__all__ = ["Calibration", "CalibrationResult", "Settings", "Trial", "calibrate"]

"""The main job: convert, calibrate, tune, freeze, measure, report."""

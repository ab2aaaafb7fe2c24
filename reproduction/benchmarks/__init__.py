"""Measurements behind `results/`; each module is a command: `python -m reproduction.benchmarks.NAME`."""

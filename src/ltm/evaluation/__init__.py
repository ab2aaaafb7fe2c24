"""Measurements of networks: frozen rows, comparable because they come from the same images or run.

Import from the modules: `accuracy` (top-1, agreement, calibration), `bottleneck` (information
bottleneck per site), `latency` (time and memory against the untouched network).
"""

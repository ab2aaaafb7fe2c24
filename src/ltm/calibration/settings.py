"""Settings of `ltm.calibrate`. Importing this imports no torch."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from ltm.core.validation import require_least


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    """How to search for a schedule. The defaults suit most networks and devices."""

    budget: float | None = None
    """Share of the multiply-adds that may remain."""
    budget_ms: float | None = None
    """Instead, milliseconds that a batch may take on this device."""
    method: str | None = None
    """How to merge, such as ltm or ltm:weights=uniform; by default what the network does already,
    or ltm."""
    images: int = 256
    """How many images to look at; a few hundred do. Labels are not used."""
    split: str = "val"
    """Split of the data, where it has several."""
    sites: int | None = None
    """At most so many blocks merge; by default 4, unless the method's own schedule has more and is
    better. Few are as accurate and faster."""
    adjust: bool | None = None
    """Choose the method's own settings too, such as LTM's attended and size_power; by default below
    a share of 0.5. Takes up to 40 trials more."""
    multiple: int | None = None
    """Token counts, prefix included, are a multiple of this; by default 8, or 1 where there are
    few tokens."""
    trials: int = 250
    """Schedules to try, those that ask each block what it minds included. A budget in milliseconds
    may take up to four such searches."""
    time_batch: int = 1
    """Images in the batch that the budget in milliseconds is about."""
    time_mode: str | None = None
    """How it runs: eager, compiled or cudagraph; by default a CUDA graph on GPUs, eager
    elsewhere."""
    batch_size: int | None = None
    """Images at a time; by default 64 on a CPU, 256 on a GPU."""
    memory_bytes: int = 2 << 30
    """For the outputs of blocks, so that a trial starts where it differs from earlier ones."""
    workers: int = 2
    """Loader processes."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda or cuda:N."""
    seed: int = 0
    """Of the search."""

    def __post_init__(self) -> None:
        if self.budget is not None and not 0 < self.budget <= 1:
            raise ValueError(
                f"budget: got {self.budget:g}; it is a share of the original's multiply-adds, "
                "above 0 and at most 1."
            )
        for name in ("sites", "trials", "time_batch", "multiple", "batch_size"):
            require_least(name, getattr(self, name))


def Settings(**values: Any) -> CalibrateSettings:  # noqa: N802 - a class until 0.1.0
    """Take the names of 0.1.0."""
    warnings.warn(
        "ltm.calibration.Settings is deprecated: use ltm.CalibrateSettings, with trials and sites "
        "for num_trials and num_sites",
        DeprecationWarning,
        stacklevel=2,
    )
    return CalibrateSettings(**{name.removeprefix("num_"): v for name, v in values.items()})

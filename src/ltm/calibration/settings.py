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
    """Share of the multiply-adds to keep."""
    budget_ms: float | None = None
    """Instead of a share: milliseconds that a batch may take on this device."""
    method: str | None = None
    """How to merge, such as ltm or ltm:weights=uniform; by default as the network merges already,
    otherwise ltm."""
    images: int = 256
    """Images to use; a few hundred are enough. Labels are not read."""
    split: str = "val"
    """Split of the data, where it has several."""
    sites: int | None = None
    """Blocks that merge at most. By default 4, or 6 below a share of 0.5, or more if the method's
    own schedule has more and is better. Fewer blocks are faster, and as accurate."""
    adjust: bool | None = None
    """Also choose settings of the method, such as LTM's attended and size_power. By default below a
    share of 0.5. Takes up to 40 more trials."""
    multiple: int | None = None
    """Token counts, prefix included, are multiples of this; by default 8, or 1 if there are few
    tokens."""
    trials: int = 250
    """Schedules to try, those that measure the sensitivity of each block included. A budget in
    milliseconds may take up to four such searches."""
    time_batch: int = 1
    """Batch size for the budget in milliseconds."""
    time_mode: str | None = None
    """How that batch is run: eager, compiled or cudagraph. By default a CUDA graph on a GPU, eager
    elsewhere."""
    batch_size: int | None = None
    """Images at a time; by default 64 on a CPU, 256 on a GPU."""
    memory_bytes: int = 2 << 30
    """Memory for outputs of blocks: a trial then starts at the first block that differs."""
    workers: int = 2
    """Loader processes."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda or cuda:N."""
    seed: int = 0
    """Seed of the search."""

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

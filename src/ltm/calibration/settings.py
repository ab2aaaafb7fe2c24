"""Settings of `ltm.calibrate`. Importing this imports no torch."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from ltm.core.validation import require, require_least


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    """How to search for a schedule. The defaults suit most networks and devices."""

    budget: float | None = None
    """Share of the multiply-adds to keep. Give this or --budget-ms."""
    budget_ms: float | None = None
    """Instead of a share: milliseconds that a batch may take on this device."""
    method: str | None = None
    """How to merge, such as ltm or ltm:weights=uniform; by default the method that the network
    merges with already, or ltm."""
    images: int = 256
    """Images to use; a few hundred are enough. Labels are not read."""
    split: str = "val"
    """Split of the data, where it has several."""
    sites: int | None = None
    """Merge in at most this many blocks. By default 4, or 6 for budgets below 0.5; the method's own
    schedule may have more if it is better. Fewer merging blocks run faster."""
    adjust: bool | None = None
    """Also choose settings of the method, such as LTM's attended and size_power. By default for
    budgets below 0.5."""
    multiple: int | None = None
    """Token counts, prefix included, are multiples of this; by default 8, or 1 for fewer than 64
    tokens."""
    trials: int = 250
    """Schedules to try, including those that measure the sensitivity of each block. A budget in
    milliseconds may take up to four such searches."""
    time_batch: int = 1
    """Batch size for the budget in milliseconds."""
    time_mode: str | None = None
    """How that batch is run: eager, compiled or cudagraph. By default cudagraph on a GPU, eager on
    a CPU."""
    batch_size: int | None = None
    """Images at a time; by default 64 on a CPU, 256 on a GPU."""
    memory_bytes: int = 2 << 30
    """Memory for cached block outputs; a trial then reruns only the blocks that changed."""
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
        budget_ms = self.budget_ms
        require(budget_ms is None or budget_ms > 0, "budget_ms", budget_ms, "positive")
        for name in ("sites", "trials", "time_batch", "multiple", "batch_size"):
            require_least(name, getattr(self, name))
        for name in ("memory_bytes", "workers"):
            require_least(name, getattr(self, name), 0)


def Settings(**values: Any) -> CalibrateSettings:  # noqa: N802 - a class until 0.1.0
    """Take the names of 0.1.0."""
    warnings.warn(
        "ltm.calibration.Settings is deprecated: use ltm.CalibrateSettings, with trials and sites "
        "for num_trials and num_sites",
        DeprecationWarning,
        stacklevel=2,
    )
    return CalibrateSettings(**{name.removeprefix("num_"): v for name, v in values.items()})

"""How to search, and what is refused before it starts. Importing this imports no torch."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MIN_IMAGES = 32
"""Fewer images say more about themselves than about the network."""


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
    sites: int = 4
    """At most so many blocks merge; few are as accurate and faster."""
    multiple: int | None = None
    """Token counts, prefix included, are a multiple of this; by default 8, or 1 where there are
    few tokens."""
    trials: int = 150
    """Schedules to try once it is known what each block minds."""
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
        if self.budget is not None:
            check_budget(self.budget)
        for name in ("sites", "trials", "time_batch", "multiple", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}; it must be at least 1.")


def Settings(**values: Any) -> CalibrateSettings:  # noqa: N802 - a class until 0.1.0
    """Take the names of 0.1.0."""
    warnings.warn(
        "ltm.calibration.Settings is deprecated: use ltm.CalibrateSettings, with trials and sites "
        "for num_trials and num_sites",
        DeprecationWarning,
        stacklevel=2,
    )
    return CalibrateSettings(**{name.removeprefix("num_"): v for name, v in values.items()})


def check_budget(budget: float) -> None:
    """Refuse what is no share."""
    if not 0 < budget <= 1:
        raise ValueError(
            f"budget: got {budget:g}; it is a share of the original's multiply-adds, above 0 and "
            "at most 1."
        )


def check_images(images: Tensor, size: tuple[int, int]) -> None:
    """Refuse images that the network does not take, or too few."""
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(
            f"images: got {tuple(images.shape)} of {images.dtype}; they are normalised, in one "
            "tensor of images x channels x height x width."
        )
    if tuple(images.shape[-2:]) != size:
        raise ValueError(
            f"images: got {images.shape[-2]} x {images.shape[-1]} pixels; the network takes "
            f"{size[0]} x {size[1]} (image_size changes that, where it can be changed)."
        )
    if len(images) < MIN_IMAGES:
        raise ValueError(f"images: got {len(images)}; at least {MIN_IMAGES} are needed.")

"""How to search, and what is refused before it starts."""

from __future__ import annotations

import dataclasses

from torch import Tensor

MIN_IMAGES = 32
"""Fewer images say more about themselves than about the network."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to search. The defaults suit most networks and devices."""

    num_sites: int = 4
    """At most so many blocks merge; few are as accurate and faster."""
    multiple: int | None = None
    """Tokens, prefix included, are a multiple of this; by default 8, or 1 on short sequences."""
    num_trials: int = 150
    """Schedules to try after the sensitivities are known."""
    batch_size: int | None = None
    """Images at a time; by default 64 on a CPU and 256 elsewhere."""
    memory_bytes: int = 2 << 30
    """For the outputs of blocks, so that a trial starts where it differs from earlier ones."""
    time_batch: int = 1
    """Images in a batch that is timed, where the budget is a time."""
    time_mode: str | None = None
    """How it runs: eager, compiled, cudagraph; by default a CUDA graph on GPUs, eager elsewhere."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_sites", "num_trials", "time_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; it must be at least 1.")
        for name in ("multiple", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}; it must be at least 1.")


def check_budget(budget: float) -> None:
    """Refuse what is no share."""
    if not 0 < budget <= 1:
        raise ValueError(
            f"budget: got {budget}; it is a share of the original's multiply-adds, above 0 and at "
            "most 1."
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

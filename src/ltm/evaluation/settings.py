"""Settings of `ltm.evaluate`. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """What is compared, and on which images."""

    methods: tuple[str, ...] = ()
    """Methods to convert to, such as tome,ltm or ltm:support=learned,sites=3,5,8."""
    ratio: float | None = None
    """Share of the multiply-adds that may remain, 0.7 unless given."""
    split: str = "val"
    """Split of the data, where it has several."""
    images: int | None = None
    """Evaluate this many images, spread over the classes, instead of all."""
    statistics: str | None = None
    """Images, as in the data, whose class statistics LTM weighs tokens by; labels are not used.
    Without them LTM weighs tokens by size and attention."""
    bottleneck: bool = True
    """Measure the information bottleneck."""
    beta: float = 10.0
    """Sharpness of the soft class membership."""
    batch_size: int = 64
    """Images per batch and process."""
    workers: int = 2
    """Loader processes."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda or cuda:N."""

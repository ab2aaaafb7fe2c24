"""Settings of `ltm.compress`. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CompressSettings:
    """How to merge, what to choose on images, and what to measure."""

    method: str = "ltm"
    """How to merge, such as ltm or ltm:support=learned,sites=3,5,8."""
    ratio: float = 0.7
    """Share of the multiply-adds that may remain."""
    compare: tuple[str, ...] = ()
    """Other methods to measure beside it, such as tome,tofu,ltmp."""
    calibrate: bool = True
    """Choose the schedule on unlabelled images, where the network and the data allow."""
    calibration_images: int = 256
    """How many; none of them is evaluated. 0 sets none aside."""
    calibration_trials: int = 200
    """Schedules to try in all; Ctrl-C keeps the best so far."""
    finetune_epochs: int = 0
    """Train the mask modules on the training split for so many epochs."""
    time: bool = True
    """Measure latency."""
    time_batches: tuple[int, ...] = (1, 8)
    """Batch sizes to time."""
    bottleneck_images: int = 1000
    """At most so many for the information bottleneck; 0 leaves it out."""
    pictures: str = "data"
    """What the report shows: data, generated, or an image or folder of them."""
    split: str = "val"
    """Split of the data to evaluate on, where it has several."""
    images: int | None = None
    """Evaluate this many images, spread over the classes, instead of all."""
    batch_size: int = 64
    """Images per batch."""
    workers: int = 2
    """Loader processes."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda or cuda:N."""
    seed: int = 0
    """Of calibration and fine-tuning."""

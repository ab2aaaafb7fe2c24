"""Scales: which networks, data, epochs and seeds stand behind the declared tables.

`paper` is the paper's own settings, `small` a few minutes to an hour per table on one GPU, `smoke`
a proof that everything runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ltm.detection.settings import DetectionSettings
from ltm.training.settings import TrainSettings

ScaleName = Literal["paper", "small", "smoke"]


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What the user gives: images, annotations, weights."""

    data: str | None = None
    coco: str | None = None
    weights: str | None = None
    transfer: str | None = None


@dataclass(frozen=True, kw_only=True)
class Network:
    """A backbone of a scale: how it is trained from scratch, and how its mask modules are tuned."""

    label: str
    stands_for: str
    """The paper's network whose numbers stand beside."""
    scratch: TrainSettings
    tune: TrainSettings
    pretrained: bool = False
    """The untouched network is a published one and is not trained here."""
    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    """What a method keeps of the MACs, where it is not the scale's ratio."""


@dataclass(frozen=True, kw_only=True)
class Layered:
    """A network whose transformer blocks a table goes through."""

    network: Network
    num_layers: int


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A backbone of a detector."""

    label: str
    stands_for: str
    name: str
    merges: bool = False
    """There is a row with token merging too."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Everything that the declared tables leave open."""

    name: ScaleName
    seeds: tuple[int, ...]
    """Seeds of rows that take part in a comparison."""
    ratio: float
    peer_ratio: float
    finetune: tuple[Network, ...]
    finetune_epochs: tuple[int, ...]
    scratch: tuple[Network, ...]
    pruning: str | None
    """Label of the network that is pruned, of those in `scratch`."""
    pruning_steps: int
    sweep: Network
    sweep_scratch: Network | None
    ratios: tuple[float, ...]
    scratch_ratios: tuple[float, ...]
    bottleneck: tuple[Network, ...]
    bottleneck_epochs: tuple[int, ...]
    by_layer: Layered
    """Whose bottleneck is told after every layer."""
    layers: Layered
    """Of whose layers one keeps another share."""
    layer_share: float
    """What every layer but one keeps of its tokens."""
    layer_ratios: tuple[float, ...]
    """What that one keeps, in turn."""
    layer_epochs: int
    losses: tuple[Network, ...]
    heatmap: Network
    lora: Network
    transfer: Network
    transfer_tune: TrainSettings
    """How all of a network is trained on other classes."""
    races: tuple[Network, ...]
    batch_sizes: tuple[int, ...]
    table_batch: int
    """Batch of the milliseconds in tables."""
    race_mode: str
    race_dtype: str
    race_rounds: int
    detectors: tuple[Backbone, ...]
    detection: DetectionSettings
    segmenters: tuple[Backbone, ...]
    segmentation: DetectionSettings

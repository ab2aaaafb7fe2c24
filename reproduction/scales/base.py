"""Scales: which networks, data, epochs and seeds stand behind the declared tables.

`paper` is the paper's own settings, `small` a few minutes to an hour per table on one GPU, `smoke`
a proof that everything runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ltm.detection.settings import DetectionSettings
from ltm.training.settings import TrainSettings
from reproduction.jobs import Job, settings_of

ScaleName = Literal["paper", "small", "smoke"]


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What the user gives: images, annotations, weights."""

    data: str | None = None
    imagenet: str | None = None
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


def _papers(label: str, name: str, *, merges: bool = False) -> Backbone:
    return Backbone(label=label, stands_for=label, name=name, merges=merges)


DETECTORS = (
    _papers("MobileNetv3", "mobilenetv3_large_100"),
    _papers("MobileNetv2", "mobilenetv2_100"),
    _papers("MobileNetv1", "mobilenetv1_100"),
    _papers("MixNet", "mixnet_m"),
    _papers("MNASNet", "mnasnet_100"),
    _papers("MobileViT-XS", "mobilevit_xs", merges=True),
    _papers("MobileViT-S", "mobilevit_s", merges=True),
    _papers("EfficientViT", "efficientvit_b1", merges=True),
)
"""The paper's backbones of detectors."""
SEGMENTERS = (
    _papers("EViT", "efficientvit_m4"),
    _papers("EfficientViT-B1", "efficientvit_b1", merges=True),
)
"""The paper's backbones of instance segmentation."""
RATIOS = tuple(round(0.95 - 0.05 * step, 2) for step in range(12))
"""The paper's compression ratios."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Everything that the declared tables leave open; defaults are the paper's."""

    name: ScaleName
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of rows that take part in a comparison."""
    order: tuple[Network, ...] = ()
    """Networks whose rows are run first, in this order."""
    ratio: float = 0.7
    peer_ratio: float = 0.75
    finetune: tuple[Network, ...]
    finetune_epochs: tuple[int, ...]
    scratch: tuple[Network, ...]
    pruning: str | None
    """Label of the network that is pruned, of those in `scratch`."""
    pruning_steps: int
    letter: str | None = None
    """Label of the network, of those in `scratch`, that is trained with the letter's mask, too."""
    sweep: Network
    sweep_scratch: Network | None
    sweep_epochs: int
    """Epochs of fine-tuning for every ratio."""
    ratios: tuple[float, ...] = RATIOS
    scratch_ratios: tuple[float, ...]
    bottleneck: tuple[Network, ...]
    bottleneck_scratch: tuple[Network, ...]
    bottleneck_epochs: tuple[int, ...]
    by_layer: Layered
    """Whose bottleneck is told after every layer."""
    layers: Layered
    """Of whose layers one keeps another share."""
    layer_share: float
    """What every layer but one keeps of its tokens."""
    layer_ratios: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    """What that one keeps, in turn."""
    layer_epochs: int
    layer_seeds: tuple[int, ...] = ()
    """Seeds of that table, whose rows are many; by default all."""
    losses: tuple[Network, ...]
    loss_cycles: int = 2
    """How often networks train, one time after the other; the last time is shown."""
    heatmap: Network
    lora: Network
    transfer: Network
    transfer_tune: TrainSettings
    """How all of a network is trained on other classes."""
    races: tuple[Network, ...]
    batch_sizes: tuple[int, ...] = (1, 8, 32, 128, 512)
    table_batch: int = 128
    """Batch of the milliseconds in tables."""
    race_mode: str = "cudagraph"
    race_dtype: str = "fp16"
    race_rounds: int
    detectors: tuple[Backbone, ...] = DETECTORS
    detection: DetectionSettings
    segmenters: tuple[Backbone, ...] = SEGMENTERS
    segmentation: DetectionSettings

    def turn(self, job: Job) -> int:
        """When a job is run: with the other rows of its network."""
        settings = settings_of(job)
        if settings is None:
            return len(self.order)
        mine = (settings.model.name, settings.data.image_size)
        named = [(n.tune.model.name, n.tune.data.image_size) for n in self.order]
        return named.index(mine) if mine in named else len(named)

    def in_turn(self, jobs: Iterable[Job], networks: Sequence[str] = ()) -> list[Job]:
        """Jobs in the order in which they are run; of some networks alone, if any are named."""
        known = [network.label for network in self.order]
        for name in networks:
            if name not in known:
                raise ValueError(f"networks: got {name!r}; it must be one of {', '.join(known)}")
        turns = [known.index(name) for name in networks] or range(len(known) + 1)
        return sorted((job for job in jobs if self.turn(job) in turns), key=self.turn)

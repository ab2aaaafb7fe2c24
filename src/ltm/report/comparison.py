"""What a report tells: networks side by side, and what they were measured on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ltm.api import conversion_of
from ltm.evaluation.accuracy import PairedDifference
from ltm.evaluation.latency import BASE
from ltm.evaluation.measurement import Measurement
from ltm.evaluation.records import Environment
from ltm.methods.base import Site


@dataclass(frozen=True, kw_only=True)
class BlockChange:
    """One block of the compressed network that merges."""

    block: int
    before: str
    """Tokens that enter: a number, or height x width."""
    after: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A compressed network, its original and its peers, on the same images and machine."""

    title: str
    model: str
    weights: str
    method: str
    """The one that was saved; the other networks are for comparison."""
    ratio: float | None
    data: str
    num_calibration_images: int
    """Unlabelled images that schedules and thresholds were chosen on; none of them is evaluated."""
    finetune_epochs: float
    calibration: dict[str, Any] | None = None
    """The search for the schedule, as `CalibrateResult.to_dict` tells it."""
    seed: int
    command: str
    environment: Environment
    networks: tuple[Measurement, ...]
    lead: dict[str, PairedDifference] = field(default_factory=dict)
    """Accuracy of the compressed network less that of each peer, image by image."""
    blocks: tuple[BlockChange, ...] = ()
    num_blocks: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    """Methods that could not be compared, and why."""
    interrupted: str = ""
    """What was going on when the run was stopped; empty for a complete one."""

    def network(self, method: str) -> Measurement | None:
        """The network of a method, if it was measured."""
        return next((n for n in self.networks if n.method == method), None)

    @property
    def base(self) -> Measurement | None:
        return self.network(BASE)

    @property
    def compressed(self) -> Measurement | None:
        return self.network(self.method)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, networks by method."""
        values = dataclasses.asdict(self)
        values["networks"] = {network["method"]: network for network in values["networks"]}
        values["complete"] = not self.interrupted
        return values


def block_changes(model: nn.Module) -> tuple[BlockChange, ...]:
    """The blocks of a converted model that merge, in words."""
    done = conversion_of(model)
    return tuple(
        BlockChange(block=site.block, **_counts(site), how=done.config.describe(site))
        for site in done.sites
        if site.merges
    )


def _counts(site: Site) -> dict[str, str]:
    if site.grid_in is not None and site.grid_out is not None:
        (h, w), (h2, w2) = site.grid_in, site.grid_out
        return {"before": f"{h} x {w}", "after": f"{h2} x {w2}"}
    return {"before": str(site.num_in), "after": str(site.num_out)}

"""A schedule: which blocks merge, how many tokens they leave, and how they do it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ltm.methods.base import Count, MethodConfig


@dataclass(frozen=True)
class Setting:
    """One site of a schedule."""

    block: int
    count: Count
    """Tokens left, prefix excluded; (height, width) on grids."""
    choice: Hashable = None
    """One of the method's `choices`; None on grids, and where there is none to make."""


Schedule = tuple[Setting, ...]
"""The sites of a network in the order of their blocks; every one merges."""


def counts_of(schedule: Schedule) -> dict[int, Count]:
    """Tokens left after each site, by block."""
    return {setting.block: setting.count for setting in schedule}


def config_of(schedule: Schedule, base: MethodConfig) -> MethodConfig:
    """The schedule as a plain config; everything else is as in `base`."""
    if not schedule:
        return base.unscheduled(1.0)
    return base.scheduled(
        tuple(setting.block for setting in schedule),
        tuple(setting.count for setting in schedule),
        tuple(setting.choice for setting in schedule),
    )

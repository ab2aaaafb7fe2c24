"""A schedule: which blocks merge, how many tokens they leave, and how they do it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ltm.methods.base import Count
from ltm.methods.ltm import LTM
from ltm.methods.ltm.matching import Operator


@dataclass(frozen=True)
class Setting:
    """One site of a schedule."""

    block: int
    count: Count
    """Tokens left, prefix excluded; (height, width) on grids."""
    operator: Operator = "norm"
    protection: float = 1.0


Schedule = tuple[Setting, ...]
"""The sites of a network in the order of their blocks; every one merges."""


def counts_of(schedule: Schedule) -> dict[int, Count]:
    """Tokens left after each site, by block."""
    return {setting.block: setting.count for setting in schedule}


def config_of(schedule: Schedule, base: LTM) -> LTM:
    """The schedule as a plain config; everything else is as in `base`."""
    if not schedule:
        return unscheduled(base, ratio=1.0)
    on_grid = isinstance(schedule[0].count, tuple)
    return dataclasses.replace(
        base,
        ratio=None,
        per_block=None,
        counts=tuple(setting.count for setting in schedule),
        sites=tuple(setting.block for setting in schedule),
        operators=None if on_grid else tuple(setting.operator for setting in schedule),
        protections=None if on_grid else tuple(setting.protection for setting in schedule),
    )


def unscheduled(base: LTM, *, ratio: float, sites: tuple[int, ...] | None = None) -> LTM:
    """`base` without anything that a schedule decides."""
    return dataclasses.replace(
        base,
        ratio=ratio,
        per_block=None,
        counts=None,
        sites=sites,
        operators=None,
        protections=None,
    )

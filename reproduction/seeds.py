"""Several seeds: means, 95% intervals, and differences of rows that share their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch

from ltm.evaluation.accuracy import paired_interval

# Student's t at 97.5% for 1, 2, ... degrees of freedom; beyond these it is close to the last.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean, and a 95% interval where there is more than one value."""

    mean: float
    low: float | None = None
    high: float | None = None
    values: tuple[float, ...] = ()

    @property
    def reach(self) -> float | None:
        """Half the interval's width."""
        return None if self.high is None else self.high - self.mean


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and Student's 95% interval of a few values."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean=mean, values=tuple(values))
    quantile = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
    reach = quantile * stdev(values) / len(values) ** 0.5
    return Estimate(mean=mean, low=mean - reach, high=mean + reach, values=tuple(values))


def image_difference(ours: Sequence[bool], others: Sequence[bool]) -> Estimate:
    """The difference of two networks in per cent, image by image, for want of seeds."""
    found = paired_interval(torch.tensor(ours), torch.tensor(others))
    return Estimate(mean=100 * found.difference, low=100 * found.low, high=100 * found.high)

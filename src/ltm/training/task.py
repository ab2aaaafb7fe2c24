"""A kind of training: its data, network, loss, score, and the columns of its log.

The `Trainer` knows none of these; a `Task` knows no loop, optimiser or checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ltm.data.loading import Loader
from ltm.models import Say
from ltm.processes import sum_over_processes
from ltm.progress import duration
from ltm.training.fabric import Fabric


class Panel(NamedTuple):
    """One diagram of the curves: the label of its axis, and its columns by label."""

    axis: str
    columns: Mapping[str, str]
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One epoch. Shares and scores are from 0 to 1; what does not apply is None."""

    epoch: int
    """The number of the epoch, from 1."""
    merging: bool
    lr: float
    noise: float
    train_loss: float
    train_seconds: float = 0.0
    statistics_seconds: float = 0.0
    val_seconds: float = 0.0
    images_per_second: float = 0.0
    """Training images of all processes."""

    panels: ClassVar[Sequence[Panel]] = ()

    @property
    def score(self) -> float | None:
        """What the best epoch is chosen by; None if this one cannot be the best."""
        raise NotImplementedError

    @property
    def remark(self) -> str:
        """What the next epoch's progress bar says about this one."""
        return ""

    def numbers(self) -> list[str]:
        """What the console shows of the epoch."""
        raise NotImplementedError

    def line(self, epochs: int, seconds_left: float) -> str:
        """The epoch in one line."""
        speed = self.images_per_second
        parts = [f"epoch {self.epoch}/{epochs}", f"loss {self.train_loss:.4f}", *self.numbers()]
        parts += [] if self.merging else ["not merging"]
        parts.append(f"{speed:.0f} images/s" if speed >= 100 else f"{speed:.1f} images/s")
        return "  ".join([*parts, f"{duration(seconds_left)} left"])


class Step(NamedTuple):
    """A step: its epoch, its batch within the epoch (both from 0), and whether tokens merge."""

    epoch: int
    number: int
    merging: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchLoss:
    """The loss of one batch."""

    total: Tensor
    """What gradients come from."""
    logged: Mapping[str, Tensor]
    """What `Means` averages over the epoch."""
    inputs: tuple[Any, ...]
    """What the network was called with."""
    num_images: int


class Means:
    """Means over an epoch; the sums stay on the device, so that no step waits for them."""

    def __init__(self) -> None:
        self.num_images = 0
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, loss: BatchLoss) -> None:
        """Count a batch."""
        self.num_images += loss.num_images
        for name, value in loss.logged.items():
            before = self._sums.get(name, value.new_zeros((), dtype=torch.float32))
            self._sums[name] = before + value.detach()
            self._counts[name] = self._counts.get(name, 0) + 1

    def over_processes(self, world_size: int) -> Means:
        """The sums of all processes."""
        whole = Means()
        whole.num_images = self.num_images * world_size
        sums = sum_over_processes(torch.stack(list(self._sums.values())))
        whole._sums = dict(zip(self._sums, sums, strict=True))
        whole._counts = {name: count * world_size for name, count in self._counts.items()}
        return whole

    def names(self) -> list[str]:
        """What was logged."""
        return list(self._sums)

    def total(self, name: str) -> float:
        """A sum over the epoch."""
        return float(self._sums[name])

    def mean(self, name: str) -> float | None:
        """A mean over the batches that logged it; None where none did."""
        return self.total(name) / self._counts[name] if name in self._sums else None


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """What a task makes of a finished run."""

    metrics: dict[str, Any]
    line: str
    """The result in a few words."""
    write: Callable[[Path], None]
    """Write the network and its other results into a folder."""


class Task(ABC):
    """One kind of training, for one run."""

    settings: Any
    """The task's own; the `Trainer` reads `merge`, `optim`, `run` and `data.batch_size`."""

    row_type: ClassVar[type[EpochRow]]
    """The columns of its log."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def check(self) -> None:  # noqa: B027 - most tasks have nothing to check
        """Raise an error for what would otherwise fail at the end of a run."""

    @abstractmethod
    def open_data(self) -> None:
        """Open the images."""

    @abstractmethod
    def build(self, say: Say) -> nn.Module:
        """Make the network; `say` takes remarks about it. The seed has been set."""

    def rebuild(self) -> nn.Module:
        """Make the network again, for the weights of a sharded one."""
        raise NotImplementedError

    @abstractmethod
    def describe(self, model: nn.Module) -> Iterator[str]:
        """Lines about the network and the data."""

    @abstractmethod
    def start(self, fabric: Fabric, model: nn.Module) -> Loader:
        """Prepare to train the network, which is on its device; returns the training batches."""

    def before_epoch_(self, model: nn.Module) -> bool:
        """Prepare a merging epoch; returns whether buffers of mask modules changed."""
        return False

    def after_epoch_(self, model: nn.Module) -> bool:
        """Complete a merging epoch; returns whether buffers of mask modules changed."""
        return False

    @abstractmethod
    def loss(self, forward: nn.Module, batch: Any, step: Step) -> BatchLoss:
        """The loss of a batch; `forward` may be the network wrapped for several processes."""

    def progress_text(self, means: Means) -> str:
        """What the progress bar shows besides the speed."""
        return ""

    def is_evaluated(self, epoch: int) -> bool:
        """Whether an epoch, from 0, is followed by an evaluation."""
        return True

    @abstractmethod
    def evaluate(self, model: nn.Module) -> Any:
        """Score a network on the held-out images; all processes must call it."""

    @abstractmethod
    def row(self, common: dict[str, Any], means: Means, model: nn.Module, found: Any) -> EpochRow:
        """The epoch's row; `found` is what `evaluate` returned, or None."""

    def keeps_last(self, model: nn.Module) -> bool:
        """Whether the last epoch is kept instead of the best."""
        return False

    @abstractmethod
    def finish_(self, model: nn.Module, kept: EpochRow, rows: Sequence[EpochRow]) -> Outcome:
        """Complete the network that is kept, and return the outcome; all processes must call it."""

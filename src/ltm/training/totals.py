"""Sums of an epoch, and its clock."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ltm.training.fabric import Fabric, total_over_processes
from ltm.training.objective import Losses


class Totals:
    """Sums of an epoch, kept on the device so that steps need not wait."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        self._correct = torch.zeros((), device=device)
        self._share = torch.zeros((), device=device)
        self.num_images = self._batches = self._shares = 0

    def add(self, losses: Losses, labels: Tensor) -> None:
        """Count a batch."""
        with torch.no_grad():
            self.loss += losses.cross_entropy.detach()
            self._correct += (losses.logits.argmax(dim=1) == labels).sum()
            if losses.share is not None:
                self._share += losses.share.detach()
                self._shares += 1
        self.num_images += len(labels)
        self._batches += 1

    def over_processes(self, fabric: Fabric) -> Totals:
        """The sums of all processes."""
        whole = Totals(fabric.device)
        sums = total_over_processes(torch.stack([self.loss, self._correct, self._share]), fabric)
        whole.loss, whole._correct, whole._share = sums.unbind()
        count = fabric.world_size
        whole.num_images, whole._batches = self.num_images * count, self._batches * count
        whole._shares = self._shares * count
        return whole

    @property
    def mean_loss(self) -> float:
        return float(self.loss) / max(1, self._batches)

    @property
    def top1(self) -> float:
        return float(self._correct) / max(1, self.num_images)

    @property
    def share(self) -> float | None:
        return float(self._share) / self._shares if self._shares else None

    def text(self) -> str:
        """What a progress bar shows."""
        return f"loss {self.mean_loss:.3f}  top-1 {100 * self.top1:.1f}"


class Clock:
    """Seconds between laps, work on the device included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        before, self._start = self._start, time.perf_counter()
        return self._start - before

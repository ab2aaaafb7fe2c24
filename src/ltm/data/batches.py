"""Batches on their way from workers to the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from timm.data.loader import PrefetchLoader
from torch import Tensor
from torch.utils.data import DataLoader

from ltm.data.sampling import TrainingSampler
from ltm.data.slots import Slots
from ltm.data.transforms import ImageSpec

T = TypeVar("T")


class Batch(NamedTuple):
    """Images (b c h w), normalised, and class indices (b), on the device."""

    images: Tensor
    labels: Tensor


class Ahead:
    """Training batches whose workers begin the next epoch as soon as one is handed out.

    They work while the network is validated, and an epoch starts without a wait. `more` says
    whether another epoch comes.
    """

    def __init__(self, batches: DataLoader[Any], order: TrainingSampler) -> None:
        self._batches, self._order = batches, order
        self._begun: tuple[int, Iterator[Any]] | None = None
        self.more = False

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        epoch, begun = self._order.epoch, self._begun
        self._begun = None
        yield from begun[1] if begun is not None and begun[0] == epoch else iter(self._batches)
        if self.more:
            self._begin(epoch + 1)

    def _begin(self, epoch: int) -> None:
        chosen = self._order.epoch
        self._order.set_epoch(epoch)
        try:
            self._begun = epoch, iter(self._batches)
        except RuntimeError:
            pass  # a worker died; the epoch at hand is whole, and the next one says so
        finally:
            self._order.set_epoch(chosen)


class Filled:
    """Batches that workers write into slots of shared memory."""

    def __init__(self, batches: DataLoader[Any] | Ahead, slots: Slots) -> None:
        self._batches, self._slots = batches, slots

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._slots.read(self._batches)


class Lookahead(Generic[T]):
    """Batches, of which the next can be fetched while the device works on the one at hand."""

    def __init__(self, batches: Iterable[T]) -> None:
        self._batches = iter(batches)
        self._fetched: list[T] = []
        self._over = False

    def fetch(self) -> None:
        """Have the next batch at hand; does nothing if it is."""
        if not self._fetched and not self._over:
            try:
                self._fetched.append(next(self._batches))
            except StopIteration:
                self._over = True

    def __iter__(self) -> Iterator[T]:
        while True:
            self.fetch()
            if not self._fetched:
                return
            yield self._fetched.pop()


class Normalised:
    """`Batch`es, moved to the device by timm's prefetcher and normalised there."""

    def __init__(
        self,
        batches: DataLoader[Any] | Ahead | Filled,
        spec: ImageSpec,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._batches = PrefetchLoader(
            cast("DataLoader[Any]", batches),
            mean=spec.mean,
            std=spec.std,
            device=device,
            img_dtype=dtype,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for images, labels in self._batches:
            yield Batch(images, labels)


class Moved:
    """Batches of any form, moved to the device as they are."""

    def __init__(self, batches: DataLoader[Any] | Ahead, device: torch.device) -> None:
        self._batches = batches
        self._device = device

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield to_device(batch, self._device)


def to_device(value: Any, device: torch.device) -> Any:
    """Move all tensors within lists, tuples and dicts; leave everything else."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: to_device(part, device) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(part, device) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(part, device) for part in value)
    return value

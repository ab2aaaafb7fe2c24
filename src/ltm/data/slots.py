"""Shared memory for whole batches: workers write into it, the device reads from it.

A batch that a worker hands over by itself is copied twice on its way, into shared memory that is
new each time and into pinned memory, and new memory costs more than an image. Slots are made and
pinned once.
"""

from __future__ import annotations

import operator
import shutil
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, Sampler

from ltm.data.images import require_bytes
from ltm.data.sampling import Draw, TrainingSampler, random_numbers_of

_UNDER_WAY = 4
"""Batches that left their worker and may not have reached the device."""
_SHARED = Path("/dev/shm")  # noqa: S108 - where Linux keeps shared memory


class Slots:
    """Batches of 8-bit images of one size, and their labels."""

    def __init__(
        self, num_batches: int, batch_size: int, size: tuple[int, int], device: torch.device
    ) -> None:
        shape = (num_batches + _UNDER_WAY, batch_size, 3, *size)
        _require_memory(shape)
        self.images = torch.empty(shape, dtype=torch.uint8).share_memory_()
        self.labels = torch.empty(shape[:2], dtype=torch.int64).share_memory_()
        self._device = device
        if device.type == "cuda":
            self._pin_()

    def __len__(self) -> int:
        return self.images.shape[0]

    @property
    def batch_size(self) -> int:
        return self.images.shape[1]

    def _pin_(self) -> None:
        """Let the device read the images by itself; where it cannot, copies take longer."""
        runtime: Any = torch.cuda.cudart()
        start = self.images.data_ptr()
        with torch.cuda.device(self._device):
            if int(runtime.cudaHostRegister(start, self.images.numel(), 0)) == 0:
                weakref.finalize(self, runtime.cudaHostUnregister, start)
                return
            with suppress(RuntimeError):  # the next launch reports the refusal as its own error
                torch.zeros(1, device=self._device).add_(1)
        warnings.warn(
            "shared memory cannot be pinned here: batches take longer to reach the GPU",
            RuntimeWarning,
            stacklevel=2,
        )

    def read(self, filled: Iterable[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of slots that workers have filled, as they come.

        Where workers are P batches ahead, batch k + P is ordered when k is handed out, into the
        slot of k - 4 (there are P + 4). So k - 3 has to be on the device by then: its copy was
        under way, and the device's stream waits for it, when k - 2 was asked for.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # with what is left of an epoch that broke off
        asked: deque[Any] = deque()
        for slot in filled:
            yield self.images[slot], self.labels[slot].clone()
            if self._device.type == "cuda":
                asked.append(torch.cuda.current_stream(self._device).record_event())
                if len(asked) >= _UNDER_WAY - 1:
                    asked.popleft().synchronize()


def _require_memory(shape: Sequence[int]) -> None:
    needed = torch.Size(shape).numel()
    free = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else needed
    if needed > free:
        raise ValueError(
            f"{shape[0]} batches for workers take {needed / 2**20:.0f} MiB of shared memory, of "
            f"which {free / 2**20:.0f} are free; use fewer workers, or a larger --shm-size if this "
            "is a container"
        )


class Order(NamedTuple):
    """Images for a worker to load, and the slot they go to."""

    slot: int
    draws: list[Draw]


class OrderSampler(Sampler[Order]):
    """Whole batches of a sampler, each with the next slot."""

    def __init__(self, order: TrainingSampler, batch_size: int, num_slots: int) -> None:
        self._batches = BatchSampler(cast("Any", order), batch_size, drop_last=True)
        self._turn, self._num_slots = count(), num_slots

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Order]:
        for draws in self._batches:
            yield Order(next(self._turn) % self._num_slots, cast("list[Draw]", draws))


class SlotFiller(Dataset[Any]):
    """A data set that writes whole batches into slots, and names the slot."""

    def __init__(self, dataset: Any, slots: Slots) -> None:
        self._dataset, self._slots = dataset, slots

    def __getitems__(self, order: Order) -> int:
        images, labels = self._slots.images[order.slot], self._slots.labels[order.slot]
        for place, draw in enumerate(order.draws):
            with random_numbers_of(draw.key):
                image, label = self._dataset[draw.index]
            _require_fit(image, images[place])
            images[place] = image
            labels[place] = _class_index(label)
        return order.slot


def _class_index(label: Any) -> int:
    try:
        return operator.index(label)
    except TypeError:
        raise TypeError(f"a label is {label!r}; training needs the index of a class") from None


def _require_fit(image: Any, place: Tensor) -> None:
    require_bytes(image)
    if image.shape != place.shape:
        raise ValueError(
            f"an image of {tuple(image.shape)} is not the {tuple(place.shape)} that spec.size says"
        )

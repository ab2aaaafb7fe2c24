"""Which image comes when, and with which random numbers.

Every training sample carries a key made of the seed, the epoch and its position in the epoch.
Random augmentation is seeded with it. So a run repeats exactly whatever the number of workers, and
needs no state but the epoch's number to be resumed.
"""

import random
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import Sampler, get_worker_info

_MASK = 2**64 - 1
_SMALLEST_ROUND = 256  # timm's, and DeiT's: an epoch of repeats is a multiple of it


class Draw(NamedTuple):
    """An image to load and the key of its random numbers."""

    index: int
    key: int


def make_key(*parts: int) -> int:
    """Mix integers into one of 63 bits; near inputs give unrelated keys (splitmix64)."""
    key = 0
    for part in parts:
        key = (key + part + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key >> 1


@contextmanager
def random_numbers_of(key: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch (CPU) for a while, then put them back."""
    if get_worker_info() is not None:
        # A worker's generators serve nothing else, and putting them back costs as much as seeding.
        _seed(key)
        yield
        return
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    _seed(key)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def _seed(key: int) -> None:
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - what timm's augmentations use
    torch.default_generator.manual_seed(key)


class TrainingSampler(Sampler[Draw]):
    """A new order each epoch, as many images for every process.

    Processes take turns, so that p processes with batches of b see together what one process with
    batches of p x b sees. With repeats, timm's sampler for repeated augmentation chooses.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        repeats: int = 1,
        epoch_images: int = 0,
    ) -> None:
        if epoch_images and repeats > 1:
            raise ValueError(
                f"epoch_images is {epoch_images} and repeats is {repeats}: repeated augmentation "
                "has epochs of its own; leave one of the two out"
            )
        self.seed = seed
        self.epoch = 0
        self._num_images = len(dataset)
        self._drawn = min(epoch_images or len(dataset), len(dataset))
        self._rank = rank
        self._world_size = world_size
        self._repeated = None
        if repeats > 1:
            self._repeated = RepeatAugSampler(
                dataset,
                num_replicas=world_size,
                rank=rank,
                num_repeats=repeats,
                selected_round=_SMALLEST_ROUND if len(dataset) >= _SMALLEST_ROUND else 0,
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self._repeated is not None:
            return len(self._repeated)
        return self._drawn // self._world_size

    def __iter__(self) -> Iterator[Draw]:
        # Fixed now, even if the next epoch is chosen before these draws are used.
        return self._draws(self.epoch, self._indices())

    def _draws(self, epoch: int, indices: list[int]) -> Iterator[Draw]:
        for step, index in enumerate(indices):
            position = step * self._world_size + self._rank
            yield Draw(index, make_key(self.seed, epoch, position))

    def _indices(self) -> list[int]:
        order = make_key(self.seed, self.epoch)
        if self._repeated is not None:
            self._repeated.set_epoch(order)  # it seeds its order with nothing but the epoch
            return list(self._repeated)
        generator = torch.Generator().manual_seed(order)
        indices = torch.randperm(self._num_images, generator=generator)
        return indices[self._rank :: self._world_size][: len(self)].tolist()

"""Tar shards as a stream of samples, shared out among processes and loader workers."""

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ltm.data.sampling import make_key, random_numbers_of
from ltm.data.shards import TarShards

T = TypeVar("T")


class ShardStream(IterableDataset[tuple[Any, int]]):
    """One process's share of tar shards: a contiguous stretch of the shards in shuffled order.

    Workers cut the stretch at whole batches, so that only the last batch can be short, and every
    process trains on as many batches. Repeating a run exactly takes the same number of workers.
    """

    def __init__(
        self,
        shards: TarShards,
        *,
        batch_size: int,
        training: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle_buffer: int = 1000,
    ) -> None:
        self._shards = shards
        self._batch_size = batch_size
        self._training = training
        self._seed = seed
        self._shuffle_buffer = shuffle_buffer
        # Shared, as workers that outlive an epoch hold copies of everything else.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        total = len(shards)
        if training:
            share = total // world_size // batch_size * batch_size
            self._start, self._stop = rank * share, (rank + 1) * share
        else:
            self._start, self._stop = (total * side // world_size for side in (rank, rank + 1))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        start, stop = self._stretch(number, workers)
        epoch = int(self._epoch)
        if not self._training:
            order = range(len(self._shards.paths))
            return self._shards.decode(self._shards.samples(order, start, stop))
        # The order of the shards is every process's, the buffer's is this stretch's own.
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._shards.paths))
        samples = self._shards.samples(order.tolist(), start, stop)
        rng = np.random.default_rng([self._seed, epoch, start])
        mixed = shuffled(samples, self._shuffle_buffer, rng)
        return self._seeded(self._shards.decode(mixed), epoch, start)

    def _stretch(self, number: int, workers: int) -> tuple[int, int]:
        batches = -(-len(self) // self._batch_size)
        first, last = (batches * side // workers for side in (number, number + 1))
        start = self._start + first * self._batch_size
        return start, min(self._start + last * self._batch_size, self._stop)

    def _seeded(self, items: Iterator[T], epoch: int, start: int) -> Iterator[T]:
        place = start
        while True:
            with random_numbers_of(make_key(self._seed, epoch, place)):
                item = next(items, None)
            if item is None:
                return
            yield item
            place += 1


def shuffled(items: Iterator[T], buffer_size: int, rng: np.random.Generator) -> Iterator[T]:
    """Shuffle a stream within a buffer: each item out is a random one of those waiting."""
    waiting: list[T] = []
    for item in items:
        if len(waiting) < buffer_size:
            waiting.append(item)
            continue
        place = int(rng.integers(buffer_size))
        yield waiting[place]
        waiting[place] = item
    for place in rng.permutation(len(waiting)).tolist():
        yield waiting[place]

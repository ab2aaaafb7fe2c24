"""Batches for networks: deterministic, on the device, with the next one under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from ltm.data.batches import Ahead, Filled, Moved, Normalised
from ltm.data.classification import LabelledImages
from ltm.data.config import AugmentConfig, DataConfig
from ltm.data.images import (
    UnreadableImages,
    UnreadableImagesError,
    require_bytes,
    require_tensor,
)
from ltm.data.resident import Resident
from ltm.data.sampling import Draw, EvaluationSampler, TrainingSampler, random_numbers_of
from ltm.data.shards import TarShards
from ltm.data.slots import OrderSampler, SlotFiller, Slots
from ltm.data.streaming import ShardStream
from ltm.data.transforms import ImageSpec, evaluation_transform, training_transform

_UNCHANGED = ImageSpec(mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))
_PREFETCHED_BATCHES = 4  # per worker
_PREFETCHED_SLOTS = 2  # they hold their memory all the time

T = TypeVar("T")
Collate = Callable[[Sequence[Any]], Any]


class Loader:
    """Batches of one process's share of a data set, the same ones whenever an epoch comes again.

    Call `set_epoch` before each training epoch; a resumed run needs nothing else. Images that
    workers could not read are reported here, in the main process, once each.
    """

    def __init__(
        self,
        batches: Normalised | Moved | Resident,
        dataset: Any,
        order: TrainingSampler | EvaluationSampler | ShardStream,
        ahead: Ahead | None = None,
    ) -> None:
        self.dataset = dataset
        self._batches = batches
        self._order = order
        self._ahead = ahead

    def set_epoch(self, epoch: int, *, more: bool = False) -> None:
        """Choose the epoch whose order and random numbers come next.

        Where `more` follow, workers begin the one after it when it has been handed out.
        """
        if not isinstance(self._order, EvaluationSampler):
            self._order.set_epoch(epoch)
        if self._ahead is not None:
            self._ahead.more = more

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        unreadable: UnreadableImages | None = getattr(self.dataset, "unreadable", None)
        if unreadable is None:
            yield from self._batches
            return
        try:
            for batch in self._batches:
                unreadable.report()
                yield batch
        except UnreadableImagesError:
            unreadable.check()  # the same error, without a worker's traceback in its message
            raise


def build_loader(
    dataset: LabelledImages | Dataset[Any],
    *,
    batch_size: int,
    workers: int = 0,
    training: bool = False,
    seed: int = 0,
    spec: ImageSpec | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    world_size: int = 1,
    shuffle: bool = True,
    repeats: int = 1,
    epoch_images: int = 0,
    shuffle_buffer: int = 1000,
    collate: Collate | None = None,
) -> Loader:
    """Load batches of this process's share of a data set.

    Training takes shuffled images in whole batches, as many for each process; evaluation takes
    every image once, in order. Evaluation shares may be uneven: reduce sums, not means.

    Args:
        dataset: Items `(image, label)`; or anything, with a `collate` of its own.
        batch_size: Images per batch and process.
        workers: Loader processes; 0 loads in this one. The same batches come out either way.
        training: Whether to shuffle, to seed random transforms, and to drop a short last batch.
        seed: Decides, with the epoch, the order and the random transforms.
        spec: The size of 8-bit images, and their normalisation, done on the device; None passes
            images on as they are, in `dtype`.
        device: Where batches go. For CUDA, memory is pinned and the copy overlaps computation.
        dtype: Type of the images on the device.
        rank: This process's number among `world_size`.
        world_size: Number of processes that share the data set.
        shuffle: Whether training shuffles.
        repeats: How often training repeats each image it draws (repeated augmentation).
        epoch_images: How many images a training epoch draws; 0 for all.
        shuffle_buffer: Images per worker to shuffle among; for tar shards only.
        collate: Makes a batch of a list of items; batches are then moved to the device as they
            are, tensors in lists, tuples and dicts included.
    """
    device = torch.device(device)
    place = {"seed": seed, "rank": rank, "world_size": world_size}
    items: Any = dataset
    if isinstance(dataset, TarShards):
        if repeats > 1 or epoch_images:
            raise ValueError(
                "tar shards are read in sequence, and whole; use repeats=1 and epoch_images=0"
            )
        order = items = ShardStream(
            dataset,
            batch_size=batch_size,
            training=training,
            shuffle_buffer=shuffle_buffer if shuffle else 1,
            **place,
        )
    elif training:
        order = TrainingSampler(
            dataset,  # pyright: ignore[reportArgumentType]
            shuffle=shuffle,
            repeats=repeats,
            epoch_images=epoch_images,
            **place,
        )
        _require_batch(len(order) // batch_size, len(order), batch_size)
        if workers and spec is not None and collate is None:
            slots = Slots(workers * _PREFETCHED_SLOTS, batch_size, spec.size, device)
            batches = _filled(slots, dataset, order, workers)
            ahead = Ahead(batches, order)
            ready = Normalised(Filled(ahead, slots), spec, device, dtype)
            return Loader(ready, dataset, order, ahead)
        items = _SeededItems(dataset)
    else:
        order = EvaluationSampler(dataset, rank=rank, world_size=world_size)  # pyright: ignore[reportArgumentType]
    batches = DataLoader(
        items,
        batch_size=batch_size,
        sampler=None if isinstance(order, ShardStream) else order,
        drop_last=training,
        collate_fn=collate or (_collate if spec is None else _collate_bytes),
        pin_memory=device.type == "cuda" and torch.cuda.is_available(),
        **_workers(workers, seed),
    )
    ahead = Ahead(batches, order) if workers and isinstance(order, TrainingSampler) else None
    source = ahead or batches
    if training and isinstance(order, ShardStream):
        _require_batch(len(batches), len(order), batch_size)
    if collate is not None:
        return Loader(Moved(source, device), dataset, order, ahead)
    return Loader(Normalised(source, spec or _UNCHANGED, device, dtype), dataset, order, ahead)


def _filled(slots: Slots, dataset: Any, order: TrainingSampler, workers: int) -> DataLoader[Any]:
    """Batches of images of one size, which workers write where the device reads them."""
    return DataLoader(
        SlotFiller(dataset, slots),
        batch_sampler=cast("Any", OrderSampler(order, slots.batch_size, len(slots))),
        collate_fn=_as_it_is,
        **_workers(workers, order.seed, _PREFETCHED_SLOTS),
    )


def _workers(number: int, seed: int, prefetched: int = _PREFETCHED_BATCHES) -> dict[str, Any]:
    return {
        "num_workers": number,
        "persistent_workers": number > 0,
        "prefetch_factor": prefetched if number else None,
        # Its own, so that starting an epoch leaves the global generator alone.
        "generator": torch.Generator().manual_seed(seed),
    }


def _as_it_is(batch: T) -> T:
    return batch


def training_loader(
    dataset: LabelledImages,
    spec: ImageSpec,
    config: DataConfig,
    augment: AugmentConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world_size: int = 1,
) -> Loader:
    """Load a data set for training, augmented; Mixup is `transforms.BatchMixup`'s, afterwards."""
    if config.resident:
        order = TrainingSampler(
            dataset,
            seed=seed,
            rank=rank,
            world_size=world_size,
            repeats=augment.repeats,
            epoch_images=config.epoch_images,
        )
        return _resident(dataset, order, spec, config, augment=augment, device=device)
    return build_loader(
        dataset.with_transform(training_transform(spec, augment)),
        batch_size=config.batch_size,
        workers=config.workers,
        training=True,
        seed=seed,
        spec=spec,
        device=device,
        rank=rank,
        world_size=world_size,
        repeats=augment.repeats,
        epoch_images=config.epoch_images,
        shuffle_buffer=config.shuffle_buffer,
    )


def evaluation_loader(
    dataset: LabelledImages,
    spec: ImageSpec,
    config: DataConfig,
    *,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world_size: int = 1,
) -> Loader:
    """Load a data set for evaluation: every image once, resized and cropped as timm does."""
    if config.resident:
        chosen = EvaluationSampler(dataset, rank=rank, world_size=world_size)
        return _resident(dataset, chosen, spec, config, augment=None, device=device)
    return build_loader(
        dataset.with_transform(evaluation_transform(spec)),
        batch_size=config.batch_size,
        workers=config.workers,
        spec=spec,
        device=device,
        rank=rank,
        world_size=world_size,
    )


def _resident(
    dataset: LabelledImages,
    order: TrainingSampler | EvaluationSampler,
    spec: ImageSpec,
    config: DataConfig,
    *,
    augment: AugmentConfig | None,
    device: torch.device | str,
) -> Loader:
    size, where = config.batch_size, torch.device(device)
    batches = Resident(dataset, order, spec, augment, batch_size=size, device=where)
    if augment is not None:
        _require_batch(len(batches), len(order), size)
    return Loader(batches, dataset, order)


def _require_batch(num_batches: int, num_images: int, batch_size: int) -> None:
    if num_batches == 0:
        raise ValueError(
            f"{num_images} images for each process do not fill a batch of {batch_size}; "
            "use a smaller batch_size or more images"
        )


class _SeededItems(Dataset[Any]):
    """Items of a data set whose random transforms depend on the draw's key alone."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, draw: Draw) -> Any:
        with random_numbers_of(draw.key):
            return self._dataset[draw.index]


def _collate(items: Sequence[Any]) -> Any:
    require_tensor(items[0][0])
    return default_collate(list(items))


def _collate_bytes(items: Sequence[Any]) -> Any:
    require_bytes(items[0][0])
    return default_collate(list(items))

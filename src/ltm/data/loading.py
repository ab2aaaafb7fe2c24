"""Batches for networks: deterministic, on the device, with the next one under way.

torch's `DataLoader` makes batches of 8-bit images in worker processes; timm's `PrefetchLoader`
copies the next one to the device while the network works on the last, and normalises it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from timm.data.loader import PrefetchLoader
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, default_collate

from ltm.data.config import AugmentConfig, DataConfig
from ltm.data.images import ImageDataset, UnreadableImages, UnreadableImagesError
from ltm.data.sampling import Draw, TrainingSampler, random_numbers_of
from ltm.data.transforms import ImageSpec, evaluation_transform, training_transform

T = TypeVar("T")


class Batch(NamedTuple):
    """Images (b c h w), normalised, and class indices (b), on the device."""

    images: Tensor
    labels: Tensor


class Loader:
    """Batches of one process's share of a data set, the same ones whenever an epoch comes again.

    Call `set_epoch` before each training epoch; a resumed run needs nothing else. Images that
    workers could not read are reported here, in the main process, once each.
    """

    def __init__(
        self,
        batches: DataLoader[Any] | PrefetchLoader,
        finish: Callable[[Any], Any],
        dataset: Any,
        order: TrainingSampler | range,
    ) -> None:
        self.dataset = dataset
        self._batches = batches
        self._finish = finish
        self._order = order

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order and random numbers come next."""
        if isinstance(self._order, TrainingSampler):
            self._order.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        unreadable: UnreadableImages | None = getattr(self.dataset, "unreadable", None)
        try:
            for batch in self._batches:
                if unreadable is not None:
                    unreadable.report()
                yield self._finish(batch)
        except UnreadableImagesError as error:
            if unreadable is not None:
                # The same error, without a worker's traceback in its message.
                unreadable.check(error.__cause__)
            raise


class Lookahead(Generic[T]):
    """Batches; the next one can be fetched while the device works on the current one."""

    def __init__(self, batches: Iterable[T]) -> None:
        self._batches = iter(batches)
        self._fetched: list[T] = []
        self._over = False

    def fetch(self) -> None:
        """Fetch the next batch, unless that is done."""
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


def build_loader(
    dataset: Dataset[Any],
    *,
    batch_size: int,
    workers: int = 0,
    training: bool = False,
    seed: int = 0,
    spec: ImageSpec | None = None,
    collate: Callable[[Sequence[Any]], Any] | None = None,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world_size: int = 1,
    repeats: int = 1,
    epoch_images: int = 0,
) -> Loader:
    """Load batches of this process's share of a data set.

    Training takes shuffled images in whole batches, as many for each process; evaluation takes
    every image once, in order. Evaluation shares may be uneven: reduce sums, not means.

    Args:
        dataset: Items `(image, label)` with 8-bit images; or anything, with a `collate`.
        batch_size: Images per batch and process.
        workers: Loader processes; 0 loads in this one. The same batches come out either way.
        training: Whether to shuffle, to seed random transforms, and to drop a short last batch.
        seed: Decides, with the epoch, the order and the random transforms.
        spec: How images are normalised, on the device; the default is ImageNet's normalisation.
        collate: Makes a batch of a list of items; batches are then moved to the device as they
            are, tensors in lists, tuples and dicts included, and `spec` is not used.
        device: Where batches go. For CUDA, memory is pinned and the copy overlaps computation.
        rank: This process's number among `world_size`.
        world_size: Number of processes that share the data set.
        repeats: How often training repeats each image it draws (repeated augmentation).
        epoch_images: How many images a training epoch draws; 0 for all.
    """
    device = torch.device(device)
    items: Any = dataset
    order: TrainingSampler | range = range(rank, len(items), world_size)
    if training:
        order = TrainingSampler(
            items,
            seed=seed,
            rank=rank,
            world_size=world_size,
            repeats=repeats,
            epoch_images=epoch_images,
        )
        if len(order) < batch_size:
            raise ValueError(
                f"{len(order)} images for each process do not fill a batch of {batch_size}; "
                "use a smaller batch_size or more images"
            )
        items = _SeededItems(dataset)
    batches = DataLoader(
        items,
        batch_size=batch_size,
        sampler=order,
        drop_last=training,
        collate_fn=collate or _collate,
        pin_memory=device.type == "cuda" and torch.cuda.is_available(),
        num_workers=workers,
        persistent_workers=workers > 0,
        # Its own, so that starting an epoch leaves the global generator alone.
        generator=torch.Generator().manual_seed(seed),
    )
    if collate is not None:
        return Loader(batches, partial(to_device, device=device), dataset, order)
    spec = spec or ImageSpec()
    normalised = PrefetchLoader(batches, mean=spec.mean, std=spec.std, device=device)
    return Loader(normalised, Batch._make, dataset, order)


def training_loader(
    dataset: ImageDataset,
    spec: ImageSpec,
    config: DataConfig,
    augment: AugmentConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world_size: int = 1,
) -> Loader:
    """Load augmented images for training; `transforms.BatchMixup` mixes the batches later."""
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
    )


def evaluation_loader(
    dataset: ImageDataset,
    spec: ImageSpec,
    config: DataConfig,
    *,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world_size: int = 1,
) -> Loader:
    """Load a data set for evaluation: every image once, resized and cropped as timm does."""
    return build_loader(
        dataset.with_transform(evaluation_transform(spec)),
        batch_size=config.batch_size,
        workers=config.workers,
        spec=spec,
        device=device,
        rank=rank,
        world_size=world_size,
    )


def to_device(value: Any, device: torch.device) -> Any:
    """Move all tensors within lists, tuples and dicts; leave everything else."""
    return tree_map_only(Tensor, lambda found: found.to(device, non_blocking=True), value)


class _SeededItems(Dataset[Any]):
    """Items of a data set whose random transforms depend on the draw's key alone."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, draw: Draw) -> Any:
        with random_numbers_of(draw.key):
            return self._dataset[draw.index]


def _collate(items: Sequence[Any]) -> Any:
    image = items[0][0]
    if not isinstance(image, Tensor):
        raise TypeError(
            f"images are {type(image).__name__}; give the data set a transform to tensors"
        )
    if image.dtype != torch.uint8:
        raise TypeError(f"images are {image.dtype} but would be normalised; use 8-bit ones")
    return default_collate(list(items))

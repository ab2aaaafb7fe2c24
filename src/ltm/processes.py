"""One or several processes: each measures its share of the images, and all get all rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")


class Process(NamedTuple):
    """This process's number among all that work together."""

    rank: int = 0
    world_size: int = 1


ALONE = Process()


def is_first() -> bool:
    """Whether this process prints and writes for all that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined(device: torch.device) -> Iterator[Process]:
    """Join the processes that torchrun started; a process of its own joins nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, number = next(distributed.rendezvous("env://"))
    # torch's launcher keeps its store when it restarts processes; names of the dead are in it.
    store = distributed.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=number)
    try:
        yield Process(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()


def local_device(name: str) -> torch.device:
    """The device by name; "auto" prefers CUDA. Processes of torchrun are spread over the GPUs."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {name}, but no CUDA device is available: use --device cpu")
    if name == "cuda":
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name}: auto, cpu, cuda or cuda:N is needed") from error
    number = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= number:
        raise ValueError(f"device is {name}, but the CUDA devices are cuda:0 to cuda:{number - 1}")
    return device


def gather_rows(rows: Tensor) -> Tensor:
    """All processes' rows, in the order of their ranks; each may have another number of rows."""
    if not _together():
        return rows
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.zeros_like(count) for _ in range(distributed.get_world_size())]
    distributed.all_gather(counts, count)
    sizes = [int(size) for size in counts]
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    everybody = [torch.zeros_like(padded) for _ in sizes]
    distributed.all_gather(everybody, padded)
    return torch.cat([part[:size] for part, size in zip(everybody, sizes, strict=True)])


def gather_objects(value: T) -> list[T]:
    """All processes' values, in the order of their ranks."""
    if not _together():
        return [value]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def sum_over_processes(values: Tensor) -> Tensor:
    """The sum of all processes' tensors."""
    if _together():
        values = values.clone()
        distributed.all_reduce(values)
    return values


class OtherProcessError(ValueError):
    """An error of another process, which this one raises too."""


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise an error of one process in all of them, so that none waits forever for the others."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        if not _together():
            raise
        error = caught
    if not _together():
        return
    said = gather_objects(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, problem in enumerate(said):
        if problem is not None:
            raise OtherProcessError(f"process {rank}: {problem}")


def require_images(num_images: int, device: torch.device) -> None:
    """Stop all processes with one error where any of them has no images."""
    least = torch.tensor([num_images], device=device)
    if _together():
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
    if int(least) == 0:
        raise ValueError(
            "one of the processes has no images" if _together() else "there are no images"
        )


def _together() -> bool:
    return distributed.is_available() and distributed.is_initialized()

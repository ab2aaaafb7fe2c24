"""Lightning Fabric for a run: one process, several, or several machines through torchrun."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from timm.layers import convert_sync_batchnorm
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ltm.adapters.blocks import MergingMixin
from ltm.interruption import stepwise
from ltm.training.settings import RunSettings

if TYPE_CHECKING or find_spec("lightning") is not None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
else:  # pytorch-lightning brings the same under another name
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

T = TypeVar("T")

_KINDS = ("auto", "cpu", "cuda", "mps")
_PRECISIONS: dict[str, Any] = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}


def make_fabric(settings: RunSettings) -> Fabric:
    """The Fabric of a run; torchrun's environment tells the number of processes."""
    on_cuda = torch.cuda.is_available()
    kind, _, index = settings.device.partition(":")
    if kind not in _KINDS or (index and not index.isdecimal()):
        raise ValueError(f"device is {settings.device}: auto, cpu, cuda, cuda:N or mps is needed")
    if kind == "cuda" and not on_cuda:
        raise ValueError("device is cuda, but this machine has none that torch can use")
    if settings.precision == "16" and (kind == "cpu" or not on_cuda):
        raise ValueError("precision is 16, which needs a GPU; use bf16 or 32 on a CPU")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", settings.devices))
    if index and local > 1:
        raise ValueError(f"device is {settings.device}, but there are {local} processes: use cuda")
    total = int(os.environ.get("WORLD_SIZE", local))
    return Fabric(
        accelerator=kind,
        devices=[int(index)] if index else local,
        num_nodes=max(1, total // local),
        strategy=_strategy(settings, total),
        precision=_PRECISIONS[settings.precision],
    )


def _strategy(settings: RunSettings, num_processes: int) -> Any:
    if settings.strategy == "fsdp":
        return ModelParallelStrategy(
            _shard_, data_parallel_size=num_processes, tensor_parallel_size=1
        )
    if num_processes == 1:
        return "auto"
    # Mask modules get no gradient while nothing merges, or before there are class statistics.
    # No buffers are synchronised: class statistics are equal, and running ones averaged, by us.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DDPStrategy(find_unused_parameters=True, **{buffers: False})  # type: ignore[arg-type]


def _shard_(model: nn.Module, mesh: Any) -> nn.Module:
    """Shard a network block by block (FSDP2), inner blocks first."""
    for module in reversed(list(model.modules())):
        if isinstance(module, MergingMixin) or type(module).__name__.endswith("Block"):
            fully_shard(module, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def placed(model: nn.Module, fabric: Fabric, settings: RunSettings) -> nn.Module:
    """The model on its device, in its memory layout, with synchronised batch normalisation."""
    model = fabric.to_device(model)
    if settings.sync_batchnorm and fabric.world_size > 1 and fabric.device.type == "cuda":
        model = convert_sync_batchnorm(model)
    if settings.channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return model


@torch.no_grad()
def average_running_statistics_(model: nn.Module, fabric: Fabric) -> None:
    """Average the running statistics of batch normalisation over the processes."""
    if fabric.world_size == 1:
        return
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001
            for buffer in (module.running_mean, module.running_var):
                if buffer is not None:
                    buffer.copy_(fabric.all_reduce(buffer, reduce_op="mean"))  # type: ignore[arg-type]


def in_step(batches: Sequence[T] | Any, fabric: Fabric) -> Iterator[tuple[T, bool]]:
    """Batches, and whether each counts.

    Processes may have different numbers of batches. A sharded network runs only in all processes
    at once: there, processes that are done repeat a batch that does not count.
    """
    if not isinstance(fabric.strategy, ModelParallelStrategy):
        yield from ((batch, True) for batch in stepwise(batches))
        return
    count = torch.tensor(len(batches), device=fabric.device)
    most = int(fabric.all_reduce(count, reduce_op="max"))  # type: ignore[arg-type]
    batch = None
    for batch in stepwise(batches):
        yield batch, True
    for _ in range(most - int(count)):
        if batch is not None:
            yield batch, False


@contextmanager
def first_alone(fabric: Fabric) -> Iterator[bool]:
    """Let the first process work while the others wait."""
    try:
        yield fabric.is_global_zero
    finally:
        fabric.barrier()

"""One process of a small gloo group, importable by the processes that tests spawn."""

from pathlib import Path

import torch
from torch import Tensor, distributed

from ltm.core.bottleneck import ClassStatistics, class_membership


def collect(batch: dict[str, Tensor], num_classes: int, beta: float) -> ClassStatistics:
    """Two passes over a shard: sums, then memberships against the centroids of all shards."""
    first = ClassStatistics.zeros(num_classes, batch["features"].shape[1])
    inputs = ClassStatistics.zeros(num_classes, batch["inputs"].shape[1])
    first.update(batch["features"], batch["labels"])
    inputs.update(batch["inputs"], batch["labels"])
    first, inputs = first.all_reduce(), inputs.all_reduce()
    second = ClassStatistics.zeros(num_classes, batch["features"].shape[1])
    second.update(
        batch["features"],
        batch["labels"],
        class_membership(batch["features"], first.centroids(), beta, first.present),
        class_membership(batch["inputs"], inputs.centroids(), beta, inputs.present),
    )
    return second.all_reduce()


def run(rank: int, folder: str, bounds: list[int], num_classes: int, beta: float) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=len(bounds) - 1,
    )
    data: dict[str, Tensor] = torch.load(Path(folder) / "data.pt")
    shard = {name: value[bounds[rank] : bounds[rank + 1]] for name, value in data.items()}
    torch.save(collect(shard, num_classes, beta).state(), Path(folder) / f"rank{rank}.pt")
    distributed.destroy_process_group()

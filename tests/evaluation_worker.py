"""Processes of a small gloo group that evaluate shards, and what they evaluate."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn

import ltm
from ltm.api import mergers
from ltm.evaluation.accuracy import evaluate, summarise
from ltm.evaluation.bottleneck import measure_bottleneck


class Scripted(nn.Module):
    """Says what channel `channel` of an image `2 1 c` says."""

    def __init__(self, channel: int) -> None:
        super().__init__()
        self.channel = channel
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, images: Tensor) -> Tensor:
        return self.scale * images[:, self.channel, 0]


def accuracy(batches: list[Any]) -> object:
    outputs = evaluate({"a": Scripted(0), "b": Scripted(1)}, batches, original="a")
    return summarise(outputs["b"])


def bottleneck(batches: list[Any]) -> object:
    return measure_bottleneck({"vit": small_vit()}, batches, 3, beta=5.0)


def statistics(batches: list[Any]) -> object:
    """What every site learns from class statistics, flat."""
    model = small_vit()
    ltm.merge_tokens_(model, ltm.LTM(sites=(1,), counts=(10,)))
    ltm.collect_statistics_(model, batches)
    learned = [merger.state_dict() for _, merger in mergers(model)]
    return [float(value) for state in learned for x in state.values() for value in x.flatten()]


def small_vit() -> nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=3, embed_dim=24, num_heads=2, num_classes=3
    ).eval()


JOBS = {"accuracy": accuracy, "bottleneck": bottleneck, "statistics": statistics}

Job = tuple[str, dict[str, Tensor], tuple[int, ...]]
"""What to do, the images and labels of all processes, and how many each of them gets."""


def in_processes(jobs: list[Job], folder: Path) -> list[list[Any]]:
    """By job, what each of the processes returned, or the error that it stopped with."""
    torch.save(jobs, folder / "jobs.pt")
    num_processes = len(jobs[0][2])
    multiprocessing.spawn(_work, args=(str(folder), num_processes), nprocs=num_processes)
    results = [
        torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(num_processes)
    ]
    return [list(answers) for answers in zip(*results, strict=True)]


def batches_of(data: dict[str, Tensor], start: int, count: int) -> list[Any]:
    parts = [value[start : start + count].split(4) for value in data.values()]
    return [batch for batch in zip(*parts, strict=True) if len(batch[0])]


def _work(rank: int, folder: str, num_processes: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_processes
    )
    jobs: list[Job] = torch.load(Path(folder) / "jobs.pt")
    answers = []
    for name, data, sizes in jobs:
        try:
            answers.append(JOBS[name](batches_of(data, sum(sizes[:rank]), sizes[rank])))
        except ValueError as error:
            answers.append(str(error))
    torch.save(answers, Path(folder) / f"rank{rank}.pt")
    distributed.destroy_process_group()

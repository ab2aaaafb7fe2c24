"""What a job runs with (folders, device, processes), and the dispatch to how each kind is run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from reproduction.jobs import Job
from reproduction.rows import Store


@dataclass(frozen=True, eq=False, kw_only=True)
class Context:
    """The output folder and the device that jobs run with."""

    store: Store
    device: torch.device
    workers: int = 0
    """Loader processes."""
    devices: int = 1
    """Processes that train together, one per device."""
    console: Console
    exclusive: bool = True
    """If True, running out of memory is an error; otherwise the row is run again later."""
    deadline: float = math.inf
    """When no further row is begun, in seconds since 1970."""

    def work(self, job: Job) -> Path:
        """The job's own folder for what can be made again."""
        folder = self.store.work_folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def has_network(self, job: Job) -> bool:
        """Whether the network of a job is still there."""
        return self.store.network_folder(job).is_dir()


@singledispatch
def perform(job: Job, _context: Context) -> dict[str, Any]:
    """Run a job; returns its raw values. Every kind of job registers its own way."""
    raise ValueError(f"no way is known to run a {job.kind}")

"""What can be run: frozen values, named by what they say.

Two jobs that say the same are one job, whoever asks for it. Where it runs is no part of that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any, ClassVar, Literal

from ltm.detection.settings import DetectionSettings
from ltm.training.network import method_config
from ltm.training.settings import MergeSettings, TrainSettings

_ELSEWHERE = {
    "device", "devices", "strategy", "workers", "keep_every", "channels_last", "eval_batch_size",
}  # fmt: skip
"""Settings of the machine, which say nothing about the result."""
_PATHS = {"source", "weights", "annotations", "val_annotations"}
"""Settings that name files: the name counts, not the folder."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One thing to run. What it leaves is a row of raw values."""

    kind: ClassVar[str] = "job"

    def needs(self) -> tuple[Job, ...]:
        """Jobs whose networks this one starts from."""
        return ()

    @property
    def leaves_network(self) -> bool:
        """Whether other jobs can start from it."""
        return False


@dataclass(frozen=True, kw_only=True)
class Classifier(Job):
    """A classifier, trained or only converted, and its accuracy on held-out images."""

    kind: ClassVar[str] = "classifier"

    settings: TrainSettings
    start: Job | None = None
    """The job whose network it starts from; otherwise what the settings say."""
    trains: bool = True
    layer: tuple[int, float] | None = None
    """One site (from 0) that keeps another share of its tokens than `per_block`."""
    sites_of: MergeSettings | None = None
    """Merge in the blocks where this method would, and keep as many tokens in each."""

    def needs(self) -> tuple[Job, ...]:
        return () if self.start is None else (self.start,)

    @property
    def leaves_network(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Bottleneck(Job):
    """The information bottleneck of a network, block by block, on held-out images."""

    kind: ClassVar[str] = "bottleneck"

    of: Classifier
    epoch: int | None = None
    """After how many epochs of its training; by default the last."""

    def needs(self) -> tuple[Job, ...]:
        return (self.of,)


@dataclass(frozen=True, kw_only=True)
class Race(Job):
    """Networks timed in interleaved rounds on the same images."""

    kind: ClassVar[str] = "race"

    entrants: tuple[tuple[str, Classifier], ...]
    batch_size: int
    mode: str = "eager"
    dtype: str = "fp32"
    rounds: int = 15

    def needs(self) -> tuple[Job, ...]:
        return tuple(job for _, job in self.entrants)


@dataclass(frozen=True, kw_only=True)
class Heatmap(Job):
    """Merge weights of networks over the same images, at their first merging block."""

    kind: ClassVar[str] = "heatmap"

    entrants: tuple[tuple[str, Classifier], ...]
    num_images: int = 4

    def needs(self) -> tuple[Job, ...]:
        return tuple(job for _, job in self.entrants)


@dataclass(frozen=True, kw_only=True)
class Detector(Job):
    """A detector, trained, and its average precision."""

    kind: ClassVar[str] = "detector"

    settings: DetectionSettings


@dataclass(frozen=True, kw_only=True)
class Pruned(Job):
    """A classifier, pruned by a peer to a share of its MACs, then trained on."""

    kind: ClassVar[str] = "pruned"

    settings: TrainSettings
    start: Job
    peer: Literal["s2vite", "spvit", "savit"]
    share: float
    steps: int = 200
    """Steps of the search for what to prune."""

    def needs(self) -> tuple[Job, ...]:
        return (self.start,)


@cache
def identity(job: Job) -> str:
    """The name of a job: its kind, and a hash of all that it says.

    Values that are a setting's default are left out, so that a new setting renames nothing; what
    the defaults were is kept with the row (`resolved`), and compared when it is read.
    """
    text = json.dumps(_plain("", job, whole=False), sort_keys=True)
    return f"{job.kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@cache
def resolved(job: Job) -> dict[str, Any]:
    """All that a job says, and the jobs it needs, as plain values."""
    return _plain("", job, whole=True)


def agrees(kept: Any, now: Any) -> bool:
    """Whether values that were kept are still those of a job, as far as both have them."""
    if isinstance(kept, dict) and isinstance(now, dict):
        return all(agrees(value, now[name]) for name, value in kept.items() if name in now)
    if isinstance(kept, list) and isinstance(now, list):
        return len(kept) == len(now) and all(map(agrees, kept, now))
    return kept == now


def _plain(name: str, value: Any, *, whole: bool) -> Any:
    if isinstance(value, Job) and name and not whole:
        return identity(value)
    if dataclasses.is_dataclass(value):
        fields = [f for f in dataclasses.fields(value) if f.name not in _ELSEWHERE]
        parts = {f.name: _plain(f.name, getattr(value, f.name), whole=whole) for f in fields}
        if whole and isinstance(value, MergeSettings):
            config = method_config(value)
            settings = {} if config is None else config.to_settings()
            kept = {name: _plain("part", value, whole=True) for name, value in settings.items()}
            parts["config"] = kept or None
        if not whole:
            usual = {f.name: f.default for f in fields}
            parts = {n: v for n, v in parts.items() if v != {} and getattr(value, n) != usual[n]}
        return {"kind": value.kind, **parts} if isinstance(value, Job) else parts
    if isinstance(value, tuple | list):
        return [_plain(name or "part", part, whole=whole) for part in value]
    if name in _PATHS and isinstance(value, str) and not value.startswith(("hf:", "shapes")):
        return PurePath(value).name
    return value


def settings_of(job: Job) -> TrainSettings | None:
    """How the network is trained that a job is about, the first one where there are several."""
    if isinstance(job, Classifier | Pruned):
        return job.settings
    first = next(iter(job.needs()), None)
    return None if first is None else settings_of(first)


def in_order(jobs: list[Job]) -> list[Job]:
    """Jobs and all that they need, each once, needs first."""
    found: dict[str, Job] = {}

    def add(job: Job) -> None:
        if identity(job) not in found:
            for need in job.needs():
                add(need)
            found[identity(job)] = job

    for job in jobs:
        add(job)
    return list(found.values())

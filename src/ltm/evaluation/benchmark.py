"""`ltm.benchmark`: what merging gains in time, against the untouched network, on this machine.

For every network, batch size, precision and scope, all methods and modes are timed in one
interleaved comparison (`latency`). Rows are written as they come (`records`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ltm.evaluation.candidates import PUBLISHED_TOME, Candidates, TimedImages, check_methods
from ltm.evaluation.environment import describe
from ltm.evaluation.latency import (
    BASE,
    DTYPES,
    Candidate,
    Conditions,
    Timing,
    did_not_run,
    measure_latency,
)
from ltm.evaluation.modes import MODES
from ltm.evaluation.records import TimingFile
from ltm.evaluation.settings import BenchmarkSettings
from ltm.evaluation.timing import TimingLock
from ltm.files import check_folder
from ltm.models import (
    ModelSource,
    Say,
    SizeError,
    changed,
    check_name,
    refuse_given,
    silent,
    split_methods,
)
from ltm.processes import local_device

Model = nn.Module | str | Path | ModelSource

_METHODS = ("tome", "ltm")
_RATIO = 0.7
_GPU_THREADS = 2


@dataclass(frozen=True, kw_only=True, repr=False)
class BenchmarkResult:
    """The rows of one run."""

    rows: tuple[Timing, ...]
    file: TimingFile
    """These rows, and those of earlier runs in the same folder."""

    @property
    def complete_failure(self) -> bool:
        """Whether there are rows, and all of them say why they did not run."""
        return bool(self.rows) and not any(row.milliseconds for row in self.rows)

    def save(self, folder: Path | str) -> None:
        """Write metrics.json and table.md into a folder."""
        self.file.save(Path(folder))

    def __repr__(self) -> str:
        return "\n".join(_line(row) for row in self.rows) or "no rows"


def benchmark(
    models: Model | Sequence[Model],
    methods: str | Sequence[str] | None = None,
    settings: BenchmarkSettings = BenchmarkSettings(),
    *,
    folder: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    say: Say = silent,
    **changes: Any,
) -> BenchmarkResult:
    """Time networks, merged and untouched, in interleaved rounds on this machine.

    Args:
        models: networks, saved folders, `ModelSource`s, or timm names, which mean untrained
            networks. One that merges already is compared with itself without merging.
        methods: such as `"tome,ltm:ratio=0.5"` or `("tome", "ltm-static")`; by default
            tome and ltm.
        settings: what is timed, and how.
        folder: for metrics.json and table.md, written after every comparison.
        resume: add to the results in the folder, without those that it holds already.
        overwrite: replace the results in the folder.
        say: is told every row as it comes.
        changes: fields of the settings to change, such as `batch_sizes=(1, 128)`.
    """
    settings = changed(settings, changes)
    _check_known("modes", settings.modes, MODES)
    _check_known("dtypes", settings.dtypes, DTYPES)
    folder = None if folder is None else Path(folder)
    _check_folder(folder, resume=resume, overwrite=overwrite)
    networks = [models] if isinstance(models, nn.Module | str | Path | ModelSource) else models
    sources = [_Source(model) for model in networks]
    if not sources:
        raise ValueError("models: there is none; give at least one")
    wanted = _methods(methods, settings.ratio, sources)
    device = local_device(settings.device)
    images = None
    if settings.data is not None:
        images = TimedImages(settings.data, settings.split, settings.workers)
    run = _Run(settings, folder, device, keep=not overwrite, say=say)
    with _few_threads(device), run.recorded():
        for source in sources:
            run.time_network(source, wanted, images, alone=len(sources) == 1)
            if run.is_late():
                break
    return BenchmarkResult(rows=tuple(run.rows), file=run.file)


class _Source:
    """A network to time, by its name; loaded when its turn comes."""

    def __init__(self, model: Model) -> None:
        if isinstance(model, str | Path):
            is_folder = Path(model).is_dir()
            model = ModelSource(run=Path(model)) if is_folder else ModelSource(model=str(model))
        self.model = model
        if isinstance(model, ModelSource):
            self.name = str(model.run) if model.run is not None else str(model.model)
            self.image_size = model.image_size
            if model.run is None and model.model is not None:
                check_name(model.model)
        else:
            known: Any = getattr(model, "pretrained_cfg", None) or {}
            self.name = str(known.get("architecture") or type(model).__name__)
            self.image_size = None

    @property
    def is_saved(self) -> bool:
        return isinstance(self.model, ModelSource) and self.model.run is not None

    def load(self) -> nn.Module:
        if isinstance(self.model, ModelSource):
            return self.model.load(untrained=True)
        return copy.deepcopy(self.model)  # which goes to another device, say


class _Run:
    """One run: its rows are said at once, and written after every comparison."""

    def __init__(
        self,
        settings: BenchmarkSettings,
        folder: Path | None,
        device: torch.device,
        *,
        keep: bool,
        say: Say,
    ) -> None:
        path = None if folder is None else folder / "metrics.json"
        self.settings, self.folder, self.device, self.say = settings, folder, device, say
        self.rows: list[Timing] = []
        # Other runs may have begun at the same time: what they add stays.
        self.file = TimingFile(path, keep=keep)
        self.environment = describe(device)
        noted = {"modes": list(settings.modes), "ratio": _ratio(settings), "seed": settings.seed}
        self.file.start_run(self.environment, noted)
        self.lock = TimingLock(None if path is None else path.with_suffix(".timing"))
        self._began = time.monotonic()
        packages = ", ".join(f"{n} {v}" for n, v in self.environment.packages.items())
        say(f"{self.environment.device}, {packages}")

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write the table at the end, also after an interrupt."""
        try:
            yield
        except KeyboardInterrupt:
            self.say(f"interrupted; {self._whereabouts()}")
            raise
        finally:
            self.file.write_table()
            if self.folder is not None and self.file.rows:
                self.say(f"\n{self._whereabouts()}")

    def is_late(self) -> bool:
        """Whether the time is up."""
        minutes = self.settings.minutes
        return minutes is not None and time.monotonic() - self._began > 60 * minutes

    def time_network(
        self, source: _Source, methods: Sequence[str], images: TimedImages | None, *, alone: bool
    ) -> None:
        """All comparisons of one network; a size that it cannot take is a row if others remain."""
        torch.manual_seed(self.settings.seed)
        size = source.image_size
        try:
            model = source.load()
        except SizeError as error:
            if size is None or alone:
                raise
            self._refuse(self._conditions(source.name, (size, size)), str(error))
            return
        with self.lock.preparing():
            candidates = Candidates(model, methods, _ratio(self.settings), self.device, images)
        for conditions in self._conditions(source.name, candidates.image_size):
            if self.is_late():
                minutes = self.settings.minutes
                self.say(f"stopped after {minutes:g} minutes; --resume does the rest")
                return
            self.compare(candidates, conditions)

    def compare(self, candidates: Candidates, conditions: Conditions) -> None:
        """Time whatever is not in the file yet, together with the base."""
        modes, training = self.settings.modes, conditions.scope == "training"
        rows: list[Timing] = []
        with self.lock.preparing():
            ready = [candidates.candidate(BASE, training=training)]
            for method in candidates.methods:
                try:
                    candidate = candidates.candidate(method, training=training)
                except ValueError as error:
                    ratio = candidates.ratio_of(method)
                    rows += did_not_run(method, ratio, conditions, modes, str(error))
                    continue
                if not self._is_known(candidate, conditions):
                    ready.append(candidate)
            batch = candidates.batch(conditions.batch_size) if len(ready) > 1 else None
        rows = [row for row in rows if not self.file.holds(row, self.environment.device)]
        self._announce(conditions)
        if batch is not None:
            end_to_end = conditions.scope == "end-to-end"
            rows += measure_latency(
                ready,
                conditions,
                modes,
                images=batch,
                loader=candidates.loader(conditions.batch_size) if end_to_end else None,
                lock=self.lock,
            )
        elif not rows:
            self.say("  measured before")
        self._add(rows)

    def _conditions(self, model: str, image_size: tuple[int, int]) -> Iterator[Conditions]:
        """The comparisons of one network: scopes x precisions x batch sizes."""
        chosen = self.settings
        for scope, dtype, batch_size in product(chosen.scopes, chosen.dtypes, chosen.batch_sizes):
            yield Conditions(
                model=model,
                image_size=image_size,
                batch_size=int(batch_size),
                dtype=dtype,
                scope=scope,
                device=str(self.device),
                channels_last=chosen.channels_last,
                rounds=chosen.rounds,
                warmup=chosen.warmup,
            )

    def _refuse(self, comparisons: Iterable[Conditions], reason: str) -> None:
        """Say of a network that it cannot even run untouched, in a row of each comparison."""
        for conditions in comparisons:
            self._announce(conditions)
            self._add(did_not_run(BASE, None, conditions, self.settings.modes, reason))

    def _announce(self, conditions: Conditions) -> None:
        title = f"{conditions.model}, batch {conditions.batch_size}, {conditions.dtype}"
        self.say(f"\n{title}, {conditions.scope}:")

    def _add(self, rows: list[Timing]) -> None:
        self.rows += rows
        self.file.add(rows)
        for row in rows:
            self.say(f"  {_line(row)}")

    def _is_known(self, candidate: Candidate, conditions: Conditions) -> bool:
        rows = did_not_run(
            candidate.method, candidate.ratio, conditions, self.settings.modes, reason=""
        )
        return all(self.file.holds(row, self.environment.device) for row in rows)

    def _whereabouts(self) -> str:
        if self.folder is None:
            return "nothing was written: give --output"
        return f"{len(self.file.rows)} rows are in {self.folder}/metrics.json and table.md"


def _line(row: Timing) -> str:
    name = row.method if row.ratio is None else f"{row.method} {row.ratio:g}"
    start = f"{name:<24} {row.mode:<18}"
    if row.milliseconds is None or row.quartiles is None:
        return f"{start} did not run: {row.error}"
    low, high = row.quartiles
    text = f"{start} {row.milliseconds:9.3f} ms ({low:.3f}-{high:.3f}) "
    text += f"{row.images_per_second:9.1f} images/s  {row.verdict}"
    if row.best_speedup is not None:
        text += f" ({row.best_speedup:.2f}x against base's best mode)"
    return text


def _ratio(settings: BenchmarkSettings) -> float:
    return _RATIO if settings.ratio is None else settings.ratio


def _methods(
    methods: str | Sequence[str] | None, ratio: float | None, sources: Sequence[_Source]
) -> list[str]:
    """The methods that untouched networks are converted by; saved networks have their own."""
    if all(source.is_saved for source in sources):
        refuse_given({"methods": methods, "ratio": ratio}, "a saved run")
    texts = _METHODS if methods is None else ((methods,) if isinstance(methods, str) else methods)
    found = split_methods(texts, PUBLISHED_TOME)
    check_methods(found, _RATIO if ratio is None else ratio)
    return found


def _check_known(name: str, words: Iterable[str], known: Iterable[str]) -> None:
    for word in words:
        if word not in known:
            raise ValueError(f"{name}: {word} is not known; choose from {', '.join(known)}")


def _check_folder(folder: Path | None, *, resume: bool, overwrite: bool) -> None:
    if resume and (overwrite or folder is None):
        raise ValueError("--resume adds to the results in --output: give that, and no --overwrite")
    ways = "use --resume to add to them, or --overwrite"
    check_folder(folder, overwrite=overwrite or resume, other_ways=ways)


@contextmanager
def _few_threads(device: torch.device) -> Iterator[None]:
    """On a GPU use few threads of the processor: more would slow down runs beside this one."""
    before = torch.get_num_threads()
    if device.type == "cuda":
        torch.set_num_threads(min(before, _GPU_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(before)

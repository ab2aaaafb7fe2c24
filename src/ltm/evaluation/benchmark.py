"""`ltm.benchmark`: what merging gains in time, against the untouched network, on this machine.

For every network, batch size, precision and scope, all methods and modes are timed in one
interleaved comparison (`latency`). Rows are written as they come (`timings`).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ltm.api import (
    conversion_of,
    fit_,
    freeze_,
    image_size_of,
    is_merging,
    merging_copy,
    token_counts,
    unmerged_copy,
)
from ltm.evaluation.images import load_batches, open_images, repeated_images
from ltm.evaluation.latency import (
    BASE,
    DTYPES,
    Candidate,
    Conditions,
    Timing,
    TimingLock,
    did_not_run,
    measure_latency,
    noise,
)
from ltm.evaluation.measurement import mean_gmacs, varies
from ltm.evaluation.modes import MODES
from ltm.evaluation.records import describe
from ltm.evaluation.reference_tome import ReferenceToMe
from ltm.evaluation.settings import BenchmarkSettings
from ltm.evaluation.timings import TimingFile, name_with_ratio
from ltm.files import locked, output_folder
from ltm.methods import MethodConfig
from ltm.models import (
    ModelSource,
    Network,
    Say,
    SizeError,
    changed,
    check_name,
    method_config,
    name_of,
    num_classes_of,
    open_model,
    refuse_given,
    require_method,
    silent,
    split_methods,
)
from ltm.processes import local_device

Method = str | MethodConfig
"""A method by words, such as `ltm:ratio=0.5`, or as a value, such as `ltm.LTM(ratio=0.5)`."""

_PUBLISHED_TOME = "tome-reference"
"""ToMe's published algorithm in plain torch, on plain ViTs: in benchmarks only."""

_SAVED = "saved"
"""The method's name of a network that merges already."""

_METHODS = ("tome", "ltm")
_RATIO = 0.7
_GPU_THREADS = 2
_SAMPLE, _COUNTED = 16, 8
"""Images that methods are fitted on, and images on which multiply-adds are counted."""
_BATCHES = 4
"""Batches that one call goes through, end to end."""
_VARYING = "fitted on the timed images; batches padded to the longest image, masked when compiled"


@dataclass(frozen=True, kw_only=True, repr=False)
class BenchmarkResult:
    """The rows of one run."""

    rows: tuple[Timing, ...]
    file: TimingFile
    """These rows, and those of earlier runs in the same folder."""

    @property
    def complete_failure(self) -> bool:
        """Whether there are rows, but nothing ran."""
        return bool(self.rows) and not any(row.milliseconds for row in self.rows)

    def save(self, folder: Path | str) -> None:
        """Write metrics.json and table.md into a folder."""
        self.file.save(Path(folder))

    def __repr__(self) -> str:
        return "\n".join(_line(row) for row in self.rows) or "no rows"


def benchmark(
    models: Network | Sequence[Network],
    methods: Method | Sequence[Method] | None = None,
    settings: BenchmarkSettings = BenchmarkSettings(),
    *,
    folder: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    say: Say = silent,
    **changes: Any,
) -> BenchmarkResult:
    """Measure how much faster merging is on this machine, in interleaved rounds.

    Args:
        models: networks, saved folders, `ModelSource`s, or timm names (with random weights). A
            network that merges already is compared with itself without merging.
        methods: words such as `"tome,ltm:ratio=0.5"`, values such as `ltm.ToMe(ratio=0.5)`, or
            several of them; by default tome and ltm.
        settings: what is timed, and how.
        folder: for metrics.json and table.md, written after every comparison.
        resume: add to the results in the folder; what was measured is not measured again.
        overwrite: replace the results in the folder.
        say: called with every row as it is measured.
        changes: fields of the settings to change, such as `batch_sizes=(1, 128)`.
    """
    settings = changed(settings, changes)
    _check_known("modes", settings.modes, MODES)
    _check_known("dtypes", settings.dtypes, DTYPES)
    folder = None if folder is None else Path(folder)
    if resume and (overwrite or folder is None):
        raise ValueError(
            "--resume adds to the results in --output: give --output and no --overwrite"
        )
    ways = "use --resume to add to them, or --overwrite"
    networks = [models] if isinstance(models, nn.Module | str | Path | ModelSource) else models
    sources = [_source(model) for model in networks]
    if not sources:
        raise ValueError("models: there is none; give at least one")
    if all(isinstance(source, ModelSource) and source.run is not None for source in sources):
        refuse_given({"methods": methods, "ratio": settings.ratio}, "a saved run")
    wanted = _configs(_METHODS if methods is None else methods, _ratio(settings))
    if not wanted:
        raise ValueError("methods: there is none; give at least one")
    device = local_device(settings.device)
    images = None if settings.data is None else open_images(settings.data, settings.split)
    held = output_folder(
        folder, overwrite=overwrite or resume, other_ways=ways, written=("table.md",), shared=resume
    )
    with held:
        run = _Run(settings, folder, device, keep=not overwrite, say=say)
        with _few_threads(device), run.recorded():
            for source in sources:
                run.time_network(source, wanted, images, alone=len(sources) == 1)
                if run.is_late():
                    break
    return BenchmarkResult(rows=tuple(run.rows), file=run.file)


def _configs(given: Method | Sequence[Method], ratio: float) -> dict[str, MethodConfig]:
    """The methods by their names in rows; the published ToMe takes the settings of ours."""
    given = [given] if isinstance(given, str | MethodConfig) else given
    found: dict[str, MethodConfig] = {}
    for is_text, group in groupby(given, lambda method: isinstance(method, str)):
        if not is_text:
            found |= {value.words(ratio): value for value in cast("Iterator[Any]", group)}
            continue
        for text in split_methods(cast("Iterator[str]", group), _PUBLISHED_TOME):
            require_method(text, _PUBLISHED_TOME)
            ours = text.replace(_PUBLISHED_TOME, _PUBLISHED_TOME.removesuffix("-reference"), 1)
            found[text] = method_config(ours, ratio)
    return found


def _source(model: Network) -> nn.Module | ModelSource:
    """A network, or where to load it from when its turn comes."""
    if isinstance(model, str | Path):
        is_folder = Path(model).is_dir()
        model = ModelSource(run=Path(model)) if is_folder else ModelSource(model=str(model))
    if isinstance(model, ModelSource) and model.run is None and model.model is not None:
        check_name(model.model)
    return model


class _Candidates:
    """One network's candidates, each made when it is first needed.

    A network that merges already is compared with itself without merging. `images` is the data
    set of the settings.
    """

    def __init__(
        self,
        model: nn.Module,
        methods: Mapping[str, MethodConfig],
        settings: BenchmarkSettings,
        images: Any,
    ) -> None:
        self.model, self.methods, self.settings, self.images = model, methods, settings, images
        self.saved = is_merging(model)
        self.names = [_SAVED] if self.saved else list(methods)
        self.image_size = image_size_of(model)
        self._made: dict[tuple[str, bool], Candidate] = {}

    def candidate(self, method: str, *, training: bool) -> Candidate:
        """A candidate; a ValueError says why it cannot be made."""
        key = method, training
        if key not in self._made:
            self._made[key] = self._make(method, training)
        return self._made[key]

    def _make(self, method: str, training: bool) -> Candidate:
        images = self.batch(_SAMPLE).to(next(self.model.parameters()).device)
        if method not in (BASE, _SAVED):
            config = self.methods[method]
            return _merging_candidate(self.model, method, config, images, training=training)
        model = unmerged_copy(self.model) if self.saved and method == BASE else self.model
        cost = mean_gmacs(model, lambda: images[:_COUNTED])
        return Candidate(method=method, model=model, gmacs=cost)

    def batch(self, batch_size: int) -> Tensor:
        """Images to run on: real ones, repeated where there are too few, or noise."""
        if self.images is None:
            return noise(self.model, batch_size, self.image_size)
        return repeated_images(self.images, str(self.settings.data), self.model, batch_size)

    def loader(self, batch_size: int) -> Any:
        """A few full batches of the data set, as often as asked for."""
        number, source = len(self.images), str(self.settings.data)
        whole = min(_BATCHES, number // batch_size) * batch_size
        if whole == 0:
            raise ValueError(f"{source} has {number} images, fewer than {batch_size}")
        few, workers = self.images.take(whole), self.settings.workers
        return load_batches(
            few, source, self.model, batch_size=batch_size, workers=workers, labelled=False
        )


def _merging_candidate(
    model: nn.Module, method: str, config: MethodConfig, images: Tensor, *, training: bool
) -> Candidate:
    """A copy of the untouched `model` that merges by a method, as in deployment or in training.

    It is fitted on `images`. Informative weights get class statistics of made-up labels, so that
    they cost as much as after training; a ratio that is met as a mean is met on these images.
    """
    if method.partition(":")[0] == _PUBLISHED_TOME:
        return _published_tome(model, config, images)
    model = merging_copy(model, config, (images.shape[-2], images.shape[-1]))
    labels = torch.arange(len(images)) % num_classes_of(model)
    fit_(model, [(images, labels)], tolerance=0.02)
    cost = mean_gmacs(model, lambda: images[:_COUNTED])
    if not training:
        freeze_(model)
    note = _VARYING if varies(model) else ""
    return Candidate(method=method, model=model, ratio=config.ratio, gmacs=cost, note=note)


def _published_tome(model: nn.Module, config: MethodConfig, images: Tensor) -> Candidate:
    """As many tokens leave in each block as with our ToMe at the same ratio."""
    ours = merging_copy(model, config)
    counts = [conversion_of(ours).sites[0].num_in, *token_counts(ours)]
    pairs = pairwise(count for count in counts if isinstance(count, int))
    published = ReferenceToMe(unmerged_copy(model), [before - after for before, after in pairs])
    return Candidate(
        method=_PUBLISHED_TOME,
        model=published,
        ratio=config.ratio,
        gmacs=mean_gmacs(published, lambda: images),
        note="published algorithm in plain torch, fused attention",
    )


class _Run:
    """One run: rows are printed as they are measured, and written after every comparison."""

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
        """Write the table at the end, also after an interrupt, and say where the rows are."""
        ended = ""
        try:
            yield
        except KeyboardInterrupt:
            ended = "interrupted; "
            raise
        finally:
            self.file.write_table()
            if ended or (self.folder is not None and self.file.rows):
                self.say(f"\n{ended}{self._whereabouts()}")

    def is_late(self) -> bool:
        """Whether the time is up."""
        minutes = self.settings.minutes
        return minutes is not None and time.monotonic() - self._began > 60 * minutes

    def time_network(
        self,
        source: nn.Module | ModelSource,
        methods: Mapping[str, MethodConfig],
        images: Any,
        *,
        alone: bool,
    ) -> None:
        """All comparisons of one network; a size that it cannot take is a row if others remain."""
        torch.manual_seed(self.settings.seed)
        name, size = name_of(source), source.image_size if isinstance(source, ModelSource) else None
        try:
            loaded = open_model(source, untrained=True, say=self.say)
        except SizeError as error:
            if size is None or alone:
                raise
            for conditions in self._conditions(name, (size, size)):
                self._announce(conditions)
                self._add(did_not_run(BASE, None, conditions, self.settings.modes, str(error)))
            return
        with self.lock.preparing():
            model = open_model(loaded, self.device)
            candidates = _Candidates(model, methods, self.settings, images)
        for conditions in self._claimed(self._conditions(name, candidates.image_size)):
            if self.is_late():
                minutes = self.settings.minutes
                self.say(f"stopped after {minutes:g} minutes; --resume measures the rest")
                return
            self.compare(candidates, conditions)

    def _claimed(self, comparisons: Iterable[Conditions]) -> Iterator[Conditions]:
        """Comparisons, each while no other run in the folder works on it.

        Those that another run works on come last; its rows are in the file by then.
        """
        if self.folder is None:
            yield from comparisons
            return
        later: list[Conditions] = []
        for conditions in comparisons:
            with ExitStack() as stack:
                try:
                    stack.enter_context(locked(self._claim(conditions), timeout=0))
                except TimeoutError:
                    later.append(conditions)
                    continue
                self.file.read()
                yield conditions
        for conditions in later:
            with locked(self._claim(conditions)):
                self.file.read()
                yield conditions

    def _claim(self, conditions: Conditions) -> Path:
        assert self.folder is not None
        model, scope, size = conditions.model, conditions.scope, conditions.image_size
        words = f"{model} {size} {conditions.batch_size} {conditions.dtype} {scope}"
        words += f" {self.environment.device}"
        return self.folder / ".measuring" / f"{zlib.crc32(words.encode()):08x}"

    def compare(self, candidates: _Candidates, conditions: Conditions) -> None:
        """Time what is not in the file yet, together with the base."""
        modes, training = self.settings.modes, conditions.scope == "training"
        rows: list[Timing] = []
        with self.lock.preparing():
            ready = [candidates.candidate(BASE, training=training)]
            for method in candidates.names:
                try:
                    candidate = candidates.candidate(method, training=training)
                except ValueError as error:
                    ratio = candidates.methods[method].ratio
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
        if not self.file.rows:
            return "nothing was measured yet"
        return f"{len(self.file.rows)} rows are in {self.folder}/metrics.json and table.md"


def _line(row: Timing) -> str:
    start = f"{name_with_ratio(vars(row)):<24} {row.mode:<18}"
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


def _check_known(name: str, words: Iterable[str], known: Iterable[str]) -> None:
    for word in words:
        if word not in known:
            raise ValueError(f"{name}: {word} is not known; choose from {', '.join(known)}")


@contextmanager
def _few_threads(device: torch.device) -> Iterator[None]:
    """With a GPU, use few threads of the processor: more would slow down runs at the same time."""
    before = torch.get_num_threads()
    if device.type == "cuda":
        torch.set_num_threads(min(before, _GPU_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(before)

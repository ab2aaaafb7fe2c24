"""`ltm.export`: trace a network once, write each format, and compare each file with the network.

`Export` writes the files of one network into one folder; `export` is the verb around it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ltm.api import is_merging, merge_tokens_
from ltm.data.config import DataConfig
from ltm.data.loading import evaluation_loader
from ltm.deployment.formats import (
    SUFFIXES,
    OpenVinoModel,
    PackagedModel,
    deployable,
    save_onnx,
    save_openvino,
    save_package,
    save_program,
    trace,
)
from ltm.deployment.information import ModelInformation, known_about
from ltm.deployment.int8 import RECIPES, Int8, quantise_onnx, quantise_torch_
from ltm.deployment.settings import BATCH_SIZES, INT8_SOURCES, TOLERANCE, ExportSettings, Format
from ltm.evaluation import records
from ltm.evaluation.accuracy import paired_interval
from ltm.evaluation.images import Partition, part_images
from ltm.evaluation.latency import interleaved, speedup, spread
from ltm.evaluation.modes import OnnxModel, onnx_providers
from ltm.evaluation.records import text_table
from ltm.files import results_in, write_metrics
from ltm.models import (
    ModelSource,
    Say,
    changed,
    check_classes,
    method_config,
    num_classes_of,
    open_model,
    silent,
    source_of,
)
from ltm.processes import local_device
from ltm.progress import Progress

_CALIBRATION_BATCH = 16

FLOAT = "float32"


Classify = Callable[[Tensor], Tensor]
"""From images, `b c h w`, to one score per class, `b a`."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How far an exported model is from the original at one batch size."""

    batch_size: int
    num_images: int
    max_relative_difference: float
    """The largest difference of any score, relative to the image's largest score."""
    agreement: float
    """Share of the images with the same prediction."""


class ParityError(ValueError):
    """The outputs of an exported model differ from the original's."""


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """One file, and what is known about it."""

    name: str
    format: Format
    precision: str
    num_bytes: int
    parity: tuple[Parity, ...] = ()
    num_int8_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class Int8Accuracy:
    """An int8 file against the float file of the same format, on the same images."""

    name: str
    share_of_size: float
    num_images: int
    labelled: bool
    """Whether images had labels; if not, top-1 is agreement with the network's predictions."""
    top1_before: float
    top1_after: float
    difference: float
    interval: tuple[float, float]
    """95%, of the paired difference."""
    milliseconds_before: float
    milliseconds_after: float
    speedup: float
    """At batch 1, interleaved."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ExportResult:
    """The files that were written, and how they compare with the network."""

    folder: Path
    information: ModelInformation
    data: str
    num_images: int
    """Images on which files were compared with the network."""
    files: tuple[ExportedFile, ...]
    int8: tuple[Int8Accuracy, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        information = self.information
        return {
            "model": information.model,
            "token_merging": information.token_merging,
            "preprocessing": dataclasses.asdict(information.spec),
            "num_class_names": len(information.class_names or ()),
            "data": self.data,
            "parity_images": self.num_images,
            "files": [dataclasses.asdict(file) for file in self.files],
            "int8": [dataclasses.asdict(row) for row in self.int8],
            "environment": dataclasses.asdict(records.describe(torch.device("cpu"))),
        }

    def save(self, folder: Path | None = None) -> None:
        """Write metrics.json once more, by default beside the files."""
        write_metrics(folder or self.folder, self.to_dict())

    def __repr__(self) -> str:
        lines = [("file", "MB", "max relative difference (batch)")]
        for file in self.files:
            parity = ", ".join(
                f"{row.max_relative_difference:.1e} ({row.batch_size})" for row in file.parity
            )
            lines.append((file.name, f"{file.num_bytes / 1e6:.2f}", parity))
        text = f"{self.information.model} in {self.folder}\n{text_table(lines)}"
        if not self.int8:
            return text
        measured = "top-1" if self.int8[0].labelled else "agreement"
        header = ("file", "size", f"{measured} before", "after", "95% interval", "speed at batch 1")
        rows = [
            (
                row.name,
                f"{row.share_of_size:.2f}",
                f"{100 * row.top1_before:.2f}",
                f"{100 * row.top1_after:.2f}",
                f"{100 * row.interval[0]:+.2f} to {100 * row.interval[1]:+.2f}",
                f"{row.speedup:.2f}x",
            )
            for row in self.int8
        ]
        return f"{text}\n\n{text_table([header, *rows])}"


def export(
    model: nn.Module | str | Path | ModelSource,
    folder: Path | str,
    settings: ExportSettings = ExportSettings(),
    *,
    say: Say = silent,
    **changes: Any,
) -> ExportResult:
    """Write a network as files that other programs run, and check that their outputs are the same.

    Args:
        model: a network, a saved folder, a timm name, or a `ModelSource`.
        folder: where the files go, and metrics.json.
        settings: what to write, and which images to check it on.
        say: called with each line of progress.
        changes: fields of the settings to change, such as `formats=("onnx", "program")`.
    """
    settings, folder = changed(settings, changes), Path(folder)
    if "onnx" in settings.formats:
        onnx_providers(settings.device)
    named = source_of(model)
    config = None if settings.method is None else method_config(settings.method, settings.ratio)
    parts = part_images(
        settings.data or "shapes",
        split=settings.split,
        images=settings.images,
        calibration_images=settings.calibration_images if settings.int8 else 0,
    )
    network = open_model(model, merges=config is not None, say=say)
    if config is not None:
        if is_merging(network):
            raise ValueError("method: a saved run merges already; leave --method out")
        network = network if named is not None else copy.deepcopy(network)
        merge_tokens_(network, config)
    if settings.int8:
        _check_int8_images(network, parts, settings)
    run = None if named is None else named.run
    source = settings.data or "images"  # without data, shapes serve, but do not set the crop
    with results_in(folder) as aside:
        known = known_about(network, settings, run=run, source=source)
        job = Export(network, aside, known, device=settings.device)
        number = max(settings.batch_sizes)
        sample = next(iter(_batches(job, parts.evaluation.take(number), settings, number))).images
        job.write(
            settings.formats, sample, batch_sizes=settings.batch_sizes, tolerance=settings.tolerance
        )
        rows: list[Int8Accuracy] = []
        if settings.int8:
            for recipe in settings.int8:
                few = (
                    () if parts.calibration is None else _batches(job, parts.calibration, settings)
                )
                job.write_int8(recipe, (batch.images for batch in few))
            batches = _batches(job, parts.evaluation, settings)
            loop = Progress("accuracy")
            rows = job.measure_int8(batches, labelled=parts.labelled, progress=loop)
            if loop.interrupted:
                raise KeyboardInterrupt
        result = ExportResult(
            folder=folder,
            information=job.information,
            data=settings.data or "shapes",
            num_images=len(sample),
            files=tuple(job.files),
            int8=tuple(rows),
        )
        result.save(aside)
    return result


def _check_int8_images(network: nn.Module, parts: Partition, settings: ExportSettings) -> None:
    """Refuse too few images, or images of other classes than the network's, before tracing."""
    names, data = parts.evaluation.class_names, settings.data or "shapes"
    if settings.data in (None, "shapes") and len(names) != num_classes_of(network):
        raise ValueError("data: int8 needs images of the network's own kind; give --data")
    if names:
        check_classes(network, names, data)
    if parts.calibration is None and any(RECIPES[r].ranges == "static" for r in settings.int8):
        raise ValueError(
            f"int8: {', '.join(settings.int8)} needs images that set ranges, but {parts.reason}; "
            "dynamic needs none"
        )


def _batches(
    job: Export, dataset: Any, settings: ExportSettings, batch_size: int = _CALIBRATION_BATCH
) -> Any:
    """Images as the exported files expect them."""
    config = DataConfig(batch_size=batch_size, workers=settings.workers)
    return evaluation_loader(dataset, job.information.spec, config)


class Export:
    """Writes the files of one network into one folder, and remembers how to run them."""

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        information: ModelInformation,
        *,
        device: str = "cpu",
    ) -> None:
        self.model = deployable(model)
        self.folder, self.information, self.device = folder, information, device
        self.files: list[ExportedFile] = []
        self._runners: dict[str, Classify] = {}

    def write(
        self,
        formats: Sequence[Format],
        images: Tensor,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        tolerance: float = TOLERANCE,
    ) -> list[ExportedFile]:
        """Write the formats; delete and refuse a file whose outputs differ from the model's."""
        traced = trace(self.model, self.information.spec.size)
        self.folder.mkdir(parents=True, exist_ok=True)
        # OpenVINO's file is made from the ONNX file.
        wanted: set[str] = {*formats, *(("onnx",) if "openvino" in formats else ())}
        kinds: list[Format] = [kind for kind in SUFFIXES if kind in wanted]
        for kind in kinds:
            path, runner = self._path(kind), self._write(kind, traced)
            try:
                rows = compare(self.model, runner, images, batch_sizes)
                require_parity(rows, path.name, tolerance)
            except ParityError:
                path.unlink()
                path.with_suffix(".bin").unlink(missing_ok=True)  # OpenVINO's weights
                raise
            self._add(path, kind, FLOAT, runner, parity=tuple(rows))
        return self.files

    def write_int8(self, recipe: str, calibration: Iterable[Tensor]) -> list[ExportedFile]:
        """Write int8 versions of the ONNX file and the program, where they were written."""
        floats = [file for file in self.files if file.precision == FLOAT]
        for file in [file for file in floats if file.format in INT8_SOURCES]:
            path = self._path(file.format, f".int8-{recipe}")
            runner, number = self._quantise(file.format, path, RECIPES[recipe], calibration)
            self._add(path, file.format, f"int8 {recipe}", runner, num_int8_layers=number)
        return self.files

    def measure_int8(
        self,
        batches: Iterable[Any],
        *,
        labelled: bool = True,
        progress: Callable[[Iterable[Any]], Iterable[Any]] = lambda items: items,
        rounds: int = 15,
    ) -> list[Int8Accuracy]:
        """Accuracy and speed of all int8 files against the float ones.

        If images have no labels, the network's predictions count as right.
        """
        answers = None if labelled else self.model
        correct, images = _correct(self._runners, progress(batches), answers)
        times = interleaved(
            {name: lambda run=run: run(images[:1]) for name, run in self._runners.items()},
            torch.device("cpu"),
            rounds=rounds,
        )
        rows = []
        for file in (f for f in self.files if f.precision != FLOAT):
            base = next(f for f in self.files if f.format == file.format and f.precision == FLOAT)
            before, after = correct[base.name], correct[file.name]
            paired = paired_interval(after, before)
            rows.append(
                Int8Accuracy(
                    name=file.name,
                    share_of_size=file.num_bytes / base.num_bytes,
                    num_images=len(before),
                    labelled=labelled,
                    top1_before=float(before.double().mean()),
                    top1_after=float(after.double().mean()),
                    difference=paired.difference,
                    interval=(paired.low, paired.high),
                    milliseconds_before=1e3 * spread(times[base.name]).median,
                    milliseconds_after=1e3 * spread(times[file.name]).median,
                    speedup=speedup(times[base.name], times[file.name]).median,
                )
            )
        return rows

    def _path(self, kind: Format, precision: str = "") -> Path:
        return self.folder / f"model{precision}{SUFFIXES[kind]}"

    def _write(self, kind: Format, traced: ExportedProgram) -> Classify:
        if kind == "program":
            save_program(traced, self._path(kind))
            return traced.module()
        if kind == "onnx":
            path = save_onnx(traced, self._path(kind), self.information)
            return OnnxModel(path, device=self.device)
        if kind == "aoti":
            device = local_device("cuda" if self.device == "tensorrt" else self.device)
            if device.type != "cpu":
                moved = copy.deepcopy(self.model).to(device)
                traced = trace(moved, self.information.spec.size)
            return PackagedModel(save_package(traced, self._path(kind)), device)
        return OpenVinoModel(save_openvino(self._path("onnx"), self._path(kind)))

    def _quantise(
        self, kind: Format, path: Path, recipe: Int8, calibration: Iterable[Tensor]
    ) -> tuple[Classify, int]:
        if kind == "onnx":
            number = quantise_onnx(self._path(kind), path, recipe, calibration)
            return OnnxModel(path, device=self.device), number
        model = copy.deepcopy(self.model)
        number = quantise_torch_(model, recipe)
        traced = trace(model, self.information.spec.size)
        save_program(traced, path)
        return traced.module(), number

    def _add(
        self, path: Path, kind: Format, precision: str, runner: Classify, **known: Any
    ) -> None:
        size = path.stat().st_size
        if kind == "openvino":
            size += path.with_suffix(".bin").stat().st_size
        self._runners[path.name] = runner
        self.files.append(
            ExportedFile(name=path.name, format=kind, precision=precision, num_bytes=size, **known)
        )


@torch.no_grad()
def _correct(
    runners: Mapping[str, Classify], batches: Iterable[Any], answers: Classify | None
) -> tuple[dict[str, Tensor], Tensor]:
    """The images that each gets right, and the last batch; `answers` replace missing labels."""
    found: dict[str, list[Tensor]] = {name: [] for name in runners}
    images = None
    for images, labels in batches:
        right = labels if answers is None else answers(images).argmax(1)
        for name, classify in runners.items():
            found[name].append(classify(images).argmax(1) == right)
    if images is None:
        raise ValueError("batches: there are no images to measure accuracy on")
    return {name: torch.cat(parts) for name, parts in found.items()}, images


# --- Are the outputs of a file those of the network? ---------------------------------------------


@torch.no_grad()
def compare(
    original: Classify,
    exported: Classify,
    images: Tensor,
    batch_sizes: Sequence[int] = BATCH_SIZES,
) -> list[Parity]:
    """Compare outputs at each batch size; few images are repeated to fill a batch."""
    rows = []
    for size in batch_sizes:
        differences, agreements = [], []
        for batch in _whole_batches(images, size):
            expected, found = original(batch).double(), exported(batch).double()
            if expected.shape != found.shape:
                raise ParityError(
                    f"at batch {size} the exported model gives {tuple(found.shape)} instead of "
                    f"{tuple(expected.shape)}"
                )
            scale = expected.abs().amax(dim=1).clamp_min(1e-12)
            difference = (expected - found).abs().amax(dim=1) / scale
            # NaN would pass every comparison.
            differences.append(difference.nan_to_num(torch.inf))
            agreements.append(expected.argmax(1) == found.argmax(1))
        worst, agreement = torch.cat(differences), torch.cat(agreements)
        rows.append(
            Parity(
                batch_size=size,
                num_images=len(worst),
                max_relative_difference=float(worst.max()),
                agreement=float(agreement.double().mean()),
            )
        )
    return rows


def require_parity(rows: Sequence[Parity], what: str, tolerance: float = TOLERANCE) -> None:
    """Raise if a difference is larger than the tolerance."""
    for row in rows:
        if not row.max_relative_difference <= tolerance:
            raise ParityError(
                f"{what} differs from the original by {row.max_relative_difference:.2e} at batch "
                f"{row.batch_size}: at most {tolerance:.0e} is allowed"
            )


def _whole_batches(images: Tensor, size: int) -> Iterator[Tensor]:
    """Whole batches that cover all images at least once."""
    if len(images) == 0:
        raise ValueError("images: there are none to compare on")
    places = torch.arange(-(-len(images) // size) * size) % len(images)
    for start in range(0, len(places), size):
        yield images[places[start : start + size]]

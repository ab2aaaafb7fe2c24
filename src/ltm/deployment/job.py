"""The whole of an export: trace once, write the formats asked for, prove each against the original.

`export_model` writes float files, `add_int8` their int8 versions; both return rows for a report.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ltm.deployment import onnx, openvino, program, quantise
from ltm.deployment.information import ModelInformation
from ltm.deployment.parity import (
    BATCH_SIZES,
    TOLERANCE,
    Classify,
    Parity,
    ParityError,
    compare,
    require,
)
from ltm.deployment.runtime import OnnxModel
from ltm.evaluation.accuracy import paired_interval
from ltm.evaluation.timing import interleaved, speedup, spread

Format = Literal["onnx", "program", "openvino"]
FLOAT = "float32"
STEM = "model"


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
    top1_before: float
    top1_after: float
    difference: float
    interval: tuple[float, float]
    """95%, of the paired difference."""
    milliseconds_before: float
    milliseconds_after: float
    speedup: float
    """At batch 1, interleaved."""


class Export:
    """Files of one model in one folder."""

    def __init__(self, model: nn.Module, folder: Path, information: ModelInformation) -> None:
        self.model = program.deployable(model)
        self.folder, self.information = folder, information
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
        """Write the formats, and refuse a file that does not say what the model says."""
        traced = program.trace(self.model, self.information.spec.size)
        self.folder.mkdir(parents=True, exist_ok=True)
        for kind in _with_sources(formats):
            path, runner = _WRITERS[kind](self, traced)
            try:
                rows = compare(self.model, runner, images, batch_sizes)
                require(rows, path.name, tolerance)
            except ParityError:
                path.unlink()
                path.with_suffix(".bin").unlink(missing_ok=True)  # OpenVINO's weights
                raise
            self._add(path, kind, FLOAT, runner, parity=tuple(rows))
        return self.files

    def write_int8(self, recipe: str, calibration: Iterable[Tensor]) -> list[ExportedFile]:
        """Write int8 versions of the ONNX file and the program, where they were written."""
        settings = quantise.RECIPES[recipe]
        for file in [f for f in self.files if f.precision == FLOAT and f.format in _QUANTISERS]:
            path = self.folder / f"{STEM}.int8-{recipe}{Path(file.name).suffix}"
            runner, number = _QUANTISERS[file.format](self, path, settings, calibration)
            self._add(path, file.format, f"int8 {recipe}", runner, num_int8_layers=number)
        return self.files

    def measure_int8(
        self,
        batches: Iterable[Any],
        *,
        progress: Callable[[Iterable[Any]], Iterable[Any]] = lambda items: items,
        rounds: int = 15,
    ) -> list[Int8Accuracy]:
        """Accuracy and speed of all int8 files against the float ones, on labelled batches."""
        correct, images = _correct(self._runners, progress(batches))
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


def _with_sources(formats: Sequence[Format]) -> list[Format]:
    """OpenVINO's file is made from the ONNX file."""
    wanted = set(formats) | ({"onnx"} if "openvino" in formats else set())
    return [kind for kind in _WRITERS if kind in wanted]


def _write_onnx(job: Export, traced: ExportedProgram) -> tuple[Path, Classify]:
    path = onnx.save_onnx(traced, job.folder / f"{STEM}{onnx.SUFFIX}", job.information)
    return path, OnnxModel(path)


def _write_program(job: Export, traced: ExportedProgram) -> tuple[Path, Classify]:
    path = program.save_program(traced, job.folder / f"{STEM}{program.SUFFIX}")
    return path, traced.module()


def _write_openvino(job: Export, _: ExportedProgram) -> tuple[Path, Classify]:
    source = job.folder / f"{STEM}{onnx.SUFFIX}"
    path = openvino.save_openvino(source, job.folder / f"{STEM}{openvino.SUFFIX}")
    return path, openvino.OpenVinoModel(path)


_WRITERS: dict[Format, Callable[[Export, ExportedProgram], tuple[Path, Classify]]] = {
    "program": _write_program,
    "onnx": _write_onnx,
    "openvino": _write_openvino,
}


def _quantise_onnx(
    job: Export, path: Path, recipe: quantise.Int8, calibration: Iterable[Tensor]
) -> tuple[Classify, int]:
    source = job.folder / f"{STEM}{onnx.SUFFIX}"
    number = quantise.quantise_onnx(source, path, recipe, calibration)
    return OnnxModel(path), number


def _quantise_program(
    job: Export, path: Path, recipe: quantise.Int8, _: Iterable[Tensor]
) -> tuple[Classify, int]:
    model = copy.deepcopy(job.model)
    number = quantise.quantise_torch_(model, recipe)
    traced = program.trace(model, job.information.spec.size)
    program.save_program(traced, path)
    return traced.module(), number


_QUANTISERS: dict[
    Format, Callable[[Export, Path, quantise.Int8, Iterable[Tensor]], tuple[Classify, int]]
] = {"onnx": _quantise_onnx, "program": _quantise_program}


@torch.no_grad()
def _correct(
    runners: Mapping[str, Classify], batches: Iterable[Any]
) -> tuple[dict[str, Tensor], Tensor]:
    """Which images each gets right, and the last batch."""
    found: dict[str, list[Tensor]] = {name: [] for name in runners}
    images = None
    for images, labels in batches:
        for name, classify in runners.items():
            found[name].append(classify(images).argmax(1) == labels)
    if images is None:
        raise ValueError("batches: there are no labelled images to measure accuracy on")
    return {name: torch.cat(parts) for name, parts in found.items()}, images

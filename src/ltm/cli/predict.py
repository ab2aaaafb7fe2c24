"""`ltm predict`: any number of images through a model."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from ltm.cli.commands import Flat, Inputs, OptionalPath
from ltm.deployment.settings import PredictSettings, TableFormat
from ltm.files import output_folder
from ltm.models import ModelSource, refuse_given


def predict(
    inputs: Inputs,
    source: Flat[ModelSource],
    settings: Flat[PredictSettings],
    *,
    onnx: OptionalPath = None,
    form: Annotated[TableFormat, tyro.conf.arg(name="format")] = "jsonl",
    output: OptionalPath = None,
    overwrite: bool = False,
) -> None:
    """Classify images with a saved network or an ONNX file: one line each, JSON or CSV.

    Inputs are images, folders (sorted by path), .zip archives, tar shards, Parquet files, hf:NAME,
    text files of paths (.txt), and paths from standard input (-). An image that cannot be read gets
    a line that says why. A saved detector works too.

    Example:
        ltm predict photos/ cat.jpg --run runs/small > predictions.jsonl
        find /data -name '*.jpg' | ltm predict - --onnx runs/export/model.onnx --format csv

    Args:
        inputs: Images, folders, lists of paths, or - for standard input.
        source: Which network.
        settings: How images are prepared, and what is written about them.
        onnx: A file that ltm export wrote, instead of a network.
        form: What to write. Parquet files can be written by several GPUs (--devices) or a Ray
            cluster (--ray), and --resume continues a stopped run.
        output: Folder for predictions and metrics.json; by default predictions are printed.
        overwrite: Replace another run's results there.
    """
    tables = form == "parquet"
    _check_form(settings, output, tables=tables)
    written = "parquet" if tables else f"predictions.{form}"
    with output_folder(output, overwrite=overwrite or settings.resume, written=(written,)):
        if onnx is not None:
            _check_onnx_alone(onnx, source)

        from ltm.deployment import prediction

        found = prediction.predict(source if onnx is None else onnx, inputs, settings, say=_say)
        if output is not None:
            found.save(output, form)
        elif form != "parquet":
            found.write(sys.stdout, form)
    if found.num_unreadable:
        unread = f"{found.num_unreadable} of {found.num_images} images could not be read"
        print(unread, file=sys.stderr)
    if found.num_images and found.num_unreadable == found.num_images and not found.interrupted:
        raise ValueError("nothing was predicted")
    if found.interrupted:
        _say(f"Stopped early, after {found.num_images} images.")
        raise KeyboardInterrupt


def _say(line: str) -> None:
    """Print a line on standard error: predictions go to standard output."""
    print(line, file=sys.stderr)


def _check_form(settings: PredictSettings, output: Path | None, *, tables: bool) -> None:
    """Refuse options that only Parquet files have, and Parquet files without a folder."""
    if tables and output is None:
        raise ValueError("format is parquet: give --output, a folder for the files")
    for name in ("devices", "ray", "resume"):
        if not tables and getattr(settings, name):
            raise ValueError(f"--{name} goes with --format parquet")


def _check_onnx_alone(onnx: Path, source: ModelSource) -> None:
    """Refuse a network next to an ONNX file, and options that the file would ignore."""
    from ltm.deployment.prediction import is_detector

    if onnx.suffix.lower() not in (".onnx", ".pt2"):  # the verb says why it does not take .pt2
        raise ValueError(f"onnx is {onnx}, but must be a file whose name ends in .onnx")
    if source.run is not None and is_detector(source.run):
        refuse_given({"onnx": onnx}, "a saved detector")
    if source.run is not None or source.model is not None:
        raise ValueError("onnx: give one of --onnx, --run and --model")
    refuse_given(source.given(), "an ONNX file")

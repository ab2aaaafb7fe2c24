"""Predictions as JSON lines or CSV, written as they come."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from typing import Literal, TextIO

from ltm.deployment.prediction import ImageModel, Prediction

Format = Literal["jsonl", "csv"]
Write = Callable[[Prediction], None]


def open_writer(kind: Format, stream: TextIO, model: ImageModel) -> Write:
    """A function that writes one prediction a line."""
    return _WRITERS[kind](stream, model)


def _json_lines(stream: TextIO, _: ImageModel) -> Write:
    def write(prediction: Prediction) -> None:
        found = {"error": prediction.error} if prediction.answer is None else prediction.answer
        stream.write(json.dumps({"path": prediction.path, **found}, ensure_ascii=False) + "\n")

    return write


def _csv(stream: TextIO, model: ImageModel) -> Write:
    """One row an image; a column's several values are JSON, the first class has its own column."""
    table = csv.writer(stream, lineterminator="\n")
    table.writerow(["path", "error", "class", *model.columns])

    def write(prediction: Prediction) -> None:
        found = prediction.answer or {}
        first = next(iter(found.get("classes", ())), "")
        values = (json.dumps(found[name]) if name in found else "" for name in model.columns)
        table.writerow([prediction.path, prediction.error or "", first, *values])

    return write


_WRITERS: dict[str, Callable[[TextIO, ImageModel], Write]] = {"jsonl": _json_lines, "csv": _csv}

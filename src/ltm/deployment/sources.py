"""Which images to predict: paths one at a time, however many there are."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import TextIO

from ltm.data.images import EXTENSIONS

STDIN = "-"
LISTS = (".txt", ".lst", ".list")
"""Text files with these endings are lists of paths."""


def check_inputs(inputs: Iterable[str]) -> None:
    """Refuse what does not exist before any work is done."""
    for name in inputs:
        if name != STDIN and not Path(name).exists():
            raise FileNotFoundError(f"{name}: there is no such image, folder or list of paths")


def image_paths(inputs: Iterable[str], stdin: TextIO | None = None) -> Iterator[str]:
    """Paths of images, folders (with all they contain), lists of paths, and `-`, standard input.

    What is given comes in the order given, what a folder contains sorted by path. Of all the names
    only those of the folders on the way down are held at a time, of lists one line.
    """
    for name in inputs:
        if name == STDIN:
            yield from _lines(sys.stdin if stdin is None else stdin)
        elif Path(name).is_dir():
            yield from _walk(name)
        elif name.lower().endswith(LISTS):
            with Path(name).open(encoding="utf-8", errors="surrogateescape") as lines:
                yield from _lines(lines)
        else:
            yield name


def _lines(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        path = line.rstrip("\r\n")
        if path:
            yield path


def _walk(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        found = sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
    for entry in found:
        if entry.is_dir():
            yield from _walk(entry.path)
        elif PurePath(entry.name).suffix.lower() in EXTENSIONS:
            yield entry.path

"""The model card: README.md in the layout of the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from ltm.report.comparison import Comparison
from ltm.report.curves import display_name
from ltm.report.report import templates
from ltm.report.verdicts import verdicts

CARD = "README.md"


def write_card(
    comparison: Comparison, folder: Path, *, origin: Mapping[str, str] | None = None
) -> Path:
    """Write the card of a compressed model; `origin` may name a `base_model` and a `license`.

    Who reads it has another machine: of absolute paths only the last name is written.
    """
    words = shlex.split(comparison.command)
    given = {path for word in (*words, comparison.data) if (path := _path_in(word))}
    command = shlex.join(_shortened(word, given) for word in words)
    data = _shortened(comparison.data, given).rstrip("/")
    comparison = dataclasses.replace(comparison, command=command, data=data)
    text = templates().get_template("card.md").render(
        comparison=comparison,
        origin=origin or {},
        compressed=comparison.compressed,
        base=comparison.base,
        verdicts=verdicts(comparison),
        name=display_name,
        method=display_name(comparison.method),
    )  # fmt: skip
    path = folder / CARD
    path.write_text(_shortened(text.strip(), given) + "\n", encoding="utf-8")
    return path


def _path_in(word: str) -> str | None:
    """The absolute path that a word of a command is, or ends with: `name=/path`, `kind:/path`."""
    for text in (word, re.sub(r"^[^/\\]*?[=:](?=/[^/])", "", word)):
        absolute = PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()
        if absolute or text.startswith("~/"):
            return text.rstrip("/\\") or None
    return None


def _shortened(text: str, paths: set[str]) -> str:
    """The text with the last name of each of the paths in its place."""
    for path in sorted(paths, key=len, reverse=True):
        name = re.split(r"[/\\]" if "\\" in path else "/", path)[-1]
        text = re.sub(rf"(?<![\w.~/]){re.escape(path)}(?!\w)", lambda _, name=name: name, text)
    return text

"""What the benchmarks of exported models and of the web page leave behind: JSON and a table."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ltm.evaluation.environment import describe


def write(
    folder: Path,
    name: str,
    *,
    title: str,
    command: str,
    about: dict[str, Any],
    columns: dict[str, str],
    rows: Sequence[dict[str, Any]],
    notes: str = "",
) -> None:
    """Write `name.json` and `name.md`; columns are headings by key of a row."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = dataclasses.asdict(describe(torch.device("cpu")))
    load = round(os.getloadavg()[0], 2)
    content = {
        "command": command,
        **about,
        "rows": list(rows),
        "load_at_the_end": load,
        "environment": environment,
    }
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    versions = ", ".join(f"{key} {value}" for key, value in environment["packages"].items())
    machine = f"{environment['cpu']}, {environment['threads']} thread(s)"
    parts = [
        f"# {title}",
        f"```\n{command}\n```",
        "\n".join([_line(columns.values()), _line(["---"] * len(columns)), *_lines(columns, rows)]),
        notes,
        f"{machine}; Python {environment['python']}, {versions}.",
    ]
    (folder / f"{name}.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    print("\n".join(parts), flush=True)


def _lines(columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> list[str]:
    return [_line(row[key] for key in columns) for row in rows]


def _line(cells: Any) -> str:
    return "| " + " | ".join(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells) + " |"

"""How a benchmark reads its options, names its machine and writes its rows."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch

from ltm.evaluation.records import describe
from ltm.files import write_text


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the benchmark's own docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def plain(options: argparse.Namespace) -> dict[str, Any]:
    """Options as JSON takes them; files by their name, never by their folder."""
    return {n: v.name if isinstance(v, Path) else v for n, v in vars(options).items()}


def machine(device: torch.device | None = None) -> dict[str, str]:
    """What the numbers were measured on; by default the GPU, if there is one."""
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
    }


def write_json(path: Path, content: Any) -> None:
    """Write a result as JSON, and print it."""
    text = json.dumps(content, indent=1) + "\n"
    write_text(path, text)
    print(text, end="", flush=True)


def write_rows(path: Path, about: dict[str, Any], rows: Sequence[Any], page: str) -> None:
    """Write rows beside their table: `path` with the suffixes .json and .md."""
    write_text(path.with_suffix(".json"), json.dumps({**about, "rows": rows}, indent=1) + "\n")
    write_text(path.with_suffix(".md"), page.rstrip("\n") + "\n")


def write_page(
    path: Path,
    *,
    title: str,
    command: str,
    about: dict[str, Any],
    columns: dict[str, str],
    rows: Sequence[dict[str, Any]],
    notes: str = "",
) -> None:
    """Write rows and a whole page about them, for a CPU; columns are headings by key of a row."""
    environment = dataclasses.asdict(describe(torch.device("cpu")))
    load = round(os.getloadavg()[0], 2)
    versions = ", ".join(f"{key} {value}" for key, value in environment["packages"].items())
    machine_of = f"{environment['cpu']}, {environment['threads']} thread(s)"
    parts = [
        f"# {title}",
        f"```\n{command}\n```",
        table(columns.values(), ([row[key] for key in columns] for row in rows)),
        notes,
        f"{machine_of}; Python {environment['python']}, {versions}.",
    ]
    page = "\n\n".join(filter(None, parts))
    about = {"command": command, **about, "load_at_the_end": load, "environment": environment}
    write_rows(path, about, rows, page)
    print(page, flush=True)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table in Markdown."""
    head = list(head)
    return "\n".join([_line(head), _line(["---"] * len(head)), *map(_line, rows)])


def _line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells) + " |"

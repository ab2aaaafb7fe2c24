"""What commands leave behind: `metrics.json` in the folder given as `--output`."""

import json
from collections.abc import Mapping
from pathlib import Path


def open_folder(output: Path | None) -> None:
    """Make the folder `output` before any work is done, or say that it cannot be one."""
    if output is None:
        return
    if output.exists() and not output.is_dir():
        raise ValueError(f"output is {output}, a file: a folder is needed")
    output.mkdir(parents=True, exist_ok=True)


def write_metrics(output: Path | None, metrics: Mapping[str, object]) -> None:
    """Write `metrics.json` into the folder `output`, if there is one."""
    if output is not None:
        text = json.dumps(metrics, indent=2)
        (output / "metrics.json").write_text(text + "\n", encoding="utf-8")

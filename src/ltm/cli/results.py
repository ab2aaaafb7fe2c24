"""What commands leave behind: `metrics.json` in the folder given as `--output`."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path


def open_folder(output: Path | None, *, overwrite: bool = True) -> None:
    """Make the folder `output` before any work is done, or say that it cannot be one.

    Without `overwrite` a folder that holds another run's results is refused.
    """
    if output is None:
        return
    if output.exists() and not output.is_dir():
        raise ValueError(f"output is {output}, a file: a folder is needed")
    if not overwrite and (output / "metrics.json").exists():
        raise FileExistsError(
            f"output {output} holds the results of another run: choose another folder, or use "
            "--overwrite"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise PermissionError(
            f"output {output} cannot be written to ({error.strerror}): choose another folder"
        ) from error


def write_metrics(output: Path | None, metrics: Mapping[str, object]) -> None:
    """Write `metrics.json` into the folder `output`, if there is one."""
    if output is not None:
        text = json.dumps(metrics, indent=2)
        (output / "metrics.json").write_text(text + "\n", encoding="utf-8")

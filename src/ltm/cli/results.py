"""What commands leave behind: `metrics.json` in the folder given as `--output`."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def check_folder(
    output: Path | None,
    *,
    overwrite: bool = True,
    other_ways: str = "use --overwrite",
    written: Sequence[str] = (),
) -> None:
    """Say before any work is done that `output` cannot be a folder of results; nothing stays.

    Without `overwrite` a folder that holds another run's results is refused, and so is one with a
    file of a name that is to be `written`, which may be the user's own.
    """
    if output is None:
        return
    try:
        # Nothing is made: other processes may be about to make the same folders.
        nearest = next(place for place in (output, *output.parents) if _is_there(place))
        if nearest == output and not output.is_dir():
            raise ValueError(f"output is {output}, a file: a folder is needed")
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise PermissionError(
            f"output {output} cannot be written to ({error.strerror}): choose another folder"
        ) from error
    if not overwrite and (output / "metrics.json").exists():
        raise FileExistsError(
            f"output {output} holds the results of another run: choose another folder, or "
            f"{other_ways}"
        )
    for name in () if overwrite else written:
        if _is_there(output / name):
            raise FileExistsError(
                f"output {output} has a {name}, which would be replaced: choose another folder, or "
                f"{other_ways}"
            )


def _is_there(place: Path) -> bool:
    """Whether there is anything at all, a link to nowhere too; what cannot be known is an error."""
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def write_metrics(output: Path | None, metrics: Mapping[str, object]) -> None:
    """Write `metrics.json` into the folder `output`, if one was asked for."""
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        text = json.dumps(metrics, indent=2)
        (output / "metrics.json").write_text(text + "\n", encoding="utf-8")

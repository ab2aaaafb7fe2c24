"""`ltm table`: the door to `reproduction`, the paper's tables and figures."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def prepare(_options: Sequence[str]) -> Callable[..., None]:
    """The command itself, which comes with a checkout of the project, not with the package."""
    if find_spec("reproduction") is None:
        root = next(
            (root for root in _roots() if (root / "reproduction/command.py").is_file()), None
        )
        if root is None:
            raise ValueError(
                "the package reproduction is not installed with ltm: clone the project, and run "
                "this command in the clone"
            )
        sys.path.append(str(root))
    return import_module("reproduction.command").table


def _roots() -> tuple[Path, ...]:
    """Where a checkout may be: the current folder, or that of an editable installation."""
    return Path.cwd(), Path(__file__).resolve().parents[3]

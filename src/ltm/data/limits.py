"""Limits on what a source of images may hold: a small or damaged file must not fill the memory.

No ordinary data set reaches them. Where one does, write the new limit behind the source:
`slides?most_pixels=500000000`, or several, separated by commas. That works wherever images are
named: data sets, archives, tar shards, `hf:NAME`, single images and folders of them.
"""

import re
import stat
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from ltm.core.validation import require_least
from ltm.models import read_words


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that is read of a source."""

    most_classes: int = 1_000_000
    """Classes of a data set; ImageNet-21k has 21,841."""
    most_pixels: int = 2**27
    """Pixels of an image: 134 million, 400 MB when decoded."""
    most_bytes: int = 2**29
    """Bytes of an image file or of an archive's member, before and after inflating it."""
    most_annotation_bytes: int = 2**33
    """Bytes of an annotation file; LVIS has 1.1 GB."""
    most_inflation: int = 200
    """How many times its own size an archive may inflate to. Small archives (64 MB) may always."""

    def check(self, field: str, number: int, said: str) -> None:
        """Refuse a number above a limit; `said` names the file and what it has."""
        most = getattr(self, field)
        if number > most:
            raise LimitError(
                f"{said}, but {field} is {most}; "
                f"if the file is right, write ?{field}={number} behind the name of the data",
                number,
            )

    def check_inflation(self, where: object, *, stored: int, inflated: int) -> None:
        """Refuse an archive whose members would inflate to far more than its size."""
        if inflated > max(_ALWAYS_INFLATED, self.most_inflation * stored):
            times = -(-inflated // max(stored, 1))
            raise LimitError(
                f"{where} has {stored} bytes and would inflate to {inflated}, {times} times as "
                f"many, but most_inflation is {self.most_inflation}; if the archive is right, "
                f"write ?most_inflation={times} behind the name of the data",
                times,
            )


_ALWAYS_INFLATED = 2**26


class LimitError(ValueError):
    """A file exceeds a limit; `number` is what it has."""

    def __init__(self, said: str, number: int) -> None:
        super().__init__(said)
        self.number = number

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        """Errors of a loader's process travel to the one that asked."""
        return type(self), (str(self), self.number)


class LimitedSource(NamedTuple):
    """A source without the limits that were written behind it, and these limits."""

    name: str
    limits: Limits
    words: str
    """The limits as they were written, with their question mark; empty for the defaults."""


# Shards may be named with question marks, and downloaded files end in ?width=300.
_WORDS = re.compile(r"\?(most_\w+=[^?]*)$")


def split_limits(source: str | Path) -> LimitedSource:
    """Split `name?most_pixels=300000000` into the name and the limits."""
    text = str(source)
    found = _WORDS.search(text)
    if found is None:
        return LimitedSource(text, Limits(), "")
    types = {field.name: int for field in fields(Limits)}
    limits = read_words([found[1]], types, owner="data")
    for name, number in limits.items():
        require_least(f"data {name}", number)
    return LimitedSource(text[: found.start()], Limits(**limits), found[0])


def read_file(path: Path, limits: Limits, field: str = "most_bytes") -> bytes:
    """Read a file of limited size. Pipes and devices are refused: they may never end."""
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise ValueError(f"{path} is not a regular file")
    limits.check(field, status.st_size, f"{path} has {status.st_size} bytes")
    with path.open("rb") as file:
        return file.read(status.st_size)

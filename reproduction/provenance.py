"""Which code made a row: its commit, and a hash of the files that decide results.

The hash is that of git's own names of the files (`git ls-tree`), so that a row from a machine
without git can be checked against its commit later. `git archive` writes the commit into `COMMIT`.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("src/ltm", "reproduction")
"""Folders whose files decide what a row holds."""
_COMMIT = "reproduction/COMMIT"
"""Holds the commit in an archive; its content differs from the checkout's for that reason."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The code that runs."""

    commit: str | None
    """The commit, with `-dirty` where files differ from it; None where nothing tells."""
    tree: str
    """A hash of the files under `CODE`, as they are."""

    @property
    def is_clean(self) -> bool:
        """Whether a commit is known that holds these files."""
        return self.commit is not None and not self.commit.endswith("-dirty")


@cache
def provenance() -> Provenance:
    """The code that runs here, from git or from an archive's `COMMIT`."""
    tree = _hashed({name: _blob(ROOT / name) for name in _files()})
    head = _git("rev-parse", "HEAD")
    if head is not None:
        same = tree_of(head) == tree
        return Provenance(commit=head if same else f"{head}-dirty", tree=tree)
    file = ROOT / _COMMIT
    written = file.read_text(encoding="utf-8").strip() if file.is_file() else "$"
    return Provenance(commit=None if written.startswith("$") else written, tree=tree)


def tree_of(commit: str) -> str | None:
    """The hash of a commit's files; None where git does not know it."""
    listed = _git("ls-tree", "-r", "--format=%(objectname) %(path)", commit, "--", *CODE)
    if listed is None:
        return None
    pairs = (line.split(" ", 1) for line in listed.splitlines())
    return _hashed({path: blob for blob, path in pairs if _counts(path)})


def _counts(path: str) -> bool:
    return path != _COMMIT and "__pycache__" not in path


def _files() -> Iterable[str]:
    for folder in CODE:
        for path in (ROOT / folder).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and _counts(name):
                yield name


def _blob(path: Path) -> str:
    """Git's name of a file's content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _hashed(blobs: dict[str, str]) -> str:
    lines = "".join(f"{name} {blobs[name]}\n" for name in sorted(blobs))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _git(*arguments: str) -> str | None:
    """What git says of the project's own repository; None without one."""
    if not (ROOT / ".git").exists():
        return None
    try:
        found = subprocess.run(  # noqa: S603
            ["git", *arguments],  # noqa: S607
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def require_one_source(commits: Iterable[tuple[str | None, str | None]], where: Path) -> None:
    """Refuse to add rows that could not be committed beside those that are there.

    Args:
        commits: Commit and tree of every row that is there.
        where: The folder of the rows, for messages.
    """
    here = provenance()
    if not here.is_clean:
        what = "no commit is known" if here.commit is None else f"files differ from {here.commit}"
        raise ValueError(
            f"{what.removesuffix('-dirty')}; commit first, so that rows can name their code, or "
            "give --draft for rows that nobody will commit"
        )
    others = sorted({str(commit) for commit, tree in commits if tree != here.tree})
    if others:
        raise ValueError(
            f"{where} has rows of commit {others[0]}, and this is {here.commit} with other code; "
            "go on in a checkout of that commit (git worktree add), or take another output"
        )

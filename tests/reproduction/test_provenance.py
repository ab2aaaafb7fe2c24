"""Which code made a row, and what may stand beside it."""

import subprocess
from pathlib import Path

import pytest

from reproduction import provenance
from reproduction.provenance import Provenance, require_one_source, tree_of

CLEAN = Provenance(commit="a" * 40, tree="t1")


def test_rows_of_other_code_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "provenance", lambda: CLEAN)
    require_one_source([], tmp_path)
    require_one_source([("b" * 40, "t1")], tmp_path)  # another commit, the same code
    with pytest.raises(ValueError, match=f"rows of commit {'b' * 40}.*git worktree add"):
        require_one_source([("a" * 40, "t1"), ("b" * 40, "t2")], tmp_path)


@pytest.mark.parametrize(
    ("commit", "words"), [("a" * 40 + "-dirty", f"differ from {'a' * 40};"), (None, "no commit")]
)
def test_code_without_a_commit_is_refused(
    commit: str | None, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(provenance, "provenance", lambda: Provenance(commit=commit, tree="t1"))
    with pytest.raises(ValueError, match=f"{words}.*--draft"):
        require_one_source([], tmp_path)


def test_an_archive_knows_its_commit_and_a_change_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "project"
    code = root / "reproduction"
    code.mkdir(parents=True)
    (code / "COMMIT").write_text("$Format:%H$\n")
    (code / "a.py").write_text("a = 1\n")
    (root / ".gitattributes").write_text("reproduction/COMMIT export-subst\n")
    archive = tmp_path / "archive"
    archive.mkdir()
    identity = "-c user.name=a -c user.email=a@b -c commit.gpgsign=false"
    for command in ("git init -q", "git add -A", f"git {identity} commit -qm one"):
        subprocess.run(command.split(), cwd=root, check=True)
    made = subprocess.run(
        ["git", "archive", "HEAD"], cwd=root, check=True, capture_output=True
    ).stdout
    subprocess.run(["tar", "x", "-C", str(archive)], input=made, check=True)

    def of(folder: Path) -> Provenance:
        monkeypatch.setattr(provenance, "ROOT", folder)
        provenance.provenance.cache_clear()
        return provenance.provenance()

    try:
        here, there = of(root), of(archive)
        assert here == there
        assert here.is_clean
        (archive / "reproduction" / "a.py").write_text("a = 2\n")
        changed = of(archive)
        monkeypatch.setattr(provenance, "ROOT", root)
        assert tree_of(str(changed.commit)) == here.tree != changed.tree
        (code / "a.py").write_text("a = 2\n")
        assert of(root).commit == f"{here.commit}-dirty"
    finally:
        provenance.provenance.cache_clear()

"""Where results may go, said before any work is done."""

from pathlib import Path

import pytest

from ltm.files import check_folder


def test_folders_are_looked_at_and_none_is_made(tmp_path: Path) -> None:
    """Several processes may be about to make the same folder, or to put something into it."""
    check_folder(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("output", "why"), [("file/below", "Not a directory"), ("n" * 300, "File name too long")]
)
def test_what_cannot_be_a_folder_is_refused(tmp_path: Path, output: str, why: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError, match=f"cannot be written to \\({why}\\)"):
        check_folder(tmp_path / output)


def test_a_file_and_another_runs_results_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("metrics.json", "link"):
        with pytest.raises(ValueError, match="a file: a folder is needed"):
            check_folder(tmp_path / name)
    with pytest.raises(FileExistsError, match="--overwrite"):
        check_folder(tmp_path, overwrite=False)
    check_folder(tmp_path, overwrite=True)


def test_a_file_of_the_users_own_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# my project")
    check_folder(tmp_path, overwrite=False)
    check_folder(tmp_path, overwrite=True, written=("README.md",))
    with pytest.raises(FileExistsError, match=r"has a README\.md, which would be replaced"):
        check_folder(tmp_path, overwrite=False, written=("README.md",))

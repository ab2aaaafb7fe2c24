"""Where results may go, said before any work is done."""

from pathlib import Path
from typing import Any

import pytest

from ltm.files import output_folder


def held(*args: Any, **options: Any) -> None:
    with output_folder(*args, **options):
        pass


def test_folders_that_stay_empty_go(tmp_path: Path) -> None:
    """What a refused run has made goes with it."""
    held(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("output", "why"), [("file/below", "Not a directory"), ("n" * 300, "File name too long")]
)
def test_what_cannot_be_a_folder_is_refused(tmp_path: Path, output: str, why: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError, match=f"cannot be written to \\({why}\\)"):
        held(tmp_path / output)


def test_a_file_and_another_runs_results_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("metrics.json", "link"):
        with pytest.raises(ValueError, match="a file: a folder is needed"):
            held(tmp_path / name)
    with pytest.raises(FileExistsError, match="--overwrite"):
        held(tmp_path, overwrite=False)
    held(tmp_path, overwrite=True)


def test_a_file_of_the_users_own_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# my project")
    held(tmp_path, overwrite=False)
    held(tmp_path, overwrite=True, written=("README.md",))
    with pytest.raises(FileExistsError, match=r"has a README\.md, which would be replaced"):
        held(tmp_path, overwrite=False, written=("README.md",))

"""Where results may go, said before any work is done."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from ltm.files import FolderInUseError, complete, output_folder, results_in, write_text


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


def test_a_second_run_is_told_who_is_there(tmp_path: Path) -> None:
    """0.1.0 had no lock: both runs wrote into one folder, and both exited with 0."""
    output = tmp_path / "out"
    with in_another_process(f"hold {output}") as other:
        with pytest.raises(FolderInUseError) as refused:
            held(output)
        assert re.fullmatch(
            rf"output {output} is in use by .*hold {output} \(process {other.pid} on "
            rf"{socket.gethostname()}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\): wait for it, or "
            r"choose another folder",
            str(refused.value),
        )
        other.kill()
        other.wait()
        held(output)  # a killed run holds nothing
    assert not (output / ".lock").exists()


@contextmanager
def in_another_process(words: str) -> Iterator[subprocess.Popen[str]]:
    code = "import sys\nfrom ltm.files import output_folder\nwith output_folder(sys.argv[2]):\n"
    code += "    print('held', flush=True)\n    sys.stdin.read()\n"
    call = [sys.executable, "-c", code, *words.split()]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(call, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_who_holds_a_folder_may_ask_again_and_others_may_not(tmp_path: Path) -> None:
    refused: list[str] = []

    def ask() -> None:
        try:
            held(tmp_path)
        except FolderInUseError as error:
            refused.append(str(error))

    with output_folder(tmp_path):
        held(tmp_path / "." / "")
        thread = Thread(target=ask)
        thread.start()
        thread.join()
    assert len(refused) == 1
    ask()
    assert len(refused) == 1


def test_those_who_share_a_folder_do_not_share_it_with_others(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(output_folder(tmp_path, shared=True))
        found: list[object] = []

        def ask() -> None:
            held(tmp_path, shared=True)
            try:
                held(tmp_path)
            except FolderInUseError as error:
                found.append(error)

        thread = Thread(target=ask)
        thread.start()
        thread.join()
    assert len(found) == 1
    held(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_several_processes_the_first_holds_the_folder(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    with output_folder(tmp_path):
        assert (tmp_path / ".lock").exists() == (rank == "0")


def earlier_results(folder: Path) -> dict[str, str]:
    with results_in(folder) as aside:
        for name in ("metrics.json", "report.html", "picture-1.png", "picture-2.png"):
            write_text(aside / name, "old")
    write_text(folder / "notes.txt", "mine")
    return contents(folder)


def contents(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()
    }


def new_results(folder: Path) -> None:
    with results_in(folder, replaced=("picture-*.png",)) as aside:
        write_text(aside / "metrics.json", "new")
        write_text(aside / "model" / "config.json", "new")
        write_text(aside / "picture-1.png", "new")


NEW = {
    "metrics.json": "new",
    "model/config.json": "new",
    "picture-1.png": "new",
    "report.html": "old",
    "notes.txt": "mine",
}


def test_results_replace_earlier_ones_as_a_whole(tmp_path: Path) -> None:
    earlier_results(tmp_path)
    new_results(tmp_path)
    assert contents(tmp_path) == NEW


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_leaves_the_earlier_results(tmp_path: Path, error: BaseException) -> None:
    before = earlier_results(tmp_path)

    def fail() -> None:
        with results_in(tmp_path) as aside:
            write_text(aside / "metrics.json", "new")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("moves", range(1, 5))
def test_a_run_killed_while_its_results_move_is_completed(
    moves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier_results(tmp_path)
    replace, done = Path.replace, []

    def killed(self: Path, target: Path) -> Path:
        if self.parent.name.startswith(".unfinished") or target.parent.name != tmp_path.name:
            return replace(self, target)
        done.append(target)
        if len(done) > moves:
            raise SystemExit("killed")
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with suppress(SystemExit):
            new_results(tmp_path)
    if done[moves:]:
        assert not (tmp_path / "metrics.json").exists()
    complete(tmp_path)
    assert contents(tmp_path) == NEW

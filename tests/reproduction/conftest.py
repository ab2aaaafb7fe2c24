"""One smoke run of all tables for the whole session, filled by two processes at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from rich.console import Console

from reproduction.rows import Store
from reproduction.running.context import Context

COMMAND = "import sys; from ltm.cli import main; sys.exit(main(sys.argv[1:]))"


def start(*arguments: str) -> subprocess.Popen[str]:
    """A process of the command line, on one thread."""
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
    )


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The output of `ltm table all --scale smoke`, run by two processes on one folder."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    output = shared / "smoke-tables"
    with FileLock(shared / "smoke-tables.lock"):
        if not output.is_dir():
            arguments = ("table", "all", "--scale", "smoke", "--output", str(output))
            both = [start(*arguments, "--device", "cpu") for _ in range(2)]
            said = [process.communicate(timeout=900)[0] for process in both]
            for number, text in enumerate(said):
                (shared / f"smoke-tables-{number}.txt").write_text(text)
            problems = [text[-3000:] for p, text in zip(both, said, strict=True) if p.returncode]
            assert not problems, problems[0]
    return output


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """A context for jobs that cost nothing."""
    import torch

    return Context(
        store=Store(tmp_path / "output"), device=torch.device("cpu"), console=Console(quiet=True)
    )

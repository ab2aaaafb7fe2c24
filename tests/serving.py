"""`ltm serve` as tests see it: the command itself, in a process of its own."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("serve_worker.py")


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running `ltm serve`."""

    port: int
    process: subprocess.Popen[bytes]
    temporary: Path
    """What it takes for the folder of temporary files."""
    output: Path
    log: Path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="utf-8").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def wait_until_serving(self, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while "Serving on" not in self.said:
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"ltm serve did not start:\n{self.said}")
            time.sleep(0.1)

    def end(self) -> int:
        """End it as services are ended, which is as Ctrl-C does; its exit code."""
        self.process.terminate()
        return self.process.wait(timeout=60)


def start(temporary: Path, output: Path) -> Served:
    """Start it on a free port; it says what it writes."""
    log = output / "log.txt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, WORKER, "--port", str(port), "--output", output / "run"],
            stderr=stream,
            cwd=output,
            env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        )
    return Served(port=port, process=process, temporary=temporary, output=output, log=log)

"""Memory of `ltm serve` over many requests: 200 in a row, then 8 at once, again and again.

    python -m reproduction.benchmarks.serve_load

The command runs in a process of its own; requests go through its API as the page's do: a picture
is uploaded, merged, drawn and timed. Settings are drawn at random, from more of them than the
server keeps merging networks for. What is reported is the process's resident memory (Linux).
"""

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from gradio_client import Client, handle_file

from ltm.data.shapes import example_pictures
from ltm.web.networks import KEPT, embedded_title
from ltm.zoo import DEMO_MODELS
from reproduction.benchmarks.recording import parser, write_page

SETTINGS = list(
    product(map(embedded_title, DEMO_MODELS), ("LTM", "ToMe"), (0.6, 0.7, 0.8, 0.9), (1, 3))
)
AT_ONCE = 8


@contextmanager
def server() -> Iterator[tuple[int, str]]:
    """Start `ltm serve`; its process id and address."""
    command = [sys.executable, "-c", "import sys; from ltm.cli import main; sys.exit(main())"]
    process = subprocess.Popen(  # noqa: S603 - our own command
        [*command, "serve", "--port", "7861"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            found = re.search(r"Serving on (\S+)", line)
            if found:
                yield process.pid, found.group(1)
                break
    finally:
        process.terminate()
        process.wait(timeout=60)


def resident(pid: int) -> float:
    """Megabytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Visitor:
    """Sends pictures with settings drawn at random."""

    def __init__(self, address: str, pictures: list[Path], seed: int) -> None:
        self.client = Client(address, verbose=False, download_files=False)
        self.pictures = pictures
        self.random = random.Random(seed)  # noqa: S311 - nothing secret

    def request(self, number: int) -> None:
        """One request; an answer without five guesses is an error."""
        picture = handle_file(str(self.pictures[number % len(self.pictures)]))
        answer = self.client.predict(picture, *self.random.choice(SETTINGS), api_name="/look")
        assert len(answer[1]["confidences"]) == 5


def measure(requests: int, bursts: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Memory after each stretch of requests."""
    pictures = [folder / f"{index}.png" for index in range(6)]
    for picture, path in zip(example_pictures(len(pictures)), pictures, strict=True):
        picture.image.save(path)
    rows = []
    with server() as (pid, address), ThreadPoolExecutor(AT_ONCE) as pool:
        visitor = Visitor(address, pictures, seed)

        def row(stretch: str, began: float, number: int) -> None:
            seconds = (time.monotonic() - began) / max(number, 1)
            rows.append(
                {"after": stretch, "megabytes": round(resident(pid), 1), "seconds_each": seconds}
            )
            print(rows[-1], flush=True)

        row("start", time.monotonic(), 0)
        stretch = 25
        for first in range(0, requests, stretch):
            began = time.monotonic()
            for number in range(first, first + stretch):
                visitor.request(number)
            row(f"{first + stretch} in a row", began, stretch)
        for burst in range(bursts):
            began = time.monotonic()
            list(pool.map(visitor.request, range(burst * AT_ONCE, (burst + 1) * AT_ONCE)))
            row(f"burst {burst + 1} of {AT_ONCE} at once", began, AT_ONCE)
    return rows


def main() -> None:
    """Run, and write what was found."""
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=200)
    options.add_argument("--bursts", type=int, default=12)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--output", type=Path, default=Path("results/export"))
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args.requests, args.bursts, args.seed, Path(folder))
    write_page(
        args.output / "serve_load",
        title="Memory of `ltm serve` over many requests",
        command="python -m reproduction.benchmarks.serve_load",
        about={"seed": args.seed, "settings": len(SETTINGS), "kept_networks": KEPT},
        columns={"after": "after", "megabytes": "resident MB", "seconds_each": "s per request"},
        rows=rows,
        notes=f"{len(SETTINGS) // 2} merging networks are asked for, {KEPT} are kept: some "
        "requests convert a network anew, and the first 50 fill what is kept.",
    )


if __name__ == "__main__":
    main()

"""The speed of the paper's networks on a GPU: all of results/speed by one command.

Every call of `ltm benchmark` is one network at one batch size. Calls of a wave get ready side by
side and are timed one after the other, so that nothing is prepared while something is timed. Rows
that are there already are left out; a call that fails or takes too long leaves the others alone.

python -m reproduction.benchmarks.speed_grid
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from reproduction.benchmarks.recording import parser

VITS = ("vit_base_patch16_224", "vit_small_patch16_224")
GRIDS = (
    "swin_base_patch4_window7_224",
    "swin_tiny_patch4_window7_224",
    "mobilevit_s",
    "mobilevit_xs",
    "efficientvit_b1",
    "efficientvit_b1 288",
)
PEERS = ("tome", "tofu", "ltmp")
LEAST = {"mobilevit_xs": ("tome:ratio=0.72", "tofu:ratio=0.72", "ltmp:ratio=0.75")}
"""What peers can do on a network on which they cannot go down to 0.7."""
BATCHES = (512, 128, 32, 8, 1)
LARGE = 512
"""Networks in batches of this take so much memory that half as many are prepared at once."""


class Call(NamedTuple):
    """One network, one batch size: what is timed in one interleaved run."""

    model: str
    methods: Sequence[str]
    batch_size: int
    modes: Sequence[str]
    rounds: int
    options: Sequence[str] = ("--dtypes", "fp16")

    @property
    def name(self) -> str:
        return f"{self.model}, batch {self.batch_size}, {' and '.join(self.modes)}"

    def command(self, output: Path) -> list[str]:
        model, _, image_size = self.model.partition(" ")
        size = ["--image-size", image_size] if image_size else []
        return [
            *(sys.executable, "-m", "ltm", "benchmark", "--resume", "--output", str(output)),
            *("--models", model, *size, "--methods", ",".join(self.methods)),
            *("--batch-sizes", str(self.batch_size), "--modes", ",".join(self.modes)),
            *("--rounds", str(self.rounds), *self.options),
        ]


def ours(model: str) -> tuple[str, ...]:
    """Weighted and static, and on ViTs matching alone."""
    return ("ltm", "ltm-uniform", "ltm-static") if model in VITS else ("ltm", "ltm-static")


def modes() -> Iterator[Call]:
    """Every network and method, eager and captured."""
    for batch_size, model in itertools.product(BATCHES, (*VITS, *GRIDS)):
        peers = LEAST.get(model, PEERS)
        yield Call(model, (*peers, *ours(model)), batch_size, ("eager", "cudagraph"), 11)


def compiled() -> Iterator[Call]:
    """Compiled and captured, the best mode of all: the peers on ViTs only, for want of time."""
    for batch_size, model in itertools.product((512, 128), (*VITS, *GRIDS)):
        peers = PEERS if model in VITS else ()
        yield Call(model, (*peers, *ours(model)), batch_size, ("compiled-cudagraph",), 14)
    for batch_size, model in itertools.product((8, 1), VITS):
        yield Call(model, (*PEERS, *ours(model)), batch_size, ("compiled-cudagraph",), 14)


def ratios() -> Iterator[Call]:
    """ViT-B at other shares of its multiply-adds."""
    shares = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
    methods = [f"{kind}:ratio={share}" for share in shares for kind in ours(VITS[0])[1:]]
    yield Call(VITS[0], methods, 128, ("cudagraph",), 11)


def training() -> Iterator[Call]:
    """A training step of ViT-S."""
    options = "--dtypes", "bf16", "--scopes", "training"
    yield Call(VITS[1], ("ltmp", "ltm", "ltm-uniform"), 64, ("eager",), 9, options)


PARTS = {part.__name__: part for part in (compiled, modes, ratios, training)}


def waves(calls: Sequence[Call], processes: int) -> Iterator[list[Call]]:
    """Calls that are prepared at once: as many as there is memory for."""
    for large, group in itertools.groupby(calls, key=lambda call: call.batch_size >= LARGE):
        left, number = list(group), max(1, processes // (2 if large else 1))
        while left:
            yield left[:number]
            left = left[number:]


def run(wave: Sequence[Call], output: Path, seconds: float, options: Sequence[str]) -> None:
    """Start all calls of a wave, wait for them, and say how each ended."""
    threads = str(max(1, (os.cpu_count() or 1) // len(wave)))
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": threads}
    until = time.monotonic() + seconds
    running = []
    for call in wave:
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read and closed below
        command = [*call.command(output), *options]
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        running.append((call, process, log))
    for call, process, log in running:
        with log:
            try:
                process.wait(max(1.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
            failed = process.wait() != 0
            log.seek(0)
            said = log.read().strip().splitlines() or ["nothing was said"]
        print(f"{'failed' if failed else 'done'}: {call.name}: {said[-1]}", flush=True)


def main() -> None:
    """Go through the waves of every part."""
    options = parser(__doc__)
    options.add_argument("--output", type=Path, default=Path("results/speed"))
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--models", nargs="+", choices=(*VITS, *GRIDS), default=(*VITS, *GRIDS))
    options.add_argument("--batch-sizes", nargs="+", type=int, help="all of the parts unless given")
    options.add_argument("--processes", type=int, default=8, help="calls that get ready at once")
    options.add_argument("--seconds", type=float, default=900, help="longest time for a wave")
    options.add_argument("--minutes", type=float, help="start no further wave after this many")
    options.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    options.add_argument("options", nargs="*", help="after --: further options of ltm benchmark")
    args = options.parse_args()
    began = time.monotonic()
    for part in args.parts:
        calls = [
            call
            for call in PARTS[part]()
            if call.model in args.models
            and (args.batch_sizes is None or call.batch_size in args.batch_sizes)
        ]
        for wave in waves(calls, args.processes):
            if args.dry_run:
                lines = (call.command(args.output)[1:] for call in wave)
                print(*(" ".join(("python", *line, *args.options)) for line in lines), "", sep="\n")
            elif args.minutes is None or time.monotonic() - began < 60 * args.minutes:
                run(wave, args.output, args.seconds, args.options)


if __name__ == "__main__":
    main()

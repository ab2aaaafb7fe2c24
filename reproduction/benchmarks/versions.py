"""Speed of this version against another one: two processes take turns on one GPU.

    python -m reproduction.benchmarks.versions --other ../ltm-0.1.0/src --output results/speed/versions.json
    python -m reproduction.benchmarks.versions --other ../ltm-0.1.0/src --set grid
        --output results/speed/versions_grid.json

Each process imports one version, converts the same network at 0.70 of its MACs, freezes it and
captures a CUDA graph of it. The rounds then alternate between the two processes, and who goes first
changes from round to round. A ratio is the other version's time over this version's, round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch

import ltm


class Case(NamedTuple):
    """A network, a batch, and what merges: `default` is a matching on ViTs, static on the others.

    `weighted` is the default with class statistics, which make its weights informative.
    """

    model: str
    batch: int
    kind: str = "default"
    size: int = 224

    @property
    def name(self) -> str:
        """As rows call it."""
        size = "" if self.size == 224 else f" {self.size} px"
        kind = "" if self.kind == "default" else f", {self.kind}"
        return f"{self.model}{size} batch {self.batch}{kind}"


VIT_B, VIT_S = "vit_base_patch16_224", "vit_small_patch16_224"
SWIN_T = "swin_tiny_patch4_window7_224"
GRIDS = (
    (SWIN_T, 224),
    ("swin_base_patch4_window7_224", 224),
    ("mobilevit_s", 224),
    ("mobilevit_xs", 224),
    ("efficientvit_b1", 224),
    ("efficientvit_b1", 288),
)
SETS = {
    "few": (
        Case(VIT_B, 1),
        Case(VIT_B, 128),
        Case(VIT_S, 1),
        Case(VIT_S, 128),
        Case(SWIN_T, 128),
        Case(VIT_B, 128, "weighted"),
        Case(VIT_S, 1, "weighted"),
    ),
    "grid": (
        *(
            Case(model, batch, kind)
            for batch in (128, 1, 8, 32, 512)
            for model in (VIT_B, VIT_S)
            for kind in ("default", "static", "weighted")
        ),
        *(
            Case(model, batch, kind, size)
            for batch in (128, 1, 8, 32, 512)
            for model, size in GRIDS
            for kind in ("default", "weighted")
        ),
    ),
}


def _prepare(case: Case) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = timm.create_model(case.model).eval()
    kind = {"support": "learned"} if case.kind == "static" else {}  # as every version takes it
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        ltm.merge_tokens_(model, ltm.LTM(ratio=0.7, **kind), case.size)  # pyright: ignore[reportArgumentType]
    shape = 3, case.size, case.size
    images = torch.randn(case.batch, *shape, device="cuda")
    if case.kind == "weighted":
        labels = torch.arange(64, device="cuda") % 1000
        ltm.collect_statistics_(model, [(torch.randn(64, *shape, device="cuda"), labels)] * 2)
    ltm.freeze_(model)
    model.half()
    return ltm.capture(model, images.half()), images.half()


def _serve() -> None:
    """Prepare a case when it comes in as a list, and time it at every empty line."""
    for line in sys.stdin:
        if line.strip():
            network = images = None  # free before the next one is made
            torch.cuda.empty_cache()
            network, images = _prepare(Case(*json.loads(line)))
            print(json.dumps("ready"), flush=True)
            continue
        assert network is not None
        assert images is not None
        milliseconds = _time(network, images, repeats=3)
        repeats = max(3, round(60 / milliseconds))
        print(json.dumps(_time(network, images, repeats)), flush=True)


def _time(network: Any, images: torch.Tensor, repeats: int) -> float:
    """Milliseconds of one forward.

    The timing of other benchmarks cannot be imported: they need this version.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        network(images)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


class _Version:
    """A process that runs one version."""

    def __init__(self, source: Path) -> None:
        command = [sys.executable, __file__, "--serve"]
        environment = {**os.environ, "PYTHONPATH": str(source)}
        self._process = subprocess.Popen(  # noqa: S603 - this file again
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a version's process ended; its error is above")
        return json.loads(line)

    def send(self, line: str) -> None:
        """Ask for the next case, or for a time."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def time(self) -> float:
        """Milliseconds of one forward."""
        self.send("")
        return self.read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _compare(other: Path, cases: Sequence[Case], rounds: int) -> Iterator[dict[str, Any]]:
    here = Path(__file__).parents[2] / "src"
    versions = {"this": _Version(here), "other": _Version(other)}
    for case in cases:
        for version in versions.values():
            version.send(json.dumps(case))
        for version in versions.values():
            assert version.read() == "ready"
        times: dict[str, list[float]] = {"this": [], "other": []}
        for number in range(rounds):
            order = ("this", "other") if number % 2 else ("other", "this")
            for name in order:
                times[name].append(versions[name].time())
        ratios = [b / a for a, b in zip(times["this"], times["other"], strict=True)]
        yield {
            "case": case.name,
            "this_ms": statistics.median(times["this"]),
            "other_ms": statistics.median(times["other"]),
            "speed_against_other": statistics.median(ratios),
            "rounds": rounds,
        }
    for version in versions.values():
        version.close()


def main() -> None:
    """Compare two versions, and write a row per case."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--other", type=Path, help="the src folder of the other version")
    options.add_argument("--set", choices=SETS, default="few")
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--output", type=Path)
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve:
        _serve()
        return
    if arguments.other is None:
        options.error("--other: give the src folder of the other version")
    from reproduction.benchmarks.recording import machine  # noqa: PLC0415 - it needs this version

    command = f"python -m reproduction.benchmarks.versions {' '.join(sys.argv[1:])}"
    about = {"command": command, "date": time.strftime("%Y-%m-%d"), **machine()}
    about["dtype"] = "float16, CUDA graphs"
    rows = []
    for row in _compare(arguments.other.resolve(), SETS[arguments.set], arguments.rounds):
        print(json.dumps(row), flush=True)
        rows.append(row)
        if arguments.output is not None:
            arguments.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Speed of this version against another one: two processes take turns on one GPU.

    python -m reproduction.benchmarks.versions --other ../ltm-0.1.0/src --output results/speed/versions.json

Each process imports one version, converts the same networks at 0.70 of their MACs, freezes them and
captures a CUDA graph of each. The rounds then alternate between the two processes, and who goes first
changes from round to round. A ratio is the other version's time over this version's, round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import timm
import torch

import ltm

CASES = {
    "vit_base_patch16_224 batch 1": ("vit_base_patch16_224", 1, False),
    "vit_base_patch16_224 batch 128": ("vit_base_patch16_224", 128, False),
    "vit_small_patch16_224 batch 1": ("vit_small_patch16_224", 1, False),
    "vit_small_patch16_224 batch 128": ("vit_small_patch16_224", 128, False),
    "swin_tiny_patch4_window7_224 batch 128": ("swin_tiny_patch4_window7_224", 128, False),
    "vit_base_patch16_224 batch 128, weighted": ("vit_base_patch16_224", 128, True),
    "vit_small_patch16_224 batch 1, weighted": ("vit_small_patch16_224", 1, True),
}
"""Name: network, batch, and whether class statistics make the weights informative."""


def _prepare(name: str, batch: int, weighted: bool) -> Any:
    torch.manual_seed(0)
    model = timm.create_model(name).cuda().eval()
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.7))
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    if weighted:
        labels = torch.arange(64, device="cuda") % 1000
        ltm.collect_statistics_(model, [(torch.randn(64, 3, 224, 224, device="cuda"), labels)] * 2)
    ltm.freeze_(model)
    model.half()
    return ltm.capture(model, images.half()), images.half()


def _serve() -> None:
    """Prepare every case, then time one whenever its name comes in."""
    ready = {name: _prepare(*case) for name, case in CASES.items()}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        network, images = ready[json.loads(line)]
        repeats = 300 if images.shape[0] == 1 else 20
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(max(2, repeats // 5)):
            network(images)
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            network(images)
        end.record()
        torch.cuda.synchronize()
        print(json.dumps(start.elapsed_time(end) / repeats), flush=True)


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

    def time(self, case: str) -> float:
        """Milliseconds of one forward."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _compare(other: Path, rounds: int) -> list[dict[str, Any]]:
    here = Path(__file__).parents[2] / "src"
    versions = {"this": _Version(here), "other": _Version(other)}
    for version in versions.values():
        assert version.read() == "ready"
    rows = []
    for case in CASES:
        times: dict[str, list[float]] = {"this": [], "other": []}
        for number in range(rounds):
            order = ("this", "other") if number % 2 else ("other", "this")
            for name in order:
                times[name].append(versions[name].time(case))
        ratios = [b / a for a, b in zip(times["this"], times["other"], strict=True)]
        row = {
            "case": case,
            "this_ms": statistics.median(times["this"]),
            "other_ms": statistics.median(times["other"]),
            "speed_against_other": statistics.median(ratios),
            "rounds": rounds,
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    for version in versions.values():
        version.close()
    return rows


def main() -> None:
    """Compare two versions, and write a row per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="the src folder of the other version")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        _serve()
        return
    rows = _compare(arguments.other.resolve(), arguments.rounds)
    about = {
        "command": "python -m reproduction.benchmarks.versions --other ../ltm-0.1.0/src",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "dtype": "float16, CUDA graphs",
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

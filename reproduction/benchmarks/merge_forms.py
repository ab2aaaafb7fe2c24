"""Time the forms of a merge against the dense one, interleaved: cost follows the form, not n x p.

python -m reproduction.benchmarks.merge_forms --output results/merge_forms.json
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ltm.core.matching import match_alternate, merge_in_order
from ltm.core.merge import DenseMerge, GridMerge, kronecker
from ltm.core.support import axis_candidates, choose, initial_logits, support_matrix
from reproduction.benchmarks.recording import parser, write_json


def axis(num_in: int, num_out: int) -> torch.Tensor:
    """A learned support of one axis, as it starts."""
    candidates = axis_candidates(num_in, num_out)
    return support_matrix(choose(initial_logits(candidates)), candidates, num_in).detach()


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each case, the cases taking turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 2):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            if turn >= 2:
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print the table, and write it."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--output", type=Path)
    arguments = options.parse_args()
    torch.manual_seed(0)
    side, merged, width, batch = 56, 49, 96, 8
    x = torch.randn(batch, side * side, width)
    weight = torch.rand(batch, side * side) + 0.5
    rows, columns = axis(side, merged), axis(side, merged)
    dense = DenseMerge.from_support(kronecker(rows, columns))
    grid = GridMerge(rows=rows, columns=columns)
    weighted = GridMerge(rows=rows, columns=columns, weight=weight)
    match = match_alternate(x, side * side - merged * merged)
    matched = merge_in_order(match, weight)
    torch.testing.assert_close(grid(x), dense(x), atol=1e-5, rtol=1e-4)
    cases = {
        "dense": lambda: dense(x),
        "separable grid": lambda: grid(x),
        "separable grid, weighted": lambda: weighted(x),
        "matched groups": lambda: matched(x),
    }
    milliseconds = interleaved(cases, arguments.rounds)
    result = {
        "setting": f"{side} x {side} to {merged} x {merged}, width {width}, batch {batch}, float32",
        "milliseconds": milliseconds,
        "times_faster_than_dense": {n: milliseconds["dense"] / t for n, t in milliseconds.items()},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "command": "python -m reproduction.benchmarks.merge_forms",
        "seed": 0,
    }
    if arguments.output:
        write_json(arguments.output, result)
    else:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

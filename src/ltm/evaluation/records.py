"""What is written down of every measurement: the machine, and numbers as text."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_PACKAGES = ("ltm", "timm", "torchvision", "triton", "onnxruntime")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Hardware and versions."""

    device: str
    """Name of the accelerator, or of the processor."""
    cpu: str
    cores: int
    threads: int
    """Threads that torch uses."""
    system: str
    python: str
    packages: dict[str, str]
    cuda: str | None
    cudnn: str | None
    float32_products: str
    """torch's precision of float32 matrix products; "highest" uses no TF32."""


def describe(device: torch.device) -> Environment:
    """Describe what a measurement depends on: this machine and its versions."""
    cpu = _processor()
    on_cuda = device.type == "cuda"
    cudnn = torch.backends.cudnn.version() if on_cuda else None
    return Environment(
        device=torch.cuda.get_device_name(device) if on_cuda else cpu,
        cpu=cpu,
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages={
            "torch": torch.__version__,  # with its build, which its metadata leaves out
            **{name: found for name in _PACKAGES if (found := _version(name))},
        },
        cuda=torch.version.cuda if on_cuda else None,
        cudnn=None if cudnn is None else str(cudnn),
        float32_products=torch.get_float32_matmul_precision(),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    known = Path("/proc/cpuinfo")
    if known.is_file():
        for line in known.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def percent(share: float, digits: int = 2) -> str:
    """A share in per cent; halves are rounded up."""
    # Beyond twelve digits, a ratio of counts is noise of binary fractions.
    exact = Decimal(str(round(100 * share, 12)))
    return str(exact.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def points(share: float) -> str:
    """A difference in percentage points, with its sign; zero has none."""
    text = percent(abs(share))
    return text if not float(text) else f"{'-' if share < 0 else '+'}{text}"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as plain text in columns, the first to the left; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in rows
    )

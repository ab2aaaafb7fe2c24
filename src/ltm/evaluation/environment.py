"""What a measurement was made on and with: without it a time means nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
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
    """torch's precision of float32 matrix products: "highest" is no TF32."""


def describe(device: torch.device) -> Environment:
    """Describe this machine as far as a measurement depends on it."""
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

"""How a step runs: by torch or a Triton kernel, at which precision, beside which other work.

Triton kernels are for inference. They run on NVIDIA GPUs with Triton, unless `LTM_KERNELS=0` is in
the environment, and compute the same as the torch definition of the step, which runs everywhere
else.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

ZERO_LENGTH = 1e-12
"""A feature no longer than this has no direction."""
_OLDEST = (7, 5)
"""Compute capability of the oldest GPU that Triton builds for."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FEW_MAPS = 16
"""Measured at one image and at 128; between them the limit is a guess."""
_LIBRARY = torch.library.Library("ltm", "DEF")
_P = ParamSpec("_P")
_R = TypeVar("_R")

_enabled = os.environ.get("LTM_KERNELS", "1") != "0"
_installed = find_spec("triton") is not None


def enable(on: bool = True) -> bool:
    """Switch all kernels on or off; returns the setting before."""
    global _enabled
    before, _enabled = _enabled, on
    return before


def uses_triton(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel computes a step on these tensors."""
    if not (_enabled and _installed and _runs_on(x)) or is_recorded():
        return False
    return not torch.is_grad_enabled() or not any(
        y is not None and y.requires_grad for y in (x, *others)
    )


def compact(x: Tensor) -> Tensor:
    """The tensor in contiguous layout if kernels read it, so that it is copied only once."""
    return x.contiguous() if not x.is_contiguous() and uses_triton(x) else x


def is_map(tokens: Tensor) -> bool:
    """Whether tokens `b n c` have the memory layout of a map, channels first."""
    _, n, c = tokens.shape
    return n > 1 and tokens.stride() == (c * n, 1, n)


def stays_map(tokens: Tensor) -> bool:
    """Whether kernels merge a map in its own layout, channels first.

    With few images that saves copies. With many, convolutions run faster with channels last.
    """
    return is_map(tokens) and uses_triton(tokens) and tokens.shape[0] < _FEW_MAPS


def is_recorded() -> bool:
    """Whether a network is exported, so that it must run without our own operators.

    This reads the flag itself, because torch.compile before 2.12 takes `is_exporting` for true.
    """
    flag: bool | None = getattr(torch.compiler, "_is_exporting_flag", None)
    exporting = torch.compiler.is_exporting() if flag is None else flag
    return exporting or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def widen(x: Tensor) -> Tensor:
    """Return `x` in float32, or unchanged if it is float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Suspend autocast on the device of `x`, which would run products in half precision.

    If autocast is off this does nothing, so that exported graphs do not contain it.
    """
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def mark(x: Tensor) -> torch.cuda.Event | None:
    """This place in a CUDA graph for inference, from which a `branch` may begin; else None.

    Without a graph a second stream costs more CPU time than it saves.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    if not (x.is_cuda and uses_triton(x) and x.device.index == torch.cuda.current_device()):
        return None
    if not torch.cuda.is_current_stream_capturing():
        return None
    place = torch.cuda.Event()
    place.record()
    return place


@contextmanager
def branch(since: torch.cuda.Event | None) -> Generator[Callable[[], None]]:
    """Run what is inside in parallel to what follows the mark, until the yielded join.

    What is inside may only read what was there at the mark, and has to be kept until the join. What
    it makes may be used until the next mark: the branch that begins there takes its memory again.
    Without a mark it runs in order.
    """
    if since is None:
        yield lambda: None
        return
    here, there = torch.cuda.current_stream(), _second_stream(torch.cuda.current_device())
    there.wait_event(since)
    with torch.cuda.stream(there):
        yield lambda: here.wait_stream(there)


def alongside(since: torch.cuda.Event | None, run: Callable[[], _R]) -> _R:
    """Run a function in parallel to what came after the mark; its result is there afterwards."""
    if since is None:  # not left to `branch`: compiled graphs cannot contain its generator
        return run()
    with branch(since) as join:
        found = run()
    join()
    return found


@cache
def _second_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def operator(shapes: Callable[_P, _R]) -> Callable[_P, _R]:
    """An operator of torch, from a function that makes empty outputs of the right shapes.

    As such a kernel can be captured by CUDA graphs, compiled with the network around it, and
    counted. The function of the same name in `kernels.triton` does the work.
    `torch.library.custom_op` takes three times as long to be called: it cares for gradients, which
    `uses_triton` keeps away.
    """
    shapes = unwrap(shapes)  # a type checker around it would refuse symbolic numbers
    name = shapes.__name__.lstrip("_")

    def run(x: Tensor, *others: Any) -> Any:
        with torch.cuda.device_of(x):
            return _kernel(name)(x, *others)

    schema = torch.library.infer_schema(shapes, mutates_args=(), op_name=name)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ltm::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.ltm, name).default


@cache
def _kernel(name: str) -> Callable[..., Any]:
    """A kernel by name; its module is imported on first use, because it needs Triton."""
    return getattr(import_module("ltm.kernels.triton"), name)


def _runs_on(x: Tensor) -> bool:
    if not x.is_cuda or x.dtype not in _DTYPES or torch.version.cuda is None:
        return False
    # Compiled graphs need Triton anyway, and cannot contain the trial run.
    return torch.compiler.is_compiling() or _works_on(x.device.index)


@cache
def _works_on(device: int) -> bool:
    """Whether a kernel can be built and run here: it takes a C compiler and a recent GPU."""
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return False
    try:
        one = torch.zeros(1, 1, dtype=torch.int32, device=f"cuda:{device}")
        token, weight = one.float()[..., None], one.float()
        with torch.cuda.device(device):
            _kernel("merge_groups")(token, weight, None, None, one, one, one, False)
    except Exception as error:  # noqa: BLE001 - whatever fails, the torch path works
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"Triton's kernels do not run on cuda:{device} ({reason}); torch does their work. "
            "LTM_KERNELS=0 chooses it without this warning.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True

"""Run a network as a CUDA graph: the CPU launches a whole forward at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ltm.core.validation import first_line


class Captured:
    """A recorded forward, replayed on batches of at most as many images.

    A graph reads the memory it was recorded with, so it keeps the model and its input alive.
    """

    def __init__(self, run: Callable[[Tensor], Any], images: Tensor) -> None:
        self.run, self.images = run, images.clone()
        self._replay, self._output = _record(run, self.images)

    def __call__(self, images: Tensor) -> Any:
        """The output of the network; with `self.images` itself as input nothing is copied."""
        if images is self.images:
            self._replay()
            return self._output
        number, own = len(images), self.images
        if images.shape[1:] != own.shape[1:] or number > len(own):
            raise ValueError(
                f"images: got {list(images.shape)}; the network was captured for at most "
                f"{list(own.shape)}."
            )
        own[:number].copy_(images, non_blocking=True)
        self._replay()
        return tree_map_only(Tensor, lambda y: y[:number].clone(), self._output)


def capture(model: Callable[[Tensor], Any], images: Tensor) -> Captured:
    """Record a network's forward as a CUDA graph, for batches like `images` or smaller.

    In eager mode the CPU often cannot launch small kernels fast enough, so the GPU waits. A graph
    is launched at once. `model` may be compiled too. Do not change it afterwards. `images` must be
    on its device and in its precision.
    """
    if images.device.type != "cuda":
        raise ValueError(
            f"images: they are on {images.device}; CUDA graphs need an NVIDIA GPU, with model and "
            "images on it. Elsewhere call the model itself, or compile it."
        )
    if getattr(model, "training", False):
        raise ValueError("model: it is in training mode; call model.eval() first.")
    return Captured(model, images)


def _record(run: Callable[[Tensor], Any], images: Tensor) -> tuple[Callable[[], None], Any]:
    """A function that runs again on the contents of `images`, and the tensors it writes to."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(images.device), torch.no_grad():
        _refuse_synchronisation(run, images)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run(images)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            output = run(images)
    return graph.replay, output


def _refuse_synchronisation(run: Callable[[Tensor], Any], images: Tensor) -> None:
    """Fail before the capture: one that fails halfway leaves the allocator in a broken state."""
    run(images)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(images)
    except RuntimeError as error:
        raise ValueError(
            "it cannot be captured: its token counts, or something else that the processor waits "
            f"for, depend on the images ({first_line(error)})"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)

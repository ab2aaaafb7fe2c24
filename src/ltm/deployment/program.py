"""A network as a torch.export program: traced once, for any batch size."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from ltm.api import freeze_, image_size_of, is_merging
from ltm.core.cost import channels_of

SUFFIX = ".pt2"

# Batch 1 would be taken for a constant.
_EXAMPLE_BATCH = 2


def deployable(model: nn.Module) -> nn.Module:
    """A copy that is ready to leave: on the processor, in float32, in evaluation mode, frozen."""
    ready = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    if is_merging(ready):
        freeze_(ready)
    for module in ready.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            # Folded masks may be views, and files hold whole tensors.
            whole = buffer.clone(memory_format=torch.contiguous_format)
            module.register_buffer(name, whole, persistent=name in module.state_dict())
    return ready


@torch.no_grad()
def trace(model: nn.Module, image_size: tuple[int, int] | None = None) -> ExportedProgram:
    """Trace a `deployable` network for any number of images of one size.

    LTMP is traced in its masked form, whose shapes do not depend on the images.
    """
    shape = channels_of(model), *image_size_of(model, image_size)
    images = torch.zeros(_EXAMPLE_BATCH, *shape)
    program = torch.export.export(model, (images,), dynamic_shapes=({0: Dim.DYNAMIC},))
    # Paths of whoever exported it are nobody else's business.
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def save_program(program: ExportedProgram, path: Path) -> Path:
    """Write a program as .pt2.

    `torch.export.load` reads it back, and unpickles: load only files that you trust.
    """
    torch.export.save(program, path)
    return path

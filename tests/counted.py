"""Costs that tests have counted: equal networks cost the same, so others need not count again.

Most of the time of a conversion goes into counting multiply-adds on `meta`, and hundreds of tests
convert the same toys.
"""

import pytest
import torch
from torch import nn

from ltm.adapters import planning
from ltm.methods.base import Merger

_Costs = dict[object, int]


def structure_of(model: nn.Module) -> object:
    """All that the cost of an untouched network can depend on; None of any other."""
    parts: list[object] = []
    for name, module in model.named_modules():
        values = vars(module)
        watched = "forward" in values or module._forward_hooks or module._forward_pre_hooks
        if watched or isinstance(module, Merger):
            return None
        plain = [(k, v) for k, v in values.items() if k != "training" and _is_plain(v)]
        shapes = [(k, tuple(p.shape)) for k, p in module.named_parameters(recurse=False)]
        shapes += [(k, tuple(b.shape)) for k, b in module.named_buffers(recurse=False)]
        parts.append((name, type(module), tuple(plain), tuple(shapes)))
    return tuple(parts)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | torch.Size):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def share_counts_(patch: pytest.MonkeyPatch) -> None:
    """Give every planner of an equal network and size the costs that were counted before."""
    made, counted = planning.Planner.__init__, planning.count_macs
    costs: dict[object, _Costs] = {}
    whole: dict[object, int] = {}

    def init(self, model, adapter, config, image_size) -> None:
        made(self, model, adapter, config, image_size)
        structure = structure_of(self.shadow)
        if structure is not None:
            self._costs = costs.setdefault((structure, type(adapter), tuple(image_size)), {})

    def count(shadow, images) -> int:
        structure = structure_of(shadow)
        if structure is None:
            return counted(shadow, images)
        key = structure, tuple(images.shape)
        if key not in whole:
            whole[key] = counted(shadow, images)
        return whole[key]

    patch.setattr(planning.Planner, "__init__", init)
    patch.setattr(planning, "count_macs", count)

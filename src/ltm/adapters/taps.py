"""Reading what a projection of the host gives: merging blocks need its queries and keys."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from ltm.adapters.base import become_
from ltm.adapters.state import TokenState


class Tapped(nn.Module):
    """A projection of the host whose output the block may read once."""

    tap: tuple[TokenState, Any]

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        state, key = self.tap
        if state.merging:
            state.write(key, out)
        return out


class TappedLinear(Tapped, nn.Linear):
    """A tapped linear layer."""


class TappedConv2d(Tapped, nn.Conv2d):
    """A tapped convolution."""


_TAPPED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: TappedLinear,
    nn.Conv2d: TappedConv2d,
}


def tap_(projection: nn.Module, state: TokenState, key: Any) -> None:
    """Make a projection leave its output in the state, whatever its class (LoRA's, for example)."""
    host = type(projection)
    if host not in _TAPPED:
        _TAPPED[host] = type(f"Tapped{host.__name__}", (Tapped, host), {})
    projection.__class__ = _TAPPED[host]
    cast("Tapped", projection).tap = (state, key)


def untap_(projection: nn.Module) -> None:
    """Undo `tap_`."""
    if isinstance(projection, Tapped):
        del projection.tap
        become_(projection, type(projection).__mro__[2])

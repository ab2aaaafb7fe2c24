"""The learned support of one axis.

Letters: n tokens, p targets.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from ltm.core.support import (
    Candidates,
    axis_candidates,
    choose,
    grid_candidates,
    initial_logits,
    resample_logits,
    support_matrix,
)


class Axis(nn.Module):
    """The learned support of one axis: of a sequence of patches, or of one side of a grid."""

    index: Tensor
    valid: Tensor
    anchor: Tensor
    home: Tensor

    def __init__(self, num_in: int, num_out: int, patches: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.num_in, self.num_out, self.patches = num_in, num_out, patches
        candidates = self._candidates(num_in, num_out)
        self.logits = nn.Parameter(initial_logits(candidates))
        for name in ("index", "valid", "anchor", "home"):
            self.register_buffer(name, getattr(candidates, name), persistent=False)

    def _candidates(self, num_in: int, num_out: int) -> Candidates:
        if self.patches is None:
            return axis_candidates(num_in, num_out)
        return grid_candidates(self.patches, num_in, num_out)

    def forward(self, num_in: int, num_out: int, noise: float) -> Float[Tensor, "n p"]:
        candidates, logits = Candidates(self.index, self.valid, self.anchor, self.home), self.logits
        if (num_in, num_out) != (self.num_in, self.num_out):
            other = self._candidates(num_in, num_out)
            candidates = Candidates(*(getattr(other, f).to(logits.device) for f in vars(other)))
            logits = _fit_width(resample_logits(logits, num_out), candidates)
        return support_matrix(choose(logits, noise=noise), candidates, num_in)


def _fit_width(logits: Tensor, candidates: Candidates) -> Tensor:
    """Another size may have another number of candidates; what is new starts as it would."""
    width = candidates.index.shape[1]
    if logits.shape[1] == width:
        return logits
    return initial_logits(candidates)

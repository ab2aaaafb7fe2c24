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
        candidates = self._candidates(num_in, num_out, patches)
        self.logits = nn.Parameter(initial_logits(candidates))
        for name in ("index", "valid", "anchor", "home"):
            self.register_buffer(name, getattr(candidates, name), persistent=False)

    def _candidates(self, num_in: int, num_out: int, patches: tuple[int, int] | None) -> Candidates:
        if patches is None:
            return axis_candidates(num_in, num_out)
        return grid_candidates(patches, num_in, num_out)

    def forward(
        self, num_in: int, num_out: int, noise: float, patches: tuple[int, int] | None = None
    ) -> Float[Tensor, "n p"]:
        """The support; `patches` is the shape of the image, where it is not the planned one."""
        candidates, logits, patches = self._own(), self.logits, patches or self.patches
        if (num_in, num_out, patches) != (self.num_in, self.num_out, self.patches):
            other = self._candidates(num_in, num_out, patches)
            candidates = Candidates(*(getattr(other, f).to(logits.device) for f in vars(other)))
            logits = self.fitted(candidates)
        return support_matrix(choose(logits, noise=noise), candidates, num_in)

    def _own(self) -> Candidates:
        return Candidates(self.index, self.valid, self.anchor, self.home)

    def fitted(self, candidates: Candidates) -> Float[Tensor, "p k"]:
        """Logits for other candidates: those start anew, and what was learned is added to them.

        The start is a partition, in which no token is left out; resampled it would be none. Another
        number of candidates has learned nothing.
        """
        start = initial_logits(candidates).to(self.logits)
        learned = resample_logits(self.logits - initial_logits(self._own()), len(start))
        return start + learned if learned.shape == start.shape else start

    def adopt_(self, other: Axis) -> None:
        """Take over what another axis has learned."""
        same = (self.num_in, self.num_out, self.patches) == (
            other.num_in,
            other.num_out,
            other.patches,
        )
        self.logits.data.copy_(other.logits if same else other.fitted(self._own()))

"""Merges into groups, which matching makes: every token goes to exactly one place.

Letters: b images, n patch tokens before, p after, k prefix tokens, c channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ltm.core.merge import Merge, Merged
from ltm.kernels import fused, operators

_TINY = 1e-12


@dataclass(frozen=True, eq=False, kw_only=True)
class MatchedMerge(Merge):
    """A merge into groups: every token goes to exactly one place.

    It costs n additions; on a GPU a product with a 0/1 matrix does them faster.
    """

    assignment: Int[Tensor, "b kn"]
    """The place of each token after the merge, prefix tokens included."""
    weight: Float[Tensor, "b kn"]
    """The weight of each token in its group; a token of weight zero is pruned."""
    num_places: int
    """Tokens after the merge, prefix included."""
    keep_norm: bool = False
    """Give each merged token the largest norm of its group (averaging shrinks norms)."""
    order: tuple[Int[Tensor, "b kp"], Int[Tensor, "b r"]] | None = None
    """Who stays and who leaves, where a kernel has told: then another one does the merge."""

    @property
    def num_in(self) -> int:
        return self.assignment.shape[1] - self.num_prefix

    @property
    def num_out(self) -> int:
        return self.num_places - self.num_prefix

    def _add(self, x: Tensor) -> Tensor:
        """Sums over the groups."""
        if x.is_cuda and x.shape[-1] > 1:
            # One product of a 0/1 matrix: many times faster than scattering on a GPU.
            places = torch.arange(self.num_places, device=x.device)
            return (self.assignment[:, None] == places[:, None]).to(x.dtype) @ x
        index = self.assignment[..., None].expand(-1, -1, x.shape[-1])
        return x.new_zeros(x.shape[0], self.num_places, x.shape[-1]).scatter_add(1, index, x)

    def _total(self) -> Tensor:
        return self._add(self.weight[..., None]).clamp_min(_TINY)

    def _weighed(self, x: Tensor) -> Tensor:
        """Tokens times their share of their group: who is alone in it stays exactly as it is."""
        total = self._total().gather(1, self.assignment[..., None])
        return x * (self.weight[..., None] / total).to(x.dtype)

    def average(self, x: Float[Tensor, "b kn c"]) -> Float[Tensor, "b kp c"]:
        return self._add(self._weighed(x))

    def __call__(self, x: Float[Tensor, "b kn c"]) -> Float[Tensor, "b kp c"]:
        if self.order is not None and fused.takes(x, self.weight):
            return self._fused(x, None, None, self.order).tokens
        if not self.keep_norm:
            return self.average(x)
        summed = self.average(x)
        norm = _length(x) * (self.weight > 0)
        largest = norm.new_zeros(x.shape[0], self.num_places)
        largest = largest.scatter_reduce(1, self.assignment, norm, "amax")
        return summed * (largest / _length(summed).clamp_min(_TINY))[..., None].to(x.dtype)

    def apply(
        self,
        x: Float[Tensor, "b kn c"],
        size: Float[Tensor, "_ kn"] | None,
        values: Float[Tensor, "_ n"] | None = None,
    ) -> Merged:
        if self.order is not None and fused.takes(x, self.weight, values):
            return self._fused(x, size, values, self.order)
        return super().apply(x, size, values)

    def _fused(
        self,
        x: Tensor,
        size: Tensor | None,
        values: Tensor | None,
        order: tuple[Tensor, Tensor],
    ) -> Merged:
        merged, sizes, means = operators.merge_groups(
            x, self.weight, size, values, self.assignment, *order, self.keep_norm
        )
        return Merged(merged, sizes, None if values is None else means)

    def restore(self, y: Float[Tensor, "b kp c"]) -> Float[Tensor, "b kn c"]:
        return y.gather(1, self.assignment[..., None].expand(-1, -1, y.shape[-1]))

    def weights(self) -> Float[Tensor, "b n p"]:
        places = torch.arange(self.num_places, device=self.assignment.device)
        chosen = self.assignment[..., None] == places
        mask = chosen * (self.weight[..., None] / self._total().mT)
        return mask[:, self.num_prefix :, self.num_prefix :]

    def sizes(self, size: Float[Tensor, "_ kn"]) -> Float[Tensor, "_ kp"]:
        counted = size.expand(self.assignment.shape[0], -1) * (self.weight > 0)
        return self._add(counted[..., None])[..., 0]


def _length(x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return cast("Tensor", torch.linalg.vector_norm(x, dim=-1, dtype=dtype))  # pyright: ignore[reportUnknownMemberType]

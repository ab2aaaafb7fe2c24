"""Soft merging: a relaxation of matching that gives the choice of tokens a gradient.

In training no token leaves. A token gives a part of its mass to others, and attention counts it by
the rest: one without mass is practically masked out. At inference the choice is hard, and tokens
really leave.

Letters: b images, t tokens with their k prefix tokens, n patch tokens, c channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ltm.core.merge import Merge

_LEAST = 1e-6
"""The mass left to a token that has given all away."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SoftMerge(Merge):
    """Tokens keep their places and give parts of their mass to others."""

    moved: Float[Tensor, "b n n"]
    """The part of token i's mass that goes to token j."""
    mass: Float[Tensor, "b n"]

    @property
    def num_in(self) -> int:
        return self.moved.shape[1]

    @property
    def num_out(self) -> int:
        return self.num_in

    def _sum(self, amount: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        left = 1 - self.moved.sum(dim=2)
        return amount * left[..., None] + self.moved.mT @ amount

    def __call__(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        k = self.num_prefix
        mass = self.mass[..., None]
        merged = self._sum(mass * x[:, k:].float()) / self._sum(mass).clamp_min(_LEAST)
        return torch.cat([x[:, :k], merged.to(x.dtype)], dim=1)

    def restore(self, y: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        k = self.num_prefix
        left = 1 - self.moved.sum(dim=2, keepdim=True)
        back = left * y[:, k:].float() + self.moved @ y[:, k:].float()
        return torch.cat([y[:, :k], back.to(y.dtype)], dim=1)

    def weights(self) -> Float[Tensor, "b n n"]:
        left = torch.diag_embed(1 - self.moved.sum(dim=2))
        given = (left + self.moved) * self.mass[..., None]
        return given / given.sum(dim=1, keepdim=True).clamp_min(_LEAST)

    def sizes(self, size: Float[Tensor, "_ t"]) -> Float[Tensor, "b t"]:
        k = self.num_prefix
        size = size.expand(self.moved.shape[0], -1)
        found = self._sum(size[:, k:, None])[..., 0].clamp_min(_LEAST)
        return torch.cat([size[:, :k], found], dim=1)

    def kept(self) -> Int[Tensor, "1 t"]:
        return torch.arange(self.num_prefix + self.num_in, device=self.moved.device)[None]


def continuous_top_k(
    scores: Float[Tensor, "b f s"], number: int, temperature: float
) -> Float[Tensor, "b f s"]:
    """Shares that sum to `number`: that many softmaxes over all pairs.

    After each one, rows that were chosen count less. No row gives more than one.
    """
    scores, taken = scores.float() / temperature, torch.zeros_like(scores, dtype=torch.float32)
    for _ in range(number):
        part = scores.flatten(1).softmax(dim=1).view_as(taken)
        taken = taken + part
        left = 1 - part.sum(dim=2, keepdim=True)
        scores = torch.where(left > _LEAST, scores + left.clamp_min(_LEAST).log(), -torch.inf)
    return taken / taken.sum(dim=2, keepdim=True).detach().clamp_min(1)

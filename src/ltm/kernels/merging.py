"""Merging tokens: by groups, by one constant matrix, or by the rows and columns of a grid.

Letters: b images, t tokens with their prefix, n patch tokens before, p places after, c channels;
h x w a grid before, h2 x w2 after.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# ruff: noqa: ARG001, PLR0917 - operators take their arguments in order, and shapes need few
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ltm.kernels.dispatch import operator, uses_triton

_MAX_SIDE = 64
"""Wider grids are not merged row by row."""
_TINY = 1e-12


class Merged(NamedTuple):
    """What comes out of a merge."""

    tokens: Float[Tensor, "b kp c"]
    sizes: Float[Tensor, "_ kp"]
    """How many original patches each token stands for."""
    values: Float[Tensor, "_ p"] | None
    """What the patches hand on, where they had any values."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Groups:
    """A merge into groups: every token goes to exactly one place."""

    assignment: Int[Tensor, "b t"]
    """The place of each token after the merge, prefix tokens included."""
    weight: Float[Tensor, "b t"]
    """The weight of each token in its group; a token of weight zero is pruned."""
    num_places: int
    """Tokens after the merge, prefix included."""
    num_prefix: int = 0
    keep_norm: bool = False
    """Give each merged token the largest norm of its group (averaging shrinks norms)."""
    order: tuple[Int[Tensor, "b p"], Int[Tensor, "b r"]] | None = None
    """Who stays and who leaves, where a kernel has told: then another one does the merge."""

    def add(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b p c"]:
        """Sums over the groups."""
        if x.is_cuda and x.shape[-1] > 1:
            # One product of a 0/1 matrix: many times faster than scattering on a GPU.
            places = torch.arange(self.num_places, device=x.device)
            return (self.assignment[:, None] == places[:, None]).to(x.dtype) @ x
        index = self.assignment[..., None].expand(-1, -1, x.shape[-1])
        return x.new_zeros(x.shape[0], self.num_places, x.shape[-1]).scatter_add(1, index, x)

    def total(self) -> Float[Tensor, "b p 1"]:
        """The weight of each group."""
        return self.add(self.weight[..., None]).clamp_min(_TINY)

    def average(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b p c"]:
        """Weighted means; who is alone in its group stays exactly as it is."""
        total = self.total().gather(1, self.assignment[..., None])
        return self.add(x * (self.weight[..., None] / total).to(x.dtype))

    def sizes(self, size: Float[Tensor, "_ t"]) -> Float[Tensor, "b p"]:
        """Sums of sizes, without those of tokens that are pruned."""
        counted = size.expand(self.assignment.shape[0], -1) * (self.weight > 0)
        return self.add(counted[..., None])[..., 0]


def merge_groups(
    x: Float[Tensor, "b t c"],
    groups: Groups,
    size: Float[Tensor, "_ t"] | None = None,
    values: Float[Tensor, "_ n"] | None = None,
) -> Merged:
    """Weighted means of groups, the sums of their sizes, and the means of the patches' values.

    `size` is None while all sizes are one.
    """
    if groups.order is not None and uses_triton(x, groups.weight, values):
        assignment, weight, keep_norm = groups.assignment, groups.weight, groups.keep_norm
        merged, sizes, means = _merge_groups(
            x, weight, size, values, assignment, *groups.order, keep_norm
        )
        return Merged(merged, sizes, None if values is None else means)
    merged = groups.average(x)
    if groups.keep_norm:
        norm = _length(x) * (groups.weight > 0)
        largest = norm.new_zeros(x.shape[0], groups.num_places)
        largest = largest.scatter_reduce(1, groups.assignment, norm, "amax")
        factor = largest / _length(merged).clamp_min(_TINY)
        merged = merged * factor[..., None].to(x.dtype)
    if size is None:
        size = x.new_ones(1, x.shape[1], dtype=torch.float32)
    if values is not None:
        k = groups.num_prefix
        whole = torch.nn.functional.pad(values, (k, 0)) if k else values
        values = groups.average(whole[..., None])[:, k:, 0]
    return Merged(merged, groups.sizes(size), values)


def merge_matrix(
    x: Float[Tensor, "b t c"],
    matrix: Float[Tensor, "p t"],
    wide: Float[Tensor, "p wide"] | None = None,
) -> Float[Tensor, "b p c"]:
    """The same product for every image; `wide` is the matrix as `widened` makes it, for kernels."""
    wide = matrix if wide is None else wide
    if x.shape[1] == matrix.shape[1] and _multiplies(x, wide):
        return _mix(wide.to(x.dtype), x)
    return matrix.to(x.dtype) @ x


def widened(matrix: Float[Tensor, "p t"]) -> Float[Tensor, "p wide"]:
    """A matrix with columns of zeros: GPUs read rows of a multiple of 16 at once."""
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % 16))


def merge_grid(
    x: Float[Tensor, "b n c"],
    weight: Float[Tensor, "_ n"] | None,
    rows: Float[Tensor, "h h2"],
    columns: Float[Tensor, "w w2"],
) -> Float[Tensor, "b p c"]:
    """Means by weight over rows and columns of a grid, or its plain product with both."""
    if columns.shape[0] <= _MAX_SIDE and _multiplies(x, rows, columns, weight):
        return _merge_grid(x, weight, rows, columns)
    if weight is None:
        return separable(x, rows, columns)
    share = at_most_one(weight[..., None]).to(x.dtype)
    total = separable(share, rows, columns)
    return over(separable(x * share, rows, columns), total)


def separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`(rows (x) columns)^T x` for tokens in raster order: `b (h w) c -> b (h2 w2) c`."""
    (h, h2), (w, w2) = rows.shape, columns.shape
    rows, columns = rows.to(x.dtype), columns.to(x.dtype)
    c = x.shape[-1]
    x = rows.mT @ x.reshape(-1, h, w * c)
    x = columns.mT @ x.reshape(-1, h2, w, c)
    return x.reshape(-1, h2 * w2, c)


def over(mask: Tensor, total: Tensor) -> Tensor:
    """Divide by the total, or by 1 where it is zero.

    A small number in place of a total of zero would leave the value and not its gradient.
    """
    return mask / torch.where(total > 0, total, 1.0)


def at_most_one(weight: Tensor) -> Tensor:
    """Weights of tokens, `b n 1`, of which only the ratios count: half precision holds them."""
    return weight / weight.detach().amax(dim=1, keepdim=True)


def _multiplies(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel multiplies these; under autocast torch does, and chooses the precision."""
    return uses_triton(x, *others) and not torch.is_autocast_enabled(x.device.type)


def _length(x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return cast("Tensor", torch.linalg.vector_norm(x, dim=-1, dtype=dtype))  # pyright: ignore[reportUnknownMemberType]


@operator
def _merge_groups(
    tokens: Tensor,
    weight: Tensor,
    size: Tensor | None,
    values: Tensor | None,
    assignment: Tensor,
    stays: Tensor,
    leaves: Tensor,
    keep_norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    (b, t, c), p = tokens.shape, stays.shape[1]
    sizes = tokens.new_empty(b, p, dtype=torch.float32)
    if values is None:
        return tokens.new_empty(b, p, c), sizes, sizes.new_empty(0)
    return tokens.new_empty(b, p, c), sizes, sizes.new_empty(b, p - (t - values.shape[1]))


@operator
def _mix(matrix: Tensor, tokens: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], matrix.shape[0], tokens.shape[2])


@operator
def _merge_grid(tokens: Tensor, weight: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], rows.shape[1] * columns.shape[1], tokens.shape[2])


@register_flop_formula(torch.ops.ltm.mix)
def _(matrix: list[int], tokens: list[int], **_: Any) -> int:
    (p, _wide), (b, t, c) = matrix, tokens
    return 2 * b * p * t * c


@register_flop_formula(torch.ops.ltm.merge_grid)
def _(tokens: list[int], weight: Any, rows: list[int], columns: list[int], **_: Any) -> int:
    (b, _t, c), (h, h2), (w, w2) = tokens, rows, columns
    return 2 * b * (h * h2 * w + h2 * w * w2) * (c + (weight is not None))

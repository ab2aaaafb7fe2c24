"""Masks from learned supports, and what freezing makes of them.

Letters: b images, n patch tokens, p merged tokens; `M` the support, `G~` the state, `m` the sizes.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ltm.core.merge import GridMerge, kronecker, row_normalise


def fold_grid(merge: GridMerge) -> dict[str, Tensor]:
    """Two normalised factors; a weight that is a product over the sides goes into them."""
    h, w = merge.grid_in
    table = merge.rows.new_ones(h, w) if merge.weight is None else merge.weight[0].reshape(h, w)
    row_weight, column_weight = table.sum(1), table.sum(0)
    outer = row_weight[:, None] * column_weight / table.sum()
    if not torch.allclose(outer, table, rtol=1e-4, atol=1e-5):
        return {"rows": merge.rows, "columns": merge.columns, "weight": table.reshape(1, -1)}
    factors = (merge.rows * row_weight[:, None], merge.columns * column_weight[:, None])
    rows, columns = (factor / factor.sum(0, keepdim=True) for factor in factors)
    return {"rows": rows, "columns": columns}


def dense(supports: tuple[Tensor, ...]) -> Float[Tensor, "n p"]:
    """One support, or that of rows and columns, as a matrix over all tokens."""
    if len(supports) == 1:
        return supports[0]
    return kronecker(supports[0], supports[1])


def shares(support: Float[Tensor, "n p"]) -> Float[Tensor, "1 n p"]:
    """Where each token goes, its parts summing to one."""
    return row_normalise(support)[None]


def softmax_on(support: Tensor, size: Tensor, state: Tensor) -> Float[Tensor, "b n p"]:
    """`m M exp(G~)`, its columns normalised."""
    mask = support * size[..., None] * state.exp()
    return mask / mask.sum(dim=1, keepdim=True).clamp_min(1e-6)


def softmax_of(support: Tensor, size: Tensor, state: Tensor) -> Float[Tensor, "b n p"]:
    """`m exp(G~ o M)`, its columns normalised."""
    mask = size[..., None] * torch.exp(state * support)
    return mask / mask.sum(dim=1, keepdim=True)


def resample(values: Float[Tensor, "n"], length: int) -> Float[Tensor, "n2"]:
    """Values of a sequence, for one of another length."""
    if len(values) == length:
        return values
    return torch.nn.functional.interpolate(values[None, None], length, mode="linear")[0, 0]

"""The Merge values: immutable decisions about which tokens become one.

A merge is made by a method and used by everybody else. Called on tokens it averages them; `restore`
spreads merged tokens back to where they came from; `weights` is the merging mask G of the paper.

Letters: b images, n patch tokens before, p patch tokens after, k leading prefix tokens (class,
distillation, register tokens), which every merge passes through untouched; c channels.
A decision that is the same for every image has b = 1 in its own tensors and applies to any batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ltm import kernels
from ltm.kernels.merging import Groups, Merged, at_most_one, over, separable


@dataclass(frozen=True, eq=False, kw_only=True)
class Merge(ABC):
    """Which of n tokens become which of p, and with what weight."""

    num_prefix: int = 0

    @property
    @abstractmethod
    def num_in(self) -> int:
        """Patch tokens before the merge."""

    @property
    @abstractmethod
    def num_out(self) -> int:
        """Patch tokens after the merge."""

    @abstractmethod
    def __call__(self, x: Float[Tensor, "b kn c"]) -> Float[Tensor, "b kp c"]:
        """Weighted averages of the tokens."""

    def average(self, x: Float[Tensor, "b kn c"]) -> Float[Tensor, "b kp c"]:
        """Weighted averages of anything that belongs to the tokens, without regard to norms."""
        return self(x)

    def hand_on(self, values: Float[Tensor, "b n"]) -> Float[Tensor, "b p"]:
        """A value of every merged patch: the average of its members', by the mask itself."""
        k = self.num_prefix
        whole = torch.nn.functional.pad(values, (k, 0)) if k else values
        return self.average(whole[..., None])[:, k:, 0]

    @abstractmethod
    def restore(self, y: Float[Tensor, "b kp c"]) -> Float[Tensor, "b kn c"]:
        """Each original token as the average of the merged tokens it went into."""

    @abstractmethod
    def weights(self) -> Float[Tensor, "b n p"]:
        """The merging mask G: column j holds the weights of merged token j and sums to one."""

    @abstractmethod
    def sizes(self, size: Float[Tensor, "_ kn"]) -> Float[Tensor, "_ kp"]:
        """How many original patches each merged token stands for, given the sizes before."""

    def apply(
        self,
        x: Float[Tensor, "b kn c"],
        size: Float[Tensor, "_ kn"] | None,
        values: Float[Tensor, "_ n"] | None = None,
    ) -> Merged:
        """All that becomes of the tokens; None means that all sizes before are one."""
        if size is None:
            size = x.new_ones(1, x.shape[1], dtype=torch.float32)
        return Merged(self(x), self.sizes(size), None if values is None else self.hand_on(values))


@dataclass(frozen=True, eq=False, kw_only=True)
class MatchedMerge(Groups, Merge):
    """A merge into groups, which matching makes: every token goes to exactly one place.

    It costs n additions; on a GPU a product with a 0/1 matrix does them faster.
    """

    @property
    def num_in(self) -> int:
        return self.assignment.shape[1] - self.num_prefix

    @property
    def num_out(self) -> int:
        return self.num_places - self.num_prefix

    def __call__(self, x: Float[Tensor, "b kn c"]) -> Float[Tensor, "b kp c"]:
        return kernels.merge_groups(x, self).tokens

    def apply(
        self,
        x: Float[Tensor, "b kn c"],
        size: Float[Tensor, "_ kn"] | None,
        values: Float[Tensor, "_ n"] | None = None,
    ) -> Merged:
        return kernels.merge_groups(x, self, size, values)

    def restore(self, y: Float[Tensor, "b kp c"]) -> Float[Tensor, "b kn c"]:
        return y.gather(1, self.assignment[..., None].expand(-1, -1, y.shape[-1]))

    def weights(self) -> Float[Tensor, "b n p"]:
        places = torch.arange(self.num_places, device=self.assignment.device)
        chosen = self.assignment[..., None] == places
        mask = chosen * (self.weight[..., None] / self.total().mT)
        return mask[:, self.num_prefix :, self.num_prefix :]


def row_normalise(mask: Tensor) -> Tensor:
    """Rows that sum to one, or to zero where nothing is in them."""
    return over(mask, mask.sum(-1, keepdim=True))


def _column_normalise(mask: Tensor) -> Tensor:
    return over(mask, mask.sum(-2, keepdim=True))


def _beside_prefix(x: Tensor, num_prefix: int, merged: Tensor) -> Tensor:
    return torch.cat([x[:, :num_prefix], merged], dim=1) if num_prefix else merged


@dataclass(frozen=True, eq=False, kw_only=True)
class DenseMerge(Merge):
    """A merge given by its whole mask: the reference form, and the only one for any mask at all."""

    mask: Float[Tensor, "b n p"]
    """Non-negative weights whose columns sum to one."""
    share: Float[Tensor, "b2 n p"]
    """Where each token goes, rows summing to one (or to zero, for a token that is dropped)."""

    @staticmethod
    def from_support(
        support: Float[Tensor, "n p"] | Float[Tensor, "b n p"],
        weight: Float[Tensor, "b n"] | None = None,
        *,
        num_prefix: int = 0,
    ) -> DenseMerge:
        """The mask `A w / A^T w` of a support A and one positive weight per token."""
        support = support if support.ndim == 3 else support[None]
        weighted = support if weight is None else support * weight[..., None].to(support.dtype)
        return DenseMerge(
            mask=_column_normalise(weighted), share=row_normalise(support), num_prefix=num_prefix
        )

    @property
    def num_in(self) -> int:
        return self.mask.shape[-2]

    @property
    def num_out(self) -> int:
        return self.mask.shape[-1]

    def __call__(self, x: Float[Tensor, "b kn c"]) -> Float[Tensor, "b kp c"]:
        merged = self.mask.to(x.dtype).mT @ x[:, self.num_prefix :]
        return _beside_prefix(x, self.num_prefix, merged)

    def restore(self, y: Float[Tensor, "b kp c"]) -> Float[Tensor, "b kn c"]:
        back = row_normalise(self.mask).to(y.dtype) @ y[:, self.num_prefix :]
        return _beside_prefix(y, self.num_prefix, back)

    def weights(self) -> Float[Tensor, "b n p"]:
        return self.mask

    def sizes(self, size: Float[Tensor, "_ kn"]) -> Float[Tensor, "_ kp"]:
        patches = size[:, None, self.num_prefix :] @ self.share.to(size.dtype)
        return _beside_prefix(size, self.num_prefix, patches[:, 0])


@dataclass(frozen=True, eq=False, kw_only=True)
class GridMerge(Merge):
    """A merge of a whole grid, rows and columns apart: two small products instead of an n x p one.

    The support is the Kronecker product of `rows` and `columns`; tokens are in raster order.
    """

    rows: Float[Tensor, "h h2"]
    columns: Float[Tensor, "w w2"]
    weight: Float[Tensor, "b n"] | None = None
    """One positive weight per token; None weighs all alike."""
    normalised: bool = False
    """The columns of both factors sum to one already (a folded mask)."""
    size_out: Float[Tensor, "1 kp"] | None = None
    """The sizes after the merge, where they are known beforehand."""

    @property
    def grid_in(self) -> tuple[int, int]:
        return self.rows.shape[0], self.columns.shape[0]

    @property
    def num_in(self) -> int:
        return self.rows.shape[0] * self.columns.shape[0]

    @property
    def num_out(self) -> int:
        return self.rows.shape[1] * self.columns.shape[1]

    def __call__(self, x: Float[Tensor, "b kn c"]) -> Float[Tensor, "b kp c"]:
        rows, columns = self.rows, self.columns
        if self.weight is None and not self.normalised:
            rows, columns = _column_normalise(rows), _column_normalise(columns)
        merged = kernels.merge_grid(x[:, self.num_prefix :], self.weight, rows, columns)
        return _beside_prefix(x, self.num_prefix, merged)

    def restore(self, y: Float[Tensor, "b kp c"]) -> Float[Tensor, "b kn c"]:
        """Row n of the mask is `A[n, p] / total[p]` up to a factor: the weight itself cancels."""
        patches = y[:, self.num_prefix :]
        rows, columns = self.rows, self.columns
        if self.normalised:
            total = rows.new_ones(1, self.num_out, 1)
        elif self.weight is None:
            total = (rows.sum(0)[:, None] * columns.sum(0)).reshape(1, -1, 1)
        else:
            total = separable(self.weight[..., None], rows, columns)
        inverse = at_most_one(1 / torch.where(total > 0, total, torch.inf)).to(y.dtype)
        spread = separable(patches * inverse, rows.mT, columns.mT)
        back = over(spread, separable(inverse, rows.mT, columns.mT))
        return _beside_prefix(y, self.num_prefix, back)

    def weights(self) -> Float[Tensor, "b n p"]:
        support = kronecker(self.rows, self.columns)
        return DenseMerge.from_support(support, self.weight).mask

    def sizes(self, size: Float[Tensor, "_ kn"]) -> Float[Tensor, "_ kp"]:
        if self.size_out is not None:
            return self.size_out
        rows, columns = row_normalise(self.rows), row_normalise(self.columns)
        merged = separable(size[:, self.num_prefix :, None], rows, columns)[..., 0]
        return _beside_prefix(size, self.num_prefix, merged)


def kronecker(rows: Float[Tensor, "h h2"], columns: Float[Tensor, "w w2"]) -> Tensor:
    """The support of a grid as one matrix over its tokens in raster order."""
    support = rows[:, None, :, None] * columns[None, :, None, :]
    return support.reshape(rows.shape[0] * columns.shape[0], -1)


@dataclass(frozen=True, eq=False, kw_only=True)
class StaticMerge(Merge):
    """A merge folded into one constant matrix, prefix included: one product, nothing else."""

    matrix: Float[Tensor, "kp kn"]
    back: Float[Tensor, "kn kp"]
    size_out: Float[Tensor, "kp"]
    wide: Float[Tensor, "kp wide"] | None = None
    """The matrix as `kernels.widened`."""

    @staticmethod
    def fold(merge: Merge, size: Float[Tensor, "1 kn"]) -> StaticMerge:
        """The constants of a merge that is the same for every image."""
        mask = merge.weights()[0]
        k = merge.num_prefix
        return StaticMerge(
            matrix=_with_prefix(mask.mT, k),
            back=_with_prefix(row_normalise(mask), k),
            size_out=merge.sizes(size)[0],
            num_prefix=k,
        )

    @property
    def num_in(self) -> int:
        return self.matrix.shape[1] - self.num_prefix

    @property
    def num_out(self) -> int:
        return self.matrix.shape[0] - self.num_prefix

    def __call__(self, x: Float[Tensor, "b kn c"]) -> Float[Tensor, "b kp c"]:
        return kernels.merge_matrix(x, self.matrix, self.wide)

    def restore(self, y: Float[Tensor, "b kp c"]) -> Float[Tensor, "b kn c"]:
        return self.back.to(y.dtype) @ y

    def weights(self) -> Float[Tensor, "b n p"]:
        return self.matrix[self.num_prefix :, self.num_prefix :].mT[None]

    def sizes(self, size: Float[Tensor, "_ kn"]) -> Float[Tensor, "_ kp"]:
        return self.size_out[None]


def _with_prefix(mask: Tensor, num_prefix: int) -> Tensor:
    """The mask with an identity before it: prefix tokens pass through."""
    whole = mask.new_zeros(mask.shape[0] + num_prefix, mask.shape[1] + num_prefix)
    whole[:num_prefix, :num_prefix].fill_diagonal_(1)
    whole[num_prefix:, num_prefix:] = mask
    return whole


def compose_weights(merges: Sequence[Merge]) -> Float[Tensor, "b n0 p"]:
    """The weights of the tokens after all merges over the tokens before the first."""
    if not merges:
        raise ValueError("merges: got none; composing needs at least one merge.")
    total = merges[0].weights()
    for merge in merges[1:]:
        total = total @ merge.weights().to(total.dtype)
    return total


def restore_through(merges: Sequence[Merge], y: Float[Tensor, "b kp c"]) -> Tensor:
    """Tokens after all merges, spread back to the places before the first."""
    for merge in reversed(merges):
        y = merge.restore(y)
    return y

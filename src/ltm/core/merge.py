"""The forms of `Merge`: immutable decisions about which tokens to merge.

A method makes a merge; everything else uses it. Calling it on tokens averages them, `restore`
spreads merged tokens back to their original places, and `weights` is the paper's merging mask G.

Letters: b images, n patch tokens before the merge, p patch tokens after it, k prefix tokens (class,
distillation, register tokens), which come first and are passed through unchanged; c channels.
A decision that is the same for all images has b = 1 in its tensors and applies to any batch.
Each form holds its torch definition, and asks whether a Triton kernel takes over.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# ruff: noqa: ARG001, PLR0917 - operators take their arguments in order, and shapes need few

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ltm.kernels.dispatch import is_recorded, operator, stays_map, uses_triton

_MAX_SIDE = 64
"""Wider grids are not merged row by row."""
_MAX_MEMBERS = 16
"""Constant masks with more members per merged token are applied as a matrix product."""
_TINY = 1e-12


class Merged(NamedTuple):
    """The result of applying a merge."""

    tokens: Float[Tensor, "b kp c"]
    sizes: Float[Tensor, "_ kp"]
    """How many original patches each token stands for."""
    values: Float[Tensor, "_ p"] | None
    """The values of the merged patches, if values were given."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Merge(ABC):
    """Which of n tokens are merged into which of p, and with what weights."""

    num_prefix: int = 0

    is_matched: ClassVar[bool] = False
    """Whether tokens of an image were compared with one another to find it."""

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
        """Plain weighted averages of any per-token quantity, even if the merge keeps norms."""
        return self(x)

    def hand_on(self, values: Float[Tensor, "b n"]) -> Float[Tensor, "b p"]:
        """One value per merged patch: the average over its members, weighted by the mask."""
        return self.average(self._padded(values)[..., None])[:, self.num_prefix :, 0]

    def _padded(self, values: Float[Tensor, "_ n"]) -> Float[Tensor, "_ kn"]:
        """Values of the patches, with zeros for the prefix."""
        k = self.num_prefix
        return torch.nn.functional.pad(values, (k, 0)) if k else values

    @abstractmethod
    def restore(self, y: Float[Tensor, "b kp c"]) -> Float[Tensor, "b kn c"]:
        """For each original token, the average of the merged tokens that it went into."""

    @abstractmethod
    def weights(self) -> Float[Tensor, "b n p"]:
        """The merging mask G: column j holds the weights of merged token j, and sums to one."""

    @abstractmethod
    def sizes(self, size: Float[Tensor, "_ kn"]) -> Float[Tensor, "_ kp"]:
        """How many original patches each merged token stands for, given the sizes before."""

    def kept(self) -> Int[Tensor, "_ kp"]:
        """The original token whose position each merged token takes: the one that weighs most."""
        most = self.weights().argmax(dim=1) + self.num_prefix
        prefix = torch.arange(self.num_prefix, device=most.device).expand(most.shape[0], -1)
        return torch.cat([prefix, most], dim=1)

    def apply(
        self,
        x: Float[Tensor, "b kn c"],
        size: Float[Tensor, "_ kn"] | None,
        values: Float[Tensor, "_ n"] | None = None,
    ) -> Merged:
        """Merge tokens, their sizes and their values at once; no `size` means all are one."""
        sizes = self.sizes(_sizes_before(x, size))
        return Merged(self(x), sizes, None if values is None else self.hand_on(values))


def _sizes_before(
    x: Float[Tensor, "b kn c"], size: Float[Tensor, "_ kn"] | None
) -> Float[Tensor, "_ kn"]:
    return x.new_ones(1, x.shape[1], dtype=torch.float32) if size is None else size


@dataclass(frozen=True, eq=False, kw_only=True)
class MatchedMerge(Merge):
    """A merge into groups, as matching makes it: every token goes to exactly one place.

    It takes n additions; on a GPU a product with a 0/1 matrix is faster.
    """

    assignment: Int[Tensor, "b kn"]
    """The place of each token after the merge, prefix tokens included."""
    weight: Float[Tensor, "b kn"]
    """The weight of each token in its group; a token with weight zero is pruned."""
    num_places: int
    """Tokens after the merge, prefix included."""
    keep_norm: bool = False
    """Give each merged token the largest norm of its group, since averaging shrinks norms."""
    leaves: Bool[Tensor, "b kn"] | None = None
    """Which tokens join another, if the torch path made the match."""
    order: tuple[Int[Tensor, "b kp"], Int[Tensor, "b r"], Int[Tensor, "b r"]] | None = None
    """The tokens that stay, those that leave and the places they go to, if a kernel made the
    match; another kernel then merges."""

    is_matched: ClassVar[bool] = True

    @property
    def num_in(self) -> int:
        return self.assignment.shape[1] - self.num_prefix

    @property
    def num_out(self) -> int:
        return self.num_places - self.num_prefix

    def __call__(self, x: Float[Tensor, "b kn c"]) -> Float[Tensor, "b kp c"]:
        return self.apply(x, None).tokens

    def apply(
        self,
        x: Float[Tensor, "b kn c"],
        size: Float[Tensor, "_ kn"] | None,
        values: Float[Tensor, "_ n"] | None = None,
    ) -> Merged:
        if self.order is not None and uses_triton(x, self.weight, values):
            merged, sizes, means = _merge_groups(
                x, self.weight, size, values, *self.order, self.keep_norm
            )
            return Merged(merged, sizes, None if values is None else means)
        size = _sizes_before(x, size)
        total, sizes = self._totals(self.weight, self._counted(size))
        if not size.requires_grad:
            sizes = sizes.detach()  # with a mask that needs a gradient, attention is not fused
        share = self._share(total)
        merged = self._add(x * share[..., None].to(x.dtype))
        if self.keep_norm:
            norm = self._largest(_length(x) * (self.weight > 0))
            factor = norm / _length(merged).clamp_min(_TINY)
            merged = merged * factor[..., None].to(x.dtype)
        if values is None:
            return Merged(merged, sizes, None)
        (means,) = self._totals(self._padded(values) * share)
        return Merged(merged, sizes, means[:, self.num_prefix :])

    def average(self, x: Float[Tensor, "b kn c"]) -> Float[Tensor, "b kp c"]:
        """Weighted means; a token alone in its group stays exactly as it is."""
        (total,) = self._totals(self.weight)
        return self._add(x * self._share(total)[..., None].to(x.dtype))

    def restore(self, y: Float[Tensor, "b kp c"]) -> Float[Tensor, "b kn c"]:
        return y.gather(1, self.assignment[..., None].expand(-1, -1, y.shape[-1]))

    def weights(self) -> Float[Tensor, "b n p"]:
        places = torch.arange(self.num_places, device=self.assignment.device)
        chosen = self.assignment[..., None] == places
        (total,) = self._totals(self.weight)
        mask = chosen * self._share(total)[..., None]
        return mask[:, self.num_prefix :, self.num_prefix :]

    def sizes(self, size: Float[Tensor, "_ kn"]) -> Float[Tensor, "b kp"]:
        """Sums of sizes, without pruned tokens."""
        (sizes,) = self._totals(self._counted(size))
        return sizes

    def kept(self) -> Int[Tensor, "b kp"]:
        """The token of each group that stayed."""
        if self.order is not None:
            return self.order[0].long()
        if self.leaves is None:
            return super().kept()
        itself = torch.arange(self.assignment.shape[1], device=self.assignment.device)
        if is_recorded():
            stayed = self._groups * ~self.leaves[:, None]
            least = torch.arange(self.num_places, device=itself.device).clamp_max(self.num_prefix)
            return torch.maximum((stayed * itself).amax(dim=-1).long(), least)
        # Tokens that leave write to an extra place, which is cut off. A place where no token stayed
        # is padding; it gets the first patch.
        place = self.assignment.masked_fill(self.leaves, self.num_places)
        found = place.new_full((place.shape[0], self.num_places + 1), self.num_prefix)
        return found.scatter(1, place, itself.expand_as(place))[:, :-1]

    def _counted(self, size: Float[Tensor, "_ kn"]) -> Float[Tensor, "b kn"]:
        """Sizes, with zeros for pruned tokens."""
        return size * (self.weight > 0)

    def _share(self, total: Float[Tensor, "b kp"]) -> Float[Tensor, "b kn"]:
        """Each token's share of the total weight of its group."""
        return self.weight / total.clamp_min(_TINY).gather(1, self.assignment)

    @property
    def _groups(self) -> Float[Tensor, "b kp kn"]:
        """One if a token goes to a place, else zero."""
        places = torch.arange(self.num_places, device=self.assignment.device)
        return (self.assignment[:, None] == places[:, None]).float()

    @property
    def _rows(self) -> Int[Tensor, "rows"]:
        """The places of all tokens, counted over the whole batch."""
        return _over_batch(self.assignment, self.num_places)

    def _add(self, x: Float[Tensor, "b kn c"]) -> Float[Tensor, "b kp c"]:
        """Sums over the groups."""
        b, _, c = x.shape
        if is_recorded() or (x.is_cuda and self.num_places < c):
            # On a GPU a product with a 0/1 matrix is many times faster than adding, and TensorRT
            # cannot scatter. For long sequences the matrix would be larger than the tokens.
            return self._groups.to(x.dtype) @ x
        sums = x.new_zeros(b * self.num_places, c).index_add(0, self._rows, x.reshape(-1, c))
        return sums.view(b, self.num_places, c)

    def _totals(self, *values: Float[Tensor, "b kn"]) -> tuple[Float[Tensor, "b kp"], ...]:
        """Sums of numbers over the groups; an exported graph cannot scatter them."""
        if is_recorded():
            return self._add(torch.stack(values, -1)).unbind(-1)
        shape = self.assignment.shape[0], self.num_places
        return tuple(x.new_zeros(shape).scatter_add(1, self.assignment, x) for x in values)

    def _largest(self, values: Float[Tensor, "b kn"]) -> Float[Tensor, "b kp"]:
        """The largest value of each group; none is negative."""
        if is_recorded():
            return (self._groups * values[:, None]).amax(dim=-1)
        none = values.new_zeros(values.shape[0], self.num_places)
        return none.scatter_reduce(1, self.assignment, values, "amax")


def rows_at(x: Float[Tensor, "b n c"], index: Int[Tensor, "b r"]) -> Float[Tensor, "b r c"]:
    """Rows of each image; on a CPU this is many times faster than `gather`."""
    rows = _over_batch(index, x.shape[1])
    return x.reshape(-1, x.shape[2]).index_select(0, rows).view(*index.shape, x.shape[2])


def _over_batch(index: Int[Tensor, "b r"], length: int) -> Int[Tensor, "rows"]:
    """Indices into sequences of a length, as indices into all sequences concatenated."""
    start = torch.arange(index.shape[0], device=index.device)[:, None] * length
    return (index + start).reshape(-1)


def row_normalise(mask: Tensor) -> Tensor:
    """Rows that sum to one; a row of zeros stays zero."""
    return _over(mask, mask.sum(-1, keepdim=True))


def _column_normalise(mask: Tensor) -> Tensor:
    return _over(mask, mask.sum(-2, keepdim=True))


def _over(mask: Tensor, total: Tensor) -> Tensor:
    """Divide by the total, or by 1 where it is zero.

    Clamping the total to a small number instead would give the same value and a wrong gradient.
    """
    return mask / torch.where(total > 0, total, 1.0)


def _beside_prefix(x: Tensor, num_prefix: int, merged: Tensor) -> Tensor:
    return torch.cat([x[:, :num_prefix], merged], dim=1) if num_prefix else merged


@dataclass(frozen=True, eq=False, kw_only=True)
class DenseMerge(Merge):
    """A merge given by its full mask: the reference form, which can hold any mask."""

    mask: Float[Tensor, "b n p"]
    """Non-negative weights whose columns sum to one."""
    share: Float[Tensor, "b2 n p"]
    """How each token is split over the merged ones: rows sum to one, or to zero if dropped."""

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
    """A merge of a grid along rows and columns: two small products instead of a large one.

    The support is the Kronecker product of `rows` and `columns`; tokens are in raster order.
    """

    rows: Float[Tensor, "h h2"]
    columns: Float[Tensor, "w w2"]
    weight: Float[Tensor, "b n"] | None = None
    """One positive weight per token; None weighs all the same."""
    normalised: bool = False
    """Whether the columns of both factors already sum to one."""
    size_out: Float[Tensor, "1 kp"] | None = None
    """The sizes after the merge, if known in advance."""
    shares: tuple[Float[Tensor, "h h2"], Float[Tensor, "w w2"]] | None = None
    """Both factors with rows that sum to one, if known in advance; sizes are spread by them."""

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
        rows, columns, patches = self.rows, self.columns, x[:, self.num_prefix :]
        if self.weight is None and not self.normalised:
            rows, columns = _column_normalise(rows), _column_normalise(columns)
        return _beside_prefix(x, self.num_prefix, _over_grid(patches, rows, columns, self.weight))

    def restore(self, y: Float[Tensor, "b kp c"]) -> Float[Tensor, "b kn c"]:
        """Row n of the mask is `A[n, p] / total[p]` times the weight of token n, which cancels."""
        patches = y[:, self.num_prefix :]
        rows, columns = self.rows, self.columns
        if self.normalised:
            total = rows.new_ones(1, self.num_out, 1)
        elif self.weight is None:
            total = (rows.sum(0)[:, None] * columns.sum(0)).reshape(1, -1, 1)
        else:
            total = separable(self.weight[..., None], rows, columns)
        inverse = _at_most_one(1 / torch.where(total > 0, total, torch.inf)).to(y.dtype)
        spread = separable(patches * inverse, rows.mT, columns.mT)
        back = _over(spread, separable(inverse, rows.mT, columns.mT))
        return _beside_prefix(y, self.num_prefix, back)

    def weights(self) -> Float[Tensor, "b n p"]:
        support = kronecker(self.rows, self.columns)
        return DenseMerge.from_support(support, self.weight).mask

    def sizes(self, size: Float[Tensor, "_ kn"]) -> Float[Tensor, "_ kp"]:
        if self.size_out is not None:
            return self.size_out
        rows, columns = self.shares or (row_normalise(self.rows), row_normalise(self.columns))
        merged = _over_grid(size[:, self.num_prefix :, None], rows, columns)[..., 0]
        return _beside_prefix(size, self.num_prefix, merged)


def kronecker(rows: Float[Tensor, "h h2"], columns: Float[Tensor, "w w2"]) -> Tensor:
    """The support of a grid as a matrix over its tokens in raster order."""
    support = rows[:, None, :, None] * columns[None, :, None, :]
    return support.reshape(rows.shape[0] * columns.shape[0], -1)


def separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`(rows (x) columns)^T x` for tokens in raster order: `b (h w) c -> b (h2 w2) c`."""
    (h, h2), (w, w2) = rows.shape, columns.shape
    rows, columns = rows.to(x.dtype), columns.to(x.dtype)
    c = x.shape[-1]
    x = rows.mT @ x.reshape(-1, h, w * c)
    x = columns.mT @ x.reshape(-1, h2, w, c)
    return x.reshape(-1, h2 * w2, c)


def _over_grid(x: Tensor, rows: Tensor, columns: Tensor, weight: Tensor | None = None) -> Tensor:
    """The product `separable`; with a weight per token, its weighted mean."""
    if columns.shape[0] <= _MAX_SIDE and _multiplies(x, rows, columns, weight):
        return _merge_grid(x, weight, rows, columns)
    if weight is None:
        return separable(x, rows, columns)
    share = _at_most_one(weight[..., None]).to(x.dtype)
    return _over(separable(x * share, rows, columns), separable(share, rows, columns))


@dataclass(frozen=True, eq=False, kw_only=True)
class StaticMerge(Merge):
    """A merge folded into a constant matrix, prefix included: a single product."""

    matrix: Float[Tensor, "kp kn"]
    back: Float[Tensor, "kn kp"]
    size_out: Float[Tensor, "kp"]
    members: tuple[Int[Tensor, "kp m"], Float[Tensor, "kp m"]] | None = None
    """The matrix as `members_of` lists it, for a kernel."""

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
        if (
            self.members is not None
            and x.shape[1] == self.matrix.shape[1]
            and _multiplies(x, self.matrix)
        ):
            return _gather(x, *self.members)
        return self.matrix.to(x.dtype) @ x

    def restore(self, y: Float[Tensor, "b kp c"]) -> Float[Tensor, "b kn c"]:
        return self.back.to(y.dtype) @ y

    def weights(self) -> Float[Tensor, "b n p"]:
        return self.matrix[self.num_prefix :, self.num_prefix :].mT[None]

    def sizes(self, size: Float[Tensor, "_ kn"]) -> Float[Tensor, "_ kp"]:
        return self.size_out[None]


def members_of(
    matrix: Float[Tensor, "p t"],
) -> tuple[Int[Tensor, "p m"], Float[Tensor, "p m"]] | None:
    """The nonzero columns of each row of a matrix, and their values; None if a row has too many."""
    if matrix.is_meta:
        return None
    most = max(1, int((matrix != 0).sum(dim=1).max()))
    if most > _MAX_MEMBERS:
        return None
    who = matrix.abs().topk(most, dim=1).indices
    return who.int(), matrix.gather(1, who)


def _with_prefix(mask: Tensor, num_prefix: int) -> Tensor:
    """The mask extended by an identity for the prefix tokens."""
    whole = mask.new_zeros(mask.shape[0] + num_prefix, mask.shape[1] + num_prefix)
    whole[:num_prefix, :num_prefix].fill_diagonal_(1)
    whole[num_prefix:, num_prefix:] = mask
    return whole


def token_sizes(
    tokens: Float[Tensor, "b t c"], size: Float[Tensor, "_ t"] | None
) -> Float[Tensor, "b t"]:
    """The sizes of the tokens of each image, in single precision; ones if `size` is None."""
    if size is None:
        return tokens.new_ones(tokens.shape[:2]).float()
    return size.float().expand(tokens.shape[0], -1)


def compose_weights(merges: Sequence[Merge]) -> Float[Tensor, "b n0 p"]:
    """The mask of several merges in a row: weights of the last tokens over the first."""
    if not merges:
        raise ValueError("merges: got none; composing needs at least one merge.")
    total = merges[0].weights()
    for merge in merges[1:]:
        total = total @ merge.weights().to(total.dtype)
    return total


def restore_through(merges: Sequence[Merge], y: Float[Tensor, "b kp c"]) -> Tensor:
    """Spread the tokens after several merges back to the places before the first."""
    for merge in reversed(merges):
        y = merge.restore(y)
    return y


def _at_most_one(weight: Tensor) -> Tensor:
    """Weights `b n 1` scaled to at most one, for half precision: only their ratios matter."""
    return weight / weight.detach().amax(dim=1, keepdim=True)


def _multiplies(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel multiplies these; under autocast torch does, in the precision it chooses."""
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
    stays: Tensor,
    leaves: Tensor,
    goes: Tensor,
    keep_norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    (b, t, c), p = tokens.shape, stays.shape[1]
    sizes = tokens.new_empty(b, p, dtype=torch.float32)
    if values is None:
        return tokens.new_empty(b, p, c), sizes, sizes.new_empty(0)
    return tokens.new_empty(b, p, c), sizes, sizes.new_empty(b, p - (t - values.shape[1]))


@operator
def _gather(tokens: Tensor, who: Tensor, share: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], who.shape[0], tokens.shape[2])


@operator
def _merge_grid(tokens: Tensor, weight: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
    b, c, places = tokens.shape[0], tokens.shape[2], rows.shape[1] * columns.shape[1]
    if stays_map(tokens):
        return tokens.new_empty(b, c, places).mT
    return tokens.new_empty(b, places, c)


@register_flop_formula(torch.ops.ltm.gather)
def _(tokens: list[int], who: list[int], *_: Any, **__: Any) -> int:
    """Operations of the torch definition, a product with the full matrix."""
    return 2 * math.prod(tokens) * who[0]


@register_flop_formula(torch.ops.ltm.merge_grid)
def _(tokens: list[int], weight: Any, rows: list[int], columns: list[int], **_: Any) -> int:
    (b, _t, c), (h, h2), (w, w2) = tokens, rows, columns
    return 2 * b * (h * h2 * w + h2 * w * w2) * (c + (weight is not None))


def pool_by_size(
    x: Float[Tensor, "b n c"], size: Float[Tensor, "_ n"], kind: str
) -> Float[Tensor, "b c"]:
    """Pool by mean weighted by size ("avg"), by maximum ("max"), or by half of each ("avgmax")."""
    size = size[..., None]
    largest = x.masked_fill(size <= 0, -torch.inf).amax(dim=1) if "max" in kind else None
    if kind == "max":
        return cast("Tensor", largest)
    mean = (x * (size / size.sum(dim=1, keepdim=True)).to(x.dtype)).sum(dim=1)
    return mean if largest is None else 0.5 * (mean + largest)

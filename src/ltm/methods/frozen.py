"""A frozen merger: a decision that is the same for every image, stored as constants.

Letters: n patch tokens, p merged tokens, h and w the sides of a grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ltm.core.merge import GridMerge, Merge, StaticMerge, members_of
from ltm.core.schedule import Grid
from ltm.methods.base import Decision, Hints, Merger, Site


class FrozenMerger(Merger):
    """Applies one matrix on sequences, prefix included, and two factors on grids."""

    constant = True
    PREFIX: ClassVar[str] = "fixed_"
    """How the names of its tensors begin."""

    fixed_matrix: Tensor
    fixed_back: Tensor
    fixed_who: Tensor | None
    """The tokens of each merged token, for a kernel; derived from the matrix, so not saved."""
    fixed_share: Tensor | None
    """Their shares; not saved either."""
    fixed_rows: Tensor
    fixed_columns: Tensor
    fixed_weight: Tensor | None
    fixed_size_out: Tensor

    def __init__(self, site: Site, constants: Mapping[str, Tensor]) -> None:
        super().__init__(site)
        self.keeps_grid = site.grid_in is not None
        self.separable = "rows" in constants
        self.register_buffer("fixed_weight", None)
        for name, value in constants.items():
            self.register_buffer(f"{self.PREFIX}{name}", value.detach().clone())
        self.list_members_()
        self.register_load_state_dict_post_hook(_list_members)  # pyright: ignore[reportUnknownMemberType]

    @staticmethod
    def of(site: Site, merge: Merge, size: Float[Tensor, "1 kn"]) -> FrozenMerger:
        """Store a merge; `size` holds the sizes of the tokens before it."""
        if isinstance(merge, GridMerge):
            return FrozenMerger(site, {**_factors(merge), "size_out": merge.sizes(size)})
        static = StaticMerge.fold(merge, size)
        names = ("matrix", "back", "size_out")
        return FrozenMerger(site, {name: getattr(static, name) for name in names})

    @staticmethod
    def saved_in(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The constants among the saved tensors of a merger; empty if there are none."""
        prefix = FrozenMerger.PREFIX
        return {n.removeprefix(prefix): v for n, v in saved.items() if n.startswith(prefix)}

    def list_members_(self) -> None:
        """Update what is derived from the matrix of a sequence."""
        found = None if self.separable else members_of(self.fixed_matrix)
        who, share = (None, None) if found is None else found
        self.register_buffer("fixed_who", who, persistent=False)
        self.register_buffer("fixed_share", share, persistent=False)

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        return Decision(merge=self._merge())

    def _merge(self) -> Merge:
        k = self.site.num_prefix
        if self.separable:
            return GridMerge(
                rows=self.fixed_rows,
                columns=self.fixed_columns,
                weight=self.fixed_weight,
                normalised=self.fixed_weight is None,
                size_out=self.fixed_size_out,
                num_prefix=k,
            )
        who, share = self.fixed_who, self.fixed_share
        return StaticMerge(
            matrix=self.fixed_matrix,
            members=None if who is None or share is None else (who, share),
            back=self.fixed_back,
            size_out=self.fixed_size_out,
            num_prefix=k,
        )

    def require_planned(
        self, num_in: int, grid_in: Grid | None, patches: Grid | None = None
    ) -> None:
        site = self.site
        if site.is_planned(num_in, grid_in, patches):
            return
        kind, pairs = "tokens", ((site.grid_in, site.num_in), (grid_in, num_in))
        if num_in == site.num_in and grid_in is None:
            kind, pairs = "patches", ((site.grid, num_in), (patches, num_in))
        made, found = (str(n) if grid is None else f"{grid[0]} x {grid[1]}" for grid, n in pairs)
        raise ValueError(
            f"the mask of block {site.block} is frozen for {made} {kind}, and {found} came in; "
            "convert for images of this size before freeze_."
        )


def _list_members(merger: FrozenMerger, _keys: object) -> None:
    merger.list_members_()


def _factors(merge: GridMerge) -> dict[str, Tensor]:
    """The factors of a grid merge, with the weight folded in if it is separable."""
    h, w = merge.grid_in
    table = merge.rows.new_ones(h, w) if merge.weight is None else merge.weight[0].reshape(h, w)
    row_weight, column_weight = table.sum(1), table.sum(0)
    outer = row_weight[:, None] * column_weight / table.sum()
    if not torch.allclose(outer, table, rtol=1e-4, atol=1e-5):
        return {"rows": merge.rows, "columns": merge.columns, "weight": table.reshape(1, -1)}
    factors = (merge.rows * row_weight[:, None], merge.columns * column_weight[:, None])
    rows, columns = (factor / factor.sum(0, keepdim=True) for factor in factors)
    return {"rows": rows, "columns": columns}

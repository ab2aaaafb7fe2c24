"""LTM with a learned support: a static pattern of neighbours, chosen by training.

Letters: b images, n patch tokens, p merged tokens, c channels, k candidates of a target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ltm import kernels
from ltm.core import mask_gradient
from ltm.core.merge import (
    DenseMerge,
    GridMerge,
    Merge,
    StaticMerge,
)
from ltm.core.schedule import Grid
from ltm.core.support import anchors
from ltm.methods.base import Decision, Hints, Merger, Site, token_size
from ltm.methods.ltm.axis import Axis
from ltm.methods.ltm.masks import dense, fold_grid, resample, shares, softmax_of, softmax_on
from ltm.methods.ltm.step import LTMMerger, require_room

if TYPE_CHECKING:
    from ltm.methods.ltm.config import LTM


class LearnedMerger(LTMMerger):
    """Targets at evenly spaced anchors, each the average of chosen neighbours."""

    running_logits: Tensor
    fixed_rows: Tensor
    fixed_columns: Tensor
    fixed_matrix: Tensor
    fixed_back: Tensor
    fixed_wide: Tensor
    fixed_size_out: Tensor
    chosen_size_out: Tensor

    def __init__(self, site: Site, config: LTM) -> None:
        if config.space == "token" and config.weights == "informative" and site.num_classes > 0:
            _check_token_space(site)
        super().__init__(site, config)
        self.keeps_grid = site.grid_in is not None
        if site.grid_in is not None and site.grid_out is not None:
            self.rows = Axis(site.grid_in[0], site.grid_out[0])
            self.columns = Axis(site.grid_in[1], site.grid_out[1])
        else:
            self.sequence = Axis(site.num_in, site.num_out, site.grid)
        self.noise = 1.0
        """Scale of the noise on the logits in training; a training loop anneals it."""
        if config.scope == "batch":
            targets = (site.num_out,) if config.space == "token" else ()
            self.register_buffer("running_logits", torch.zeros(site.num_in, *targets))
        self.frozen = False
        self.chosen = False
        """Supports are constants, and the weights alone depend on the image."""
        self.register_load_state_dict_post_hook(_follow_loaded)  # pyright: ignore[reportUnknownMemberType]

    def feature_width(self) -> int:
        per_token = self.site.width
        return per_token * self.site.num_out if self.config.space == "token" else per_token

    def feature(self, merged: Float[Tensor, "b t c"], size: Tensor) -> Float[Tensor, "b d"]:
        if self.config.space == "pooled":
            return super().feature(merged, size)
        return merged[:, self.site.num_prefix :].flatten(1)

    def forget_statistics_(self) -> None:
        super().forget_statistics_()
        if self.config.scope == "batch":
            self.running_logits.zero_()

    def set_noise_(self, scale: float) -> None:
        self.noise = scale

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        if self.frozen:
            return Decision(merge=self._folded())
        supports = self._supports(tokens.shape[1] - self.site.num_prefix, hints)
        if self.config.space == "token" and self.informative is not None:
            return self._token_space(tokens, hints, dense(supports))
        logits, weight = self._weigh(tokens, hints)
        if self.config.mask_form == "letter" and logits is not None:
            merge = self._letter(tokens, hints, dense(supports), logits)
        else:
            merge = self._masked(supports, weight)
            if self.chosen and hints.size is None and isinstance(merge, GridMerge):
                merge = self._with_sizes(merge, hints)
        return Decision(merge=merge, values=logits)

    def _supports(self, num_in: int, hints: Hints) -> tuple[Tensor, ...]:
        if self.chosen and self._is_planned(num_in, hints.grid_in, hints.patches):
            return self._chosen_supports()
        noise = self.noise if self.training else 0.0
        if hints.grid_in is None or hints.grid_out is None:
            return (self.sequence(num_in, hints.num_out, noise, hints.patches),)
        (h, w), (h2, w2) = hints.grid_in, hints.grid_out
        return self.rows(h, h2, noise), self.columns(w, w2, noise)

    def _is_planned(self, num_in: int, grid_in: Grid | None, patches: Grid | None) -> bool:
        """Whether these are the tokens that the site was made for; what is left follows."""
        site = self.site
        if site.grid_in is not None:
            return grid_in == site.grid_in
        return num_in == site.num_in and patches in (None, site.grid)

    def require_planned(
        self, num_in: int, grid_in: Grid | None, patches: Grid | None = None
    ) -> None:
        if self._is_planned(num_in, grid_in, patches):
            return
        if self.config.space == "token" and self.active:
            raise ValueError(
                f"space: got 'token', whose class centroids at block {self.site.block} belong to "
                f"{self.site.num_in} tokens, and {num_in} came in; convert for images of this size."
            )
        if not self.frozen:
            return
        site, kind = self.site, "tokens"
        pairs = (site.grid_in, site.num_in), (grid_in, num_in)
        if num_in == site.num_in and grid_in is None:
            kind, pairs = "patches", ((site.grid, num_in), (patches, num_in))
        made, found = (str(n) if grid is None else f"{grid[0]} x {grid[1]}" for grid, n in pairs)
        raise ValueError(
            f"the mask of block {site.block} is frozen for {made} {kind}, and {found} came in; "
            "convert for images of this size before freeze_."
        )

    def _weigh(
        self, tokens: Float[Tensor, "b t c"], hints: Hints
    ) -> tuple[Tensor | None, Tensor | None]:
        """The state of every patch, and what it weighs; None where all are alike."""
        k, step = self.site.num_prefix, self.step(hints)
        plain = None if hints.size is None else hints.size[:, k:]
        if self.config.scope == "batch" and self.informative is not None:
            logits = self._batch_logits(tokens, hints, step)
            if logits is None:
                return None, plain
            return logits, logits.exp() if plain is None else plain * logits.exp()
        logits, weight = kernels.weigh(tokens, hints.size, hints.carry, step, k)
        return logits, plain if weight is None else weight[:, k:]

    def _batch_logits(
        self, tokens: Tensor, hints: Hints, step: kernels.Step | None
    ) -> Float[Tensor, "1 n"] | None:
        """The state of every token: the whole batch shares one."""
        k = self.site.num_prefix
        if not self.training:
            running = resample(self.running_logits, tokens.shape[1] - k)
            return None if step is None else running[None]
        logits, _ = kernels.weigh(tokens, hints.size, hints.carry, step, k)
        return None if logits is None else self._shared(logits)

    def _shared(self, logits: Tensor) -> Tensor:
        """The mean state of a batch, which evaluation knows by its running mean."""
        logits = logits.mean(dim=0, keepdim=True)
        with torch.no_grad():
            if logits.shape[1:] == self.running_logits.shape:
                self.running_logits.lerp_(logits[0].to(self.running_logits.dtype), 0.1)
        return logits

    def _masked(self, supports: tuple[Tensor, ...], weight: Tensor | None) -> Merge:
        """Softmax over the support: `A (m e^s) / A^T (m e^s)`."""
        k = self.site.num_prefix
        if len(supports) == 2:
            return GridMerge(rows=supports[0], columns=supports[1], weight=weight, num_prefix=k)
        return DenseMerge.from_support(supports[0], weight, num_prefix=k)

    def _letter(self, tokens: Tensor, hints: Hints, support: Tensor, logits: Tensor) -> Merge:
        """Softmax of the product `G~ o M`: tokens outside the support weigh as those at s = 0."""
        k = self.site.num_prefix
        # Not of every image where all share their sizes: they may share the mask, too.
        size = token_size(tokens[:1], hints) if hints.size is None else hints.size.float()
        mask = softmax_of(support, size[:, k:], logits[..., None])
        return DenseMerge(mask=mask, share=shares(support), num_prefix=k)

    def _token_space(self, tokens: Tensor, hints: Hints, support: Tensor) -> Decision:
        """The paper's letter: the gradient of the whole mask, `Z V^T`, one row per token."""
        step, k, config = self.step(hints), self.site.num_prefix, self.config
        size = token_size(tokens, hints)[:, k:]
        softmax = softmax_of if config.mask_form == "letter" else softmax_on
        state = tokens.new_zeros(1, *support.shape, dtype=torch.float32)
        if hints.carry is not None:
            state = hints.carry[:, :, anchors(hints.carry.shape[2], hints.num_out)]
        if step is not None and config.scope == "batch" and not self.training:
            state = self.running_logits[None]
        elif step is not None:
            patches = step.looks_at(tokens[:, k:])
            before = softmax(support, size, state)
            merged = before.to(patches.dtype).mT @ patches
            gradient = step.direction(merged.flatten(1))
            change = mask_gradient.token_gradient(patches, gradient.reshape(merged.shape))
            if step.gain is not None:
                spread = change.flatten(1).std(dim=1, correction=0)[:, None, None]
                change = step.gain * change / (spread + 1e-6)
            state = (state - config.eta * change).clamp(-8, 8)
            state = state if config.scope == "sample" else self._shared(state)
        mask = softmax(support, size, state)
        merge = DenseMerge(mask=mask, share=shares(support), num_prefix=k)
        return Decision(merge=merge, carry=mask.mT @ state.expand_as(mask))

    def fold_(self, decision: Decision, hints: Hints) -> None:
        """Keep a decision that is the same for every image as constants."""
        merge = decision.merge
        if self.active and self.config.scope == "sample":
            self.choose_()
            return
        size = next(self.parameters()).new_ones(1, merge.num_in + merge.num_prefix)
        size = size if hints.size is None else hints.size[:1]
        if isinstance(merge, GridMerge):
            constants = {**fold_grid(merge), "size_out": merge.sizes(size)}
        else:
            static = StaticMerge.fold(merge, size)
            constants = {n: getattr(static, n) for n in ("matrix", "back", "size_out")}
        for name, value in constants.items():
            self.register_buffer(f"fixed_{name}", value.detach().clone())
        for name in ("rows", "columns", "sequence", "informative"):
            if hasattr(self, name):
                setattr(self, name, None)
        self.frozen = True
        self.widen_()

    def expect_(self, saved: Mapping[str, Tensor]) -> None:
        """Constants have the form that the weights at the time allowed."""
        if not self.frozen:
            return
        for name in [name for name in self._buffers if name.startswith("fixed_")]:
            delattr(self, name)
        for name, value in saved.items():
            if name.startswith("fixed_"):
                self.register_buffer(name, torch.empty_like(value))

    def widen_(self) -> None:
        """Keep the matrix of a folded sequence as kernels read it too; it is not saved."""
        if hasattr(self, "fixed_matrix"):
            self.register_buffer("fixed_wide", kernels.widened(self.fixed_matrix), persistent=False)

    def choose_(self) -> None:
        """Keep the supports as constants: who may join does not depend on the image any more."""
        self.chosen = True
        site = self.site
        if site.grid_in is not None and site.grid_out is not None:
            supports = {
                "rows": self.rows(site.grid_in[0], site.grid_out[0], 0.0),
                "columns": self.columns(site.grid_in[1], site.grid_out[1], 0.0),
            }
            merge = GridMerge(**supports)
            ones = supports["rows"].new_ones(1, site.num_in, dtype=torch.float32)
            supports["size_out"] = merge.sizes(ones)
        else:
            supports = {"sequence": self.sequence(site.num_in, site.num_out, 0.0)}
        for name, value in supports.items():
            # They follow from the logits, which are saved.
            self.register_buffer(f"chosen_{name}", value.detach().clone(), persistent=False)

    def _chosen_supports(self) -> tuple[Tensor, ...]:
        names = ("sequence",) if self.site.grid_in is None else ("rows", "columns")
        return tuple(getattr(self, f"chosen_{name}") for name in names)

    def _with_sizes(self, merge: GridMerge, hints: Hints) -> GridMerge:
        """The merge with the sizes that it leaves, where they are known beforehand."""
        planned = self._is_planned(merge.num_in, hints.grid_in, hints.patches)
        return dataclasses.replace(merge, size_out=self.chosen_size_out) if planned else merge

    def _folded(self) -> Merge:
        k = self.site.num_prefix
        if hasattr(self, "fixed_rows"):
            weight = getattr(self, "fixed_weight", None)
            return GridMerge(
                rows=self.fixed_rows,
                columns=self.fixed_columns,
                weight=weight,
                normalised=weight is None,
                size_out=self.fixed_size_out,
                num_prefix=k,
            )
        return StaticMerge(
            matrix=self.fixed_matrix,
            wide=self.fixed_wide,
            back=self.fixed_back,
            size_out=self.fixed_size_out,
            num_prefix=k,
        )

    def adopt_(self, other: Merger) -> None:
        super().adopt_(other)
        for name in ("rows", "columns", "sequence"):
            mine, theirs = getattr(self, name, None), getattr(other, name, None)
            if isinstance(mine, Axis) and isinstance(theirs, Axis):
                mine.adopt_(theirs)


def _follow_loaded(merger: LearnedMerger, _keys: object) -> None:
    """Supports follow the logits that were loaded, and what kernels read a folded matrix."""
    if merger.chosen:
        merger.choose_()
    merger.widen_()


def _check_token_space(site: Site) -> None:
    # 5 GB over the blocks of ViT-B at 1000 classes.
    num_classes, tokens, width = site.num_classes, site.num_out, site.width
    require_room(
        num_classes * tokens * width,
        "space: got 'token'; its centroids",
        f"block {site.block} ({num_classes} classes x {tokens} tokens x {width} channels)",
        "use space='pooled'.",
    )

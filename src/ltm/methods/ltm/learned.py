"""LTM with a learned support: a static pattern of neighbours, chosen by training.

Letters: b images, n patch tokens, p merged tokens (targets), c channels, k candidates per target;
`M` the support, `G~` the state, `m` the sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ltm.core.mask_gradient import Step, mean_and_spread, token_gradient, weigh
from ltm.core.merge import (
    DenseMerge,
    GridMerge,
    Merge,
    kronecker,
    row_normalise,
    token_sizes,
)
from ltm.core.schedule import Grid
from ltm.core.support import (
    Candidates,
    all_candidates,
    anchors,
    axis_candidates,
    choose,
    grid_candidates,
    initial_logits,
    resample_logits,
    support_matrix,
)
from ltm.core.validation import settle
from ltm.methods.base import Decision, Hints, Merger, Site
from ltm.methods.frozen import FrozenMerger
from ltm.methods.ltm.step import Informative, LTMMerger, require_room


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A trained static support. Options that differ from our default are those of the paper."""

    space: Literal["pooled", "token"] = "pooled"
    """Measure class membership on the mean merged token, or on all merged tokens (the paper's
    form)."""
    scope: Literal["sample", "batch"] = "sample"
    """Take one step per image, or one for the whole batch, with a running mean in evaluation."""
    mask_form: Literal["masked", "letter"] = "masked"
    """Take the softmax over the support, or of the product with the support (the paper's form), in
    which tokens outside the support get a weight too."""
    candidates: Literal["neighbours", "all"] = "neighbours"
    """Which tokens a target chooses from: its anchor, which is always in, and the tokens around it;
    or all tokens, without an anchor (the paper's form, with a choice for each of N x P entries; on
    grids along each side)."""
    by_size: bool = True
    """Weigh tokens by the number of patches they stand for; the paper's mask does not."""

    def __post_init__(self) -> None:
        settle(self)


class Axis(nn.Module):
    """The learned support along one axis: a sequence of patches, or one side of a grid."""

    index: Tensor
    valid: Tensor
    anchor: Tensor
    home: Tensor
    chosen: Tensor | None
    """The support of a frozen merger; derived from the logits, so not saved."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        patches: tuple[int, int] | None = None,
        *,
        chooses_from_all: bool = False,
    ) -> None:
        super().__init__()
        self.num_in, self.num_out, self.patches = num_in, num_out, patches
        self.chooses_from_all = chooses_from_all
        candidates = self._candidates(num_in, num_out, patches)
        self.logits = nn.Parameter(initial_logits(candidates))
        for name in ("index", "valid", "anchor", "home"):
            self.register_buffer(name, getattr(candidates, name), persistent=False)
        self.register_buffer("chosen", None, persistent=False)

    def choose_(self) -> None:
        """Store the support that the logits give now."""
        self.chosen = None
        self.chosen = self(self.num_in, self.num_out, 0.0).detach().clone()

    def _candidates(self, num_in: int, num_out: int, patches: tuple[int, int] | None) -> Candidates:
        if patches is None:
            near = axis_candidates(num_in, num_out)
        else:
            near = grid_candidates(patches, num_in, num_out)
        return all_candidates(near, num_in) if self.chooses_from_all else near

    def forward(
        self, num_in: int, num_out: int, noise: float, patches: tuple[int, int] | None = None
    ) -> Float[Tensor, "n p"]:
        """The support; `patches` is the patch grid of the image, if it is not the planned one."""
        candidates, logits, patches = self._own(), self.logits, patches or self.patches
        planned = (num_in, num_out, patches) == (self.num_in, self.num_out, self.patches)
        if planned and self.chosen is not None:
            return self.chosen
        if not planned:
            other = self._candidates(num_in, num_out, patches)
            candidates = Candidates(*(getattr(other, f).to(logits.device) for f in vars(other)))
            logits = self.fitted(candidates)
        return support_matrix(choose(logits, noise=noise), candidates, num_in)

    def _own(self) -> Candidates:
        return Candidates(self.index, self.valid, self.anchor, self.home)

    def fitted(self, candidates: Candidates) -> Float[Tensor, "p k"]:
        """Logits for other candidates: their initial logits plus what was learned here.

        The initial logits are a partition, in which no token is left out; resampling them would
        break it. If a target has another number of candidates, nothing carries over.
        """
        start = initial_logits(candidates).to(self.logits)
        learned = resample_logits(self.logits - initial_logits(self._own()), len(start))
        return start + learned if learned.shape == start.shape else start

    def adopt_(self, other: Axis) -> None:
        """Copy what another axis has learned."""
        same = (self.num_in, self.num_out, self.patches) == (
            other.num_in,
            other.num_out,
            other.patches,
        )
        self.logits.data.copy_(other.logits if same else other.fitted(self._own()))


class LearnedMerger(LTMMerger):
    """Merges chosen neighbours of evenly spaced anchors."""

    running_logits: Tensor

    def __init__(self, site: Site, settings: Learned, weights: Informative | None) -> None:
        self.settings = settings
        if settings.space == "token" and weights is not None:  # 5 GB on ViT-B with 1000 classes
            width, tokens, classes = site.width, site.num_out, site.num_classes
            require_room(
                classes * tokens * width,
                "space: got 'token'; its centroids",
                f"block {site.block} ({classes} classes x {tokens} tokens x {width} channels)",
                "use space='pooled'.",
            )
        super().__init__(site, weights)
        self.keeps_grid = site.grid_in is not None
        axis = partial(Axis, chooses_from_all=settings.candidates == "all")
        if site.grid_in is not None and site.grid_out is not None:
            self.rows = axis(site.grid_in[0], site.grid_out[0])
            self.columns = axis(site.grid_in[1], site.grid_out[1])
        else:
            self.sequence = axis(site.num_in, site.num_out, site.grid)
        self.noise = 1.0
        """The scale of the noise on the logits in training; the training loop anneals it."""
        if settings.scope == "batch":
            targets = (site.num_out,) if settings.space == "token" else ()
            self.register_buffer("running_logits", torch.zeros(site.num_in, *targets))

    def feature_width(self) -> int:
        per_token = self.site.width
        return per_token * self.site.num_out if self.settings.space == "token" else per_token

    def feature(self, merged: Float[Tensor, "b t c"], size: Tensor) -> Float[Tensor, "b d"]:
        if self.settings.space == "pooled":
            return super().feature(merged, size)
        return merged[:, self.site.num_prefix :].flatten(1)

    def forget_statistics_(self) -> None:
        super().forget_statistics_()
        if self.settings.scope == "batch":
            self.running_logits.zero_()

    def set_noise_(self, scale: float) -> None:
        self.noise = scale

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        supports = self._supports(tokens.shape[1] - self.site.num_prefix, hints)
        if self.settings.space == "token" and self.informative is not None:
            return self._token_space(tokens, hints, _dense(supports))
        logits, weight = self._weigh(tokens, hints)
        if self.settings.mask_form == "letter" and logits is not None:
            merge = self._letter(tokens, hints, _dense(supports), logits)
        else:
            merge = self._masked(supports, weight, hints)
        return Decision(merge=merge, values=logits)

    def _supports(self, num_in: int, hints: Hints) -> tuple[Tensor, ...]:
        noise = self.noise if self.training else 0.0
        if hints.grid_in is None or hints.grid_out is None:
            return (self.sequence(num_in, hints.num_out, noise, hints.patches),)
        (h, w), (h2, w2) = hints.grid_in, hints.grid_out
        return self.rows(h, h2, noise), self.columns(w, w2, noise)

    def require_planned(
        self, num_in: int, grid_in: Grid | None, patches: Grid | None = None
    ) -> None:
        planned = self.site.is_planned(num_in, grid_in, patches)
        if not planned and self.settings.space == "token" and self.active:
            raise ValueError(
                f"space: got 'token', whose class centroids at block {self.site.block} belong to "
                f"{self.site.num_in} tokens, and {num_in} came in; convert for images of this size."
            )

    def _weigh(
        self, tokens: Float[Tensor, "b t c"], hints: Hints
    ) -> tuple[Tensor | None, Tensor | None]:
        """The logits and weights of the patches; None if they are all the same."""
        k, step = self.site.num_prefix, self.step(hints)
        counts = hints.size is not None and self.settings.by_size
        plain = hints.size[:, k:] if counts and hints.size is not None else None
        if self.settings.scope == "batch" and self.informative is not None:
            logits = self._batch_logits(tokens, hints, step)
        else:
            logits, weight = weigh(tokens, hints.size, hints.carry, step, k)
            if weight is not None and self.settings.by_size:
                return logits, weight[:, k:]
        if logits is None:
            return None, plain
        return logits, logits.exp() if plain is None else plain * logits.exp()

    def _batch_logits(
        self, tokens: Tensor, hints: Hints, step: Step | None
    ) -> Float[Tensor, "_ n"] | None:
        """The logits of the patches, one set for the whole batch."""
        k = self.site.num_prefix
        if not self.training:
            running = _resample(self.running_logits, tokens.shape[1] - k)
            return None if step is None else self._as_sizes(running[None], hints)
        logits, _ = weigh(tokens, hints.size, hints.carry, step, k)
        return None if logits is None else self._as_sizes(self._shared(logits), hints)

    @staticmethod
    def _as_sizes(shared: Float[Tensor, "1 n"], hints: Hints) -> Float[Tensor, "_ n"]:
        """For every image where each has sizes, and so a mask, of its own."""
        return shared if hints.size is None else shared.expand(hints.size.shape[0], -1)

    def _shared(self, logits: Tensor) -> Tensor:
        """The mean logits of a batch; updates the running mean, which evaluation uses."""
        logits = logits.mean(dim=0, keepdim=True)
        with torch.no_grad():
            if logits.shape[1:] == self.running_logits.shape:
                self.running_logits.lerp_(logits[0].to(self.running_logits.dtype), 0.1)
        return logits

    def _masked(self, supports: tuple[Tensor, ...], weight: Tensor | None, hints: Hints) -> Merge:
        """Softmax over the support: `A (m e^s) / A^T (m e^s)`."""
        k = self.site.num_prefix
        if len(supports) == 2:
            return GridMerge(rows=supports[0], columns=supports[1], weight=weight, num_prefix=k)
        return DenseMerge.from_support(supports[0], weight, num_prefix=k)

    def _letter(self, tokens: Tensor, hints: Hints, support: Tensor, logits: Tensor) -> Merge:
        """Softmax of the product `G~ o M`: tokens outside the support weigh as if s were 0."""
        k = self.site.num_prefix
        mask = _softmax_of(support, self._counted(tokens, hints), logits[..., None])
        return DenseMerge(mask=mask, share=_shares(support), num_prefix=k)

    def _counted(self, tokens: Tensor, hints: Hints) -> Float[Tensor, "_ n"]:
        """How much each patch token counts in the mask: its size, or one.

        A single row where all images share their sizes: they may share the mask, too.
        """
        size = hints.size if self.settings.by_size else None
        size = tokens.new_ones(1, tokens.shape[1]) if size is None else size
        return size[:, self.site.num_prefix :].float()

    def _token_space(self, tokens: Tensor, hints: Hints, support: Tensor) -> Decision:
        """The paper's form: the gradient of the whole mask, `Z V^T`, with one row per token."""
        step, k, settings = self.step(hints), self.site.num_prefix, self.settings
        size = self._counted(tokens, hints)
        softmax = _softmax_of if settings.mask_form == "letter" else _softmax_on
        state = tokens.new_zeros(1, *support.shape, dtype=torch.float32)
        if hints.carry is not None:
            state = hints.carry[:, :, anchors(hints.carry.shape[2], hints.num_out)]
        if step is not None and settings.scope == "batch" and not self.training:
            state = self.running_logits[None]
        elif step is not None:
            patches = step.looks_at(tokens[:, k:])
            before = softmax(support, size, state)
            merged = before.to(patches.dtype).mT @ patches
            gradient = step.direction(merged.flatten(1))
            change = token_gradient(patches, gradient.reshape(merged.shape))
            if step.gain is not None:
                real = token_sizes(tokens, hints.size)[:, k:, None] > 0
                _, spread = mean_and_spread(change.flatten(1), real.expand_as(change).flatten(1))
                change = step.gain * change / (spread[..., None] + 1e-6)
            state = (state - step.eta * change).clamp(-8, 8)
            state = state if settings.scope == "sample" else self._shared(state)
        mask = softmax(support, size, state)
        merge = DenseMerge(mask=mask, share=_shares(support), num_prefix=k)
        return Decision(merge=merge, carry=mask.mT @ state.expand_as(mask))

    def frozen(self, decision: Decision | None, hints: Hints | None) -> Merger:
        """A mask that is the same for all images becomes a constant; else the support does."""
        if self.active and self.settings.scope == "sample":
            return ChosenMerger.of(self)
        if decision is None or hints is None:
            return super().frozen(decision, hints)
        merge = decision.merge
        ones = next(self.parameters()).new_ones(1, merge.num_in + merge.num_prefix)
        return FrozenMerger.of(self.site, merge, ones if hints.size is None else hints.size[:1])

    def frozen_as(self, saved: Mapping[str, Tensor]) -> Merger:
        constants = FrozenMerger.saved_in(saved)
        return FrozenMerger(self.site, constants) if constants else super().frozen_as(saved)

    def adopt_(self, other: Merger) -> None:
        super().adopt_(other)
        for name in ("rows", "columns", "sequence"):
            mine, theirs = getattr(self, name, None), getattr(other, name, None)
            if isinstance(mine, Axis) and isinstance(theirs, Axis):
                mine.adopt_(theirs)


class ChosenMerger(LearnedMerger):
    """A frozen learned support: only the weights depend on the image."""

    size_out: Tensor
    row_shares: Tensor
    column_shares: Tensor

    @staticmethod
    def of(learned: LearnedMerger) -> ChosenMerger:
        """Freeze the support of a merger and share everything else with it."""
        chosen = ChosenMerger.__new__(ChosenMerger)
        held: dict[str, Any] = {
            n: v.copy() if isinstance(v, dict) else v for n, v in vars(learned).items()
        }
        vars(chosen).update(held)
        chosen.statistics = None
        chosen.choose_()
        chosen.register_load_state_dict_post_hook(_follow_loaded)  # pyright: ignore[reportUnknownMemberType]
        return chosen

    def choose_(self) -> None:
        """Update what is derived from the logits."""
        for axis in self.children():
            if isinstance(axis, Axis):
                axis.choose_()
        if self.site.grid_in is not None:
            rows, columns = self.rows.chosen, self.columns.chosen
            assert rows is not None
            assert columns is not None
            ones = rows.new_ones(1, self.site.num_in, dtype=torch.float32)
            derived = {
                "size_out": GridMerge(rows=rows, columns=columns).sizes(ones).detach().clone(),
                "row_shares": row_normalise(rows),
                "column_shares": row_normalise(columns),
            }
            for name, value in derived.items():
                self.register_buffer(name, value, persistent=False)

    def _masked(self, supports: tuple[Tensor, ...], weight: Tensor | None, hints: Hints) -> Merge:
        """Add what is known in advance: how sizes are spread, or the sizes after the merge."""
        merge = super()._masked(supports, weight, hints)
        planned = self.site.is_planned(merge.num_in, hints.grid_in, hints.patches)
        if not isinstance(merge, GridMerge) or not planned:
            return merge
        if hints.size is None:
            return dataclasses.replace(merge, size_out=self.size_out)
        return dataclasses.replace(merge, shares=(self.row_shares, self.column_shares))


def _follow_loaded(merger: ChosenMerger, _keys: object) -> None:
    merger.choose_()


def _dense(supports: tuple[Tensor, ...]) -> Float[Tensor, "n p"]:
    """The support as a matrix over all tokens, from that of a sequence or of rows and columns."""
    return supports[0] if len(supports) == 1 else kronecker(*supports)


def _shares(support: Float[Tensor, "n p"]) -> Float[Tensor, "1 n p"]:
    """Which shares of each token go to which target; they sum to one."""
    return row_normalise(support)[None]


def _softmax_on(support: Tensor, size: Tensor, state: Tensor) -> Float[Tensor, "b n p"]:
    """`m M exp(G~)` with normalised columns."""
    mask = support * size[..., None] * state.exp()
    return mask / mask.sum(dim=1, keepdim=True).clamp_min(1e-6)


def _softmax_of(support: Tensor, size: Tensor, state: Tensor) -> Float[Tensor, "b n p"]:
    """`m exp(G~ o M)` with normalised columns."""
    mask = size[..., None] * torch.exp(state * support)
    return mask / mask.sum(dim=1, keepdim=True)


def _resample(values: Float[Tensor, "n"], length: int) -> Float[Tensor, "n2"]:
    """Interpolate the values of a sequence for another length."""
    if len(values) == length:
        return values
    return torch.nn.functional.interpolate(values[None, None], length, mode="linear")[0, 0]

"""LTM with a learned support: a static pattern of neighbours, chosen by training.

Letters: b images, n patch tokens, p merged tokens, c channels, k candidates of a target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ltm.core import mask_gradient
from ltm.core.merge import DenseMerge, GridMerge, Merge, StaticMerge, kronecker
from ltm.core.support import (
    Candidates,
    anchors,
    axis_candidates,
    choose,
    grid_candidates,
    initial_logits,
    resample_logits,
    support_matrix,
)
from ltm.methods.base import Decision, Hints, Merger, Site, token_size
from ltm.methods.ltm.step import LTMMerger

if TYPE_CHECKING:
    from ltm.methods.ltm.config import LTM

# Centroids of all merged tokens: 5 GB over the blocks of ViT-B at 1000 classes, hence a limit.
TOKEN_SPACE_LIMIT = 1 << 28


class Axis(nn.Module):
    """The learned support of one axis: of a sequence of patches, or of one side of a grid."""

    index: Tensor
    valid: Tensor
    anchor: Tensor
    home: Tensor

    def __init__(self, num_in: int, num_out: int, patches: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.num_in, self.num_out, self.patches = num_in, num_out, patches
        candidates = self._candidates(num_in, num_out)
        self.logits = nn.Parameter(initial_logits(candidates))
        for name in ("index", "valid", "anchor", "home"):
            self.register_buffer(name, getattr(candidates, name), persistent=False)

    def _candidates(self, num_in: int, num_out: int) -> Candidates:
        if self.patches is None:
            return axis_candidates(num_in, num_out)
        return grid_candidates(self.patches, num_in, num_out)

    def forward(self, num_in: int, num_out: int, noise: float) -> Float[Tensor, "n p"]:
        candidates, logits = Candidates(self.index, self.valid, self.anchor, self.home), self.logits
        if (num_in, num_out) != (self.num_in, self.num_out):
            other = self._candidates(num_in, num_out)
            candidates = Candidates(*(getattr(other, f).to(logits.device) for f in vars(other)))
            logits = _fit_width(resample_logits(logits, num_out), candidates)
        return support_matrix(choose(logits, noise=noise), candidates, num_in)


def _fit_width(logits: Tensor, candidates: Candidates) -> Tensor:
    """Another size may have another number of candidates; what is new starts as it would."""
    width = candidates.index.shape[1]
    if logits.shape[1] == width:
        return logits
    return initial_logits(candidates)


class LearnedMerger(LTMMerger):
    """Targets at evenly spaced anchors, each the average of chosen neighbours."""

    running_logits: Tensor
    fixed_rows: Tensor
    fixed_columns: Tensor
    fixed_matrix: Tensor
    fixed_back: Tensor
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
            self.register_buffer("running_logits", torch.zeros(site.num_in))
        self.frozen = False
        self.chosen: tuple[str, ...] = ()
        """Which supports are constants, where the weights alone depend on the image."""

    def feature_width(self) -> int:
        per_token = self.site.width
        return per_token * self.site.num_out if self.config.space == "token" else per_token

    def feature(self, merged: Float[Tensor, "b t c"], size: Tensor) -> Float[Tensor, "b d"]:
        if self.config.space == "pooled":
            return super().feature(merged, size)
        return merged[:, self.site.num_prefix :].flatten(1)

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        if self.frozen and hints.num_out == self.site.num_out:
            return Decision(merge=self._folded())
        supports = self._supports(tokens.shape[1] - self.site.num_prefix, hints)
        if self.config.space == "token" and self.informative is not None:
            return self._token_space(tokens, hints, _dense(supports))
        logits, weight = self._weigh(tokens, hints)
        if self.config.mask_form == "letter" and logits is not None:
            merge = self._letter(tokens, hints, _dense(supports), logits)
        else:
            merge = self._masked(supports, weight, hints)
        return Decision(merge=merge, carry=None if logits is None else merge.hand_on(logits))

    def _supports(self, num_in: int, hints: Hints) -> tuple[Tensor, ...]:
        if self._is_chosen(num_in, hints):
            return tuple(getattr(self, f"chosen_{name}") for name in self.chosen)
        return self._axes(num_in, hints)

    def _axes(self, num_in: int, hints: Hints) -> tuple[Tensor, ...]:
        noise = self.noise if self.training else 0.0
        if hints.grid_in is None or hints.grid_out is None:
            return (self.sequence(num_in, hints.num_out, noise),)
        (h, w), (h2, w2) = hints.grid_in, hints.grid_out
        return self.rows(h, h2, noise), self.columns(w, w2, noise)

    def _weigh(
        self, tokens: Float[Tensor, "b t c"], hints: Hints
    ) -> tuple[Tensor | None, Tensor | None]:
        """The state of every patch, and what it weighs; None where all are alike."""
        k, step = self.site.num_prefix, self.informative
        plain = self.config.scope == "sample" and self.true_labels(hints) is None
        if step is not None and plain and step.has_kernel(tokens, hints.carry):
            logits, weight = step.weigh(tokens, hints.size, hints.carry, k)
            return logits, weight[:, k:]
        logits, weight = self._logits(tokens, hints), None
        if hints.size is not None:
            weight = hints.size[:, k:]
        if logits is not None:
            weight = logits.exp() if weight is None else weight * logits.exp()
        return logits, weight

    def _logits(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Tensor | None:
        """The state s of every token, `b n`, or `1 n` where the whole batch shares one."""
        k = self.site.num_prefix
        step = self.informative
        if step is None:
            return hints.carry
        if self.config.scope == "batch" and not self.training:
            return (
                _resample(self.running_logits, tokens.shape[1] - k)[None] if step.active else None
            )
        size = token_size(tokens, hints)[:, k:]
        logits = step(tokens[:, k:], size, self.true_labels(hints), hints.carry)
        if logits is None or self.config.scope == "sample":
            return logits
        logits = logits.mean(dim=0, keepdim=True)
        with torch.no_grad():
            if logits.shape[1] == len(self.running_logits):
                self.running_logits.lerp_(logits[0].float(), 0.1)
        return logits

    def _masked(self, supports: tuple[Tensor, ...], weight: Tensor | None, hints: Hints) -> Merge:
        """Softmax over the support: `A (m e^s) / A^T (m e^s)`."""
        k = self.site.num_prefix
        if len(supports) == 2:
            rows, columns = supports
            known = self._is_chosen(rows.shape[0] * columns.shape[0], hints)
            return GridMerge(
                rows=rows,
                columns=columns,
                weight=weight,
                size_out=self.chosen_size_out if known else None,
                num_prefix=k,
            )
        return DenseMerge.from_support(supports[0], weight, num_prefix=k)

    def _letter(self, tokens: Tensor, hints: Hints, support: Tensor, logits: Tensor) -> Merge:
        """Softmax of the product `G~ o M`: tokens outside the support weigh as those at s = 0."""
        k = self.site.num_prefix
        size = token_size(tokens, hints)[:, k:, None]
        mask = size * torch.exp(logits[..., None] * support)
        mask = mask / mask.sum(dim=1, keepdim=True)
        return DenseMerge(mask=mask, share=_shares(support), num_prefix=k)

    def _token_space(self, tokens: Tensor, hints: Hints, support: Tensor) -> Decision:
        """The paper's letter: the gradient of the whole mask, `Z V^T`, one row per token."""
        step, k, config = self.informative, self.site.num_prefix, self.config
        assert step is not None
        size = token_size(tokens, hints)[:, k:]
        state = tokens.new_zeros(1, *support.shape, dtype=torch.float32)
        if hints.carry is not None:
            state = hints.carry[:, :, anchors(hints.carry.shape[2], hints.num_out)]
        if step.active:
            patches = tokens[:, k:] if step.mlp is None else tokens[:, k:] + step.mlp(tokens[:, k:])
            before = _softmax_on(support, size, state)
            merged = before.to(patches.dtype).mT @ patches
            gradient = step.direction(merged.flatten(1), self.true_labels(hints))
            change = mask_gradient.token_gradient(patches, gradient.reshape(merged.shape))
            if step.gain is not None:
                spread = change.flatten(1).std(dim=1, correction=0)[:, None, None]
                change = step.gain * change / (spread + 1e-6)
            state = (state - config.eta * change).clamp(-8, 8)
        mask = _softmax_on(support, size, state)
        merge = DenseMerge(mask=mask, share=_shares(support), num_prefix=k)
        return Decision(merge=merge, carry=mask.mT @ state.expand_as(mask))

    def fold_(self, decision: Decision, hints: Hints) -> None:
        """Keep a decision that is the same for every image as constants."""
        merge = decision.merge
        if self.informative is not None and self.informative.active and self._per_image():
            self._keep_supports_(merge, hints)
            return
        size = next(self.parameters()).new_ones(1, merge.num_in + merge.num_prefix)
        size = size if hints.size is None else hints.size[:1]
        if isinstance(merge, GridMerge):
            constants = {**_fold_grid(merge), "size_out": merge.sizes(size)}
        else:
            static = StaticMerge.fold(merge, size)
            constants = {n: getattr(static, n) for n in ("matrix", "back", "size_out")}
        for name, value in constants.items():
            self.register_buffer(f"fixed_{name}", value.detach().clone())
        for name in ("rows", "columns", "sequence", "informative"):
            if hasattr(self, name):
                setattr(self, name, None)
        self.frozen = True

    def _keep_supports_(self, merge: Merge, hints: Hints) -> None:
        """Weights differ from image to image, but who may join does not any more."""
        if self.chosen:
            return
        self.chosen = ("sequence",) if hints.grid_in is None else ("rows", "columns")
        supports = self._axes(merge.num_in, hints)
        for name, support in zip(self.chosen, supports, strict=True):
            self.register_buffer(f"chosen_{name}", support.detach().clone())
        if isinstance(merge, GridMerge):
            size = supports[0].new_ones(1, merge.num_in) if hints.size is None else hints.size[:1]
            self.register_buffer("chosen_size_out", merge.sizes(size).detach().clone())

    def _is_chosen(self, num_in: int, hints: Hints) -> bool:
        planned = (self.site.num_in, self.site.num_out)
        return bool(self.chosen) and (num_in, hints.num_out) == planned

    def _per_image(self) -> bool:
        return self.config.scope == "sample" or self.config.space == "token"

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
            back=self.fixed_back,
            size_out=self.fixed_size_out,
            num_prefix=k,
        )

    def adopt_(self, other: Merger) -> None:
        super().adopt_(other)
        for name in ("rows", "columns", "sequence"):
            mine, theirs = getattr(self, name, None), getattr(other, name, None)
            if isinstance(mine, Axis) and isinstance(theirs, Axis):
                fitted = resample_logits(theirs.logits, mine.num_out)
                if fitted.shape == mine.logits.shape:
                    mine.logits.data.copy_(fitted)


def _fold_grid(merge: GridMerge) -> dict[str, Tensor]:
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


def _dense(supports: tuple[Tensor, ...]) -> Float[Tensor, "n p"]:
    if len(supports) == 1:
        return supports[0]
    return kronecker(supports[0], supports[1])


def _shares(support: Float[Tensor, "n p"]) -> Float[Tensor, "1 n p"]:
    return (support / support.sum(1, keepdim=True).clamp_min(1e-6))[None]


def _softmax_on(support: Tensor, size: Tensor, state: Tensor) -> Float[Tensor, "b n p"]:
    """`m M exp(G~)`, its columns normalised."""
    mask = support * size[..., None] * state.exp()
    return mask / mask.sum(dim=1, keepdim=True).clamp_min(1e-6)


def _resample(values: Float[Tensor, "n"], length: int) -> Float[Tensor, "n2"]:
    if len(values) == length:
        return values
    return torch.nn.functional.interpolate(values[None, None], length, mode="linear")[0, 0]


def _check_token_space(site: Site) -> None:
    needed = 4 * site.num_classes * site.num_out * site.width
    if needed > TOKEN_SPACE_LIMIT:
        raise ValueError(
            f"space: got 'token'; its centroids would take {needed / 2**20:.0f} MiB at block "
            f"{site.block} ({site.num_classes} classes x {site.num_out} tokens x {site.width} "
            f"channels), and at most {TOKEN_SPACE_LIMIT / 2**20:.0f} MiB a block is allowed: "
            "use space='pooled'."
        )

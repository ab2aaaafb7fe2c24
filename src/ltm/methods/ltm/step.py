"""The informative step: each token's logit moves down the gradient of the bound.

Letters: b images, t tokens with their k prefix tokens, n patch tokens, p merged tokens, c channels,
d features, a classes; `s` (logits) the state that the sites hand on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ltm.core import clustering, mask_gradient
from ltm.core.statistics import ClassStatistics
from ltm.kernels import fused, operators
from ltm.methods.base import Hints, Merger, Site, token_size

if TYPE_CHECKING:
    from ltm.methods.ltm.config import LTM

TABLE_LIMIT = 1 << 28
"""Bytes that what is known of the classes may take, a table at a block."""


class InformativeStep(nn.Module):
    """One gradient step on the bound, per token: `s = carry - eta dIBB/dG` in pooled space.

    Without class statistics there is no gradient and the step is zero.
    """

    centroids: Tensor
    present: Tensor
    costs: Tensor
    offsets: Tensor

    def __init__(self, site: Site, num_features: int, config: LTM) -> None:
        super().__init__()
        self.config = config
        num_classes = site.num_classes
        self.register_buffer("centroids", torch.zeros(num_classes, num_features))
        self.register_buffer("present", torch.zeros(num_classes, dtype=torch.bool))
        # -log Q(a | y), transposed: soft labels times this are the costs psi.
        self.register_buffer("costs", torch.zeros(num_classes, num_classes))
        self.register_buffer("offsets", torch.zeros(num_classes), persistent=False)
        standardised = config.step == "standardised"
        self.gain = nn.Parameter(torch.full((1,), config.gain)) if standardised else None
        self.mlp = nn.Linear(site.width, site.width) if config.mlp else None
        if self.mlp is not None:
            nn.init.zeros_(self.mlp.weight)
            nn.init.zeros_(self.mlp.bias)
        self.active = False

    def set_statistics_(self, statistics: ClassStatistics) -> None:
        """Take over centroids and Q; from now on the step is active."""
        self.centroids.copy_(statistics.centroids())
        self.present.copy_(statistics.present)
        if statistics.membership.any():
            self.costs.copy_(-statistics.q().clamp_min(torch.finfo(torch.float32).tiny).log().mT)
        else:  # before the first centroids there are no memberships, and so no Q
            self.costs.zero_()
        self.refresh_()

    def forget_(self) -> None:
        """Without statistics there is no step."""
        self.present.zero_()
        self.costs.zero_()
        self.active = False

    @torch.no_grad()
    def refresh_(self) -> None:
        """Follow the statistics, whoever put them there: a checkpoint, or an average of weights."""
        if self.costs.is_meta:
            return
        self.active = bool(self.costs.any())
        offsets = mask_gradient.class_offsets(self.centroids, self.config.beta, self.present)
        self.offsets.copy_(offsets)

    def train(self, mode: bool = True) -> InformativeStep:
        """As for all modules; averages of weights know nothing of what follows from them."""
        if not self.costs.is_meta and bool(self.costs.any()):
            self.refresh_()
        return super().train(mode)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **options: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **options)  # pyright: ignore[reportUnknownMemberType]
        if f"{prefix}costs" in state_dict:
            self.refresh_()

    def direction(
        self, feature: Float[Tensor, "b d"], labels: Tensor | None
    ) -> Float[Tensor, "b d"]:
        """The gradient of the bound with respect to the feature, V in the paper's proposition."""
        known = (self.centroids, self.offsets, self.costs)
        return mask_gradient.prepared_gradient(
            feature, *known, beta=self.config.beta, labels=labels
        )

    def forward(
        self,
        patches: Float[Tensor, "b n c"],
        size: Float[Tensor, "b n"],
        labels: Tensor | None,
        carry: Float[Tensor, "_ n"] | None,
    ) -> Float[Tensor, "b n"] | None:
        if not self.active:
            return carry
        tokens = self.mapped(patches)
        share = size / size.sum(1, keepdim=True)
        feature = (share[:, None].to(tokens.dtype) @ tokens)[:, 0]
        gradient = self.direction(feature, labels)
        logits = -mask_gradient.pooled_gradient(tokens, gradient)
        if self.gain is not None:
            spread = logits.std(dim=1, keepdim=True, correction=0)
            logits = self.gain * (logits - logits.mean(dim=1, keepdim=True)) / (spread + 1e-6)
        logits = self.config.eta * logits
        if carry is not None:
            logits = logits + carry
        # Bounded, so that no target's weights can vanish.
        return logits.clamp(-8, 8)

    def mapped(self, patches: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """The tokens as the step sees them."""
        if self.mlp is None:
            return patches
        return patches + self.mlp(patches.to(self.mlp.weight.dtype)).to(patches.dtype)

    def has_kernel(self, tokens: Tensor, carry: Tensor | None) -> bool:
        """Whether `weigh` can take over from `forward`."""
        known = self.active and self.mlp is None
        return known and fused.takes_inform(tokens, carry, self.gain)

    def weigh(
        self,
        tokens: Float[Tensor, "b t c"],
        size: Float[Tensor, "_ t"] | None,
        carry: Float[Tensor, "_ n"] | None,
        num_prefix: int,
    ) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b t"]]:
        """`forward` by kernels, with the weights that follow from it."""
        return operators.inform(tokens, size, carry, *self.for_kernels(), num_prefix)

    def for_kernels(self) -> tuple[Tensor | None, Tensor, Tensor, Tensor, float, float]:
        """What kernels have to know of it."""
        config = self.config
        return self.gain, self.centroids, self.offsets, self.costs, config.beta, config.eta


class LTMMerger(Merger):
    """What both supports share: the informative step and its statistics."""

    def __init__(self, site: Site, config: LTM) -> None:
        super().__init__(site)
        self.config = config
        self.informative = self._new_step()
        self.statistics: ClassStatistics | None = None

    def _new_step(self) -> InformativeStep | None:
        if self.config.weights != "informative" or self.site.num_classes < 1:
            return None
        _check_classes(self.site)
        return InformativeStep(self.site, self.feature_width(), self.config)

    def reset_classes_(self, num_classes: int) -> None:
        before, dropped = self.informative, self.informative is None and self.site.num_classes > 0
        super().reset_classes_(num_classes)
        self.informative = None if dropped else self._new_step()
        self.forget_statistics_()
        if self.informative is not None and before is not None:
            self.informative.to(before.centroids.device)
            if self.informative.gain is not None and before.gain is not None:
                self.informative.gain.data.copy_(before.gain.data)

    def feature_width(self) -> int:
        return self.site.width

    def true_labels(self, hints: Hints) -> Tensor | None:
        """True labels where the config asks for them and training knows them."""
        return hints.labels if self.config.labels == "true" and self.training else None

    def feature(self, merged: Float[Tensor, "b t c"], size: Tensor) -> Float[Tensor, "b d"]:
        """The merged tokens as one feature: their mean by size."""
        k = self.site.num_prefix
        share = size[:, k:] / size[:, k:].sum(1, keepdim=True).clamp_min(1e-6)
        return (share[:, None].to(merged.dtype) @ merged[:, k:])[:, 0]

    @torch.no_grad()
    def observe(self, merged: Float[Tensor, "b t c"], hints: Hints) -> None:
        step = self.informative
        if step is None or hints.labels is None:
            return
        feature = self.feature(merged, token_size(merged, hints))
        if self.statistics is None:
            self.statistics = ClassStatistics.zeros(
                self.site.num_classes, feature.shape[1], device=feature.device
            )
        membership = None
        if bool(step.present.any()):
            membership = clustering.class_membership(
                feature, step.centroids, self.config.beta, step.present
            )
        self.statistics.update(feature, hints.labels, membership)

    def forget_statistics_(self) -> None:
        """Start anew: until statistics are taken again the step is zero."""
        self.statistics = None
        if self.informative is not None:
            self.informative.forget_()

    def take_statistics_(self) -> None:
        """Turn what was observed, in all processes, into centroids and Q.

        The step becomes active with the first Q, that is after a pass that had centroids.
        """
        if self.informative is None or self.statistics is None:
            return
        total = self.statistics.all_reduce()
        self.informative.set_statistics_(total)
        self.statistics = None

    @property
    def active(self) -> bool:
        return self.informative is not None and self.informative.active

    def activate_(self) -> None:
        if self.informative is not None:
            self.informative.active = True

    def adopt_(self, other: Merger) -> None:
        super().adopt_(other)
        step = self.informative
        if step is None:
            return
        theirs = other.informative if isinstance(other, LTMMerger) else None
        if theirs is not None and theirs.centroids.shape == step.centroids.shape:
            step.refresh_()
        else:  # statistics are taken whole or not at all
            step.forget_()

    def freeze_(self) -> None:
        self.statistics = None
        if self.informative is not None and not self.informative.active:
            self.informative = None


def _check_classes(site: Site) -> None:
    # 1.8 GB a block at ImageNet's 21,841 classes.
    num_classes = site.num_classes
    require_room(
        num_classes**2,
        f"weights: got 'informative'; its table of {num_classes} x {num_classes} classes",
        f"block {site.block}",
        "use weights='uniform', or give the network its own classes first.",
    )


def require_room(numbers: int, what: str, where: str, instead: str) -> None:
    """Refuse a table of too many numbers."""
    needed = 4 * numbers
    if needed > TABLE_LIMIT:
        raise ValueError(
            f"{what} would take {needed / 2**20:.0f} MiB at {where}, and at most "
            f"{TABLE_LIMIT / 2**20:.0f} MiB a block is allowed: {instead}"
        )

"""The informative step: each token's logit moves down the gradient of the bound.

Letters: b images, t tokens with their k prefix tokens, n patch tokens, p merged tokens, c channels,
d features, a classes; `s` the logits that each site passes on to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ltm.core.bottleneck import ClassStatistics, class_membership
from ltm.core.finite import require_finite
from ltm.core.mask_gradient import Step, class_offsets
from ltm.core.merge import token_sizes
from ltm.core.validation import Within, settle
from ltm.methods.base import Decision, Hints, Merger, Site, StatisticalMerger

_TABLE_LIMIT = 1 << 28
"""Most bytes that a table of class statistics may take in a block."""


@dataclass(frozen=True, kw_only=True)
class Informative:
    """Tokens weigh by the information-bottleneck step as well as by size."""

    labels: Literal["soft", "true"] = "soft"
    """Labels in the step: the network's own class membership, or in training the true ones."""
    step: Literal["standardised", "raw"] = "standardised"
    """Standardise the step per image and scale it by a learned gain, or use the raw gradient."""
    eta: Annotated[float, Within(0, 1e3, above=True)] = 1.0
    beta: Annotated[float, Within(0, 1e4, above=True)] = 10.0
    gain: Annotated[float, Within(-1e2, 1e2)] = 0.1
    """Initial value of the learned gain."""
    mlp: bool = False
    """Add a residual linear layer, which starts at zero, to the tokens that the step reads."""

    def __post_init__(self) -> None:
        settle(self)


class InformativeStep(nn.Module):
    """One gradient step on the bound per token, `s = carry - eta dIBB/dG`, in pooled space.

    Without class statistics there is no gradient, and no step is taken.
    """

    centroids: Tensor
    present: Tensor
    costs: Tensor
    offsets: Tensor

    def __init__(self, site: Site, num_features: int, settings: Informative) -> None:
        super().__init__()
        self.settings = settings
        num_classes = site.num_classes
        self.register_buffer("centroids", torch.zeros(num_classes, num_features))
        self.register_buffer("present", torch.zeros(num_classes, dtype=torch.bool))
        # -log Q(a | y), transposed: soft labels times this are the costs psi.
        self.register_buffer("costs", torch.zeros(num_classes, num_classes))
        self.register_buffer("offsets", torch.zeros(num_classes), persistent=False)
        standardised = settings.step == "standardised"
        self.gain = nn.Parameter(torch.full((1,), settings.gain)) if standardised else None
        self.mlp = nn.Linear(site.width, site.width) if settings.mlp else None
        if self.mlp is not None:
            nn.init.zeros_(self.mlp.weight)
            nn.init.zeros_(self.mlp.bias)
        self.active = False

    def set_statistics_(self, statistics: ClassStatistics) -> None:
        """Set centroids and Q; this activates the step."""
        self.centroids.copy_(statistics.centroids())
        self.present.copy_(statistics.present)
        if statistics.membership.any():
            self.costs.copy_(-statistics.q().clamp_min(torch.finfo(torch.float32).tiny).log().mT)
        else:  # memberships, and with them Q, need the centroids of an earlier pass
            self.costs.zero_()
        self.refresh_()

    def forget_(self) -> None:
        """Drop the statistics; this deactivates the step."""
        self.present.zero_()
        self.costs.zero_()
        self.active = False

    @torch.no_grad()
    def refresh_(self) -> None:
        """Update what is derived from the statistics, after a checkpoint or an EMA has set them."""
        if self.costs.is_meta:
            return
        self.active = bool(self.costs.any())
        offsets = class_offsets(self.centroids, self.settings.beta, self.present)
        self.offsets.copy_(offsets)

    def train(self, mode: bool = True) -> InformativeStep:
        """Also update what is derived from the statistics, which an EMA sets by value."""
        if not self.costs.is_meta and bool(self.costs.any()):
            self.refresh_()
        return super().train(mode)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **options: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **options)  # pyright: ignore[reportUnknownMemberType]
        if f"{prefix}costs" in state_dict:
            self.refresh_()

    def unset(self) -> frozenset[str]:
        """Names of tensors that still have their initial value; none if the step is active."""
        if self.active:
            return frozenset()
        start = {"gain": self.settings.gain}
        return frozenset(
            name
            for name, value in self.state_dict().items()
            if torch.equal(value, torch.full_like(value, start.get(name, 0)))
        )

    def step(self, labels: Tensor | None) -> Step | None:
        """The parameters of the step, with true labels if given; None without statistics."""
        if not self.active:
            return None
        return Step(
            centroids=self.centroids,
            offsets=self.offsets,
            costs=self.costs,
            beta=self.settings.beta,
            eta=self.settings.eta,
            gain=self.gain,
            labels=labels,
            mapping=self.mlp,
        )


class LTMMerger(StatisticalMerger):
    """What both supports share: the informative step and its class statistics."""

    def __init__(self, site: Site, weights: Informative | None) -> None:
        super().__init__(site)
        self.weights = weights
        self.informative = self._new_step()
        self.statistics: ClassStatistics | None = None

    def _new_step(self) -> InformativeStep | None:
        classes = self.site.num_classes
        if self.weights is None or classes < 1 or has_too_many(classes):
            return None
        return InformativeStep(self.site, self.feature_width(), self.weights)

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
        """True labels, in training and if the settings ask for them."""
        asked = self.weights is not None and self.weights.labels == "true"
        return hints.labels if asked and self.training else None

    def step(self, hints: Hints) -> Step | None:
        """The parameters of the informative step for these images; None if there is no step."""
        module = self.informative
        return None if module is None else module.step(self.true_labels(hints))

    def feature(self, merged: Float[Tensor, "b t c"], size: Tensor) -> Float[Tensor, "b d"]:
        """The merged tokens as one feature: their mean, weighted by size."""
        k = self.site.num_prefix
        share = size[:, k:] / size[:, k:].sum(1, keepdim=True).clamp_min(1e-6)
        return (share[:, None].to(merged.dtype) @ merged[:, k:])[:, 0]

    @torch.no_grad()
    def observe(self, merged: Float[Tensor, "b t c"], hints: Hints) -> None:
        step = self.informative
        if step is None or hints.labels is None:
            return
        feature = self.feature(merged, token_sizes(merged, hints.size))
        if self.statistics is None:
            self.statistics = ClassStatistics.zeros(
                self.site.num_classes, feature.shape[1], device=feature.device
            )
        membership = None
        if bool(step.present.any()):
            membership = class_membership(feature, step.centroids, step.settings.beta, step.present)
        self.statistics.update(feature, hints.labels, membership)

    @property
    def keeps_statistics(self) -> bool:
        return self.informative is not None

    def bound(
        self, merged: Float[Tensor, "b t c"], hints: Hints, targets: Tensor
    ) -> Float[Tensor, ""] | None:
        """IBB without the term of the inputs, `-mean_i sum_a phi(X~_i, a) log Q(a | y_i)`."""
        step = self.informative
        if step is None or not step.active:
            return None
        feature = self.feature(merged, token_sizes(merged, hints.size))
        phi = class_membership(feature, step.centroids, step.settings.beta, step.present)
        costs = step.costs.to(phi.dtype)
        per_image = costs[targets] if targets.ndim == 1 else targets.to(phi.dtype) @ costs
        return (phi * per_image).sum(dim=1).mean()

    def forget_sums_(self) -> None:
        self.statistics = None

    def forget_statistics_(self) -> None:
        self.statistics = None
        if self.informative is not None:
            self.informative.forget_()

    def take_statistics_(self) -> None:
        """Turn the sums of all processes into centroids and Q.

        The step becomes active with the first Q, which is after the second pass: memberships need
        the centroids of the first.
        """
        step = self.informative
        if step is None:
            return
        own = self.statistics
        if own is None:  # this process had no images
            own = ClassStatistics.zeros(
                self.site.num_classes, self.feature_width(), device=step.centroids.device
            )
        total = own.all_reduce()
        self.statistics = None
        if not bool(total.present.any()):
            return
        require_finite(total.state(), f"class statistics of block {self.site.block}: ")
        step.set_statistics_(total)

    @property
    def active(self) -> bool:
        return self.informative is not None and self.informative.active

    def unset(self) -> frozenset[str]:
        names = () if self.informative is None else self.informative.unset()
        return frozenset(f"informative.{name}" for name in names)

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
        else:  # statistics are copied in full or not at all
            step.forget_()

    def frozen(self, decision: Decision | None, hints: Hints | None) -> Merger:
        """Itself, without sums, and without its step if that has no statistics."""
        self.statistics = None
        if not self.active:
            self.informative = None
        return self

    def frozen_as(self, saved: Mapping[str, Tensor]) -> Merger:
        if self.informative is not None:
            self.informative.active = any(name.startswith("informative.") for name in saved)
        return self.frozen(None, None)


def has_too_many(num_classes: int) -> bool:
    """Whether the step's table would be too large: at 21,841 classes it takes 1.8 GB per block."""
    return 4 * num_classes**2 > _TABLE_LIMIT


def require_room(numbers: int, what: str, where: str, instead: str) -> None:
    """Raise a ValueError for a table of too many numbers."""
    needed = 4 * numbers
    if needed > _TABLE_LIMIT:
        raise ValueError(
            f"{what} would take {needed / 2**20:.0f} MiB at {where}, and at most "
            f"{_TABLE_LIMIT / 2**20:.0f} MiB a block is allowed: {instead}"
        )

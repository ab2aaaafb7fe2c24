"""SPViT, as we read it: soft token pruning, in which pruned tokens live on in a package token.

A selector scores tokens by what they are and by the mean of all; the best go on, the others become
one token, their mean weighed by their scores. EfficientViT needs its grid back: the two pointwise
products of a local module see the kept tokens and the package alone, the depthwise one sees the
package wherever a token was pruned.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.models.efficientvit_mit import EfficientVitBlock, MBConv
from torch import Tensor, nn

from ltm.core.cost import count_macs, meta_copy, meta_images

STEPS = 8
"""Halvings of the share of tokens that is kept."""


class _TokenSelector(nn.Module):
    """Scores from 0 to 1: how much each token is worth keeping."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = max(4, width // 8)
        self.local = nn.Linear(width, hidden)
        self.overall = nn.Linear(width, hidden)
        self.score = nn.Linear(hidden, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        overall = self.overall(tokens.mean(1, keepdim=True))
        return self.score((self.local(tokens) + overall).relu())[..., 0].sigmoid()


class SoftlyPruned(nn.Module):
    """An MBConv whose pointwise products see some tokens and the package of the others."""

    def __init__(self, host: MBConv, share: float) -> None:
        super().__init__()
        self.inverted_conv = host.inverted_conv
        self.depth_conv = host.depth_conv
        self.point_conv = host.point_conv
        convolution: Any = host.inverted_conv.conv
        self.selector = _TokenSelector(convolution.in_channels)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        number = math.ceil(self.share * tokens.shape[1])
        if number >= tokens.shape[1]:
            return self.point_conv(self.depth_conv(self.inverted_conv(x)))
        score = self.selector(tokens)
        kept = score.topk(number, dim=1).indices
        pruned = torch.ones_like(score).scatter(1, kept, 0.0)
        # The choice has no gradient; the scores of kept tokens get one as if they were gates.
        gate = 1 + score - score.detach()
        package = _mean(tokens, pruned * score)
        hidden = _pointwise(
            self.inverted_conv, _with_package(tokens * gate[..., None], kept, package)
        )
        grid = _spread(hidden, kept, tokens.shape[1])
        grid = self.depth_conv(grid.transpose(1, 2).unflatten(2, x.shape[2:]))
        spread = grid.flatten(2).transpose(1, 2)
        out = _pointwise(self.point_conv, _with_package(spread, kept, _mean(spread, pruned)))
        return _spread(out, kept, tokens.shape[1]).transpose(1, 2).unflatten(2, x.shape[2:])


def _mean(tokens: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of tokens, `b n c -> b 1 c`."""
    share = weights / weights.sum(1, keepdim=True).clamp_min(1e-6)
    return (tokens * share[..., None]).sum(1, keepdim=True)


def _with_package(tokens: Tensor, kept: Tensor, package: Tensor) -> Tensor:
    index = kept[..., None].expand(-1, -1, tokens.shape[2])
    return torch.cat([tokens.gather(1, index), package], dim=1)


def _pointwise(layer: nn.Module, tokens: Tensor) -> Tensor:
    """A pointwise convolution, with its normalisation and activation, on tokens."""
    return layer(tokens.transpose(1, 2)[..., None])[..., 0].transpose(1, 2)


def _spread(tokens: Tensor, kept: Tensor, num_tokens: int) -> Tensor:
    """Kept tokens in their places, the package everywhere else."""
    index = kept[..., None].expand(-1, -1, tokens.shape[2])
    return tokens[:, -1:].expand(-1, num_tokens, -1).scatter(1, index, tokens[:, :-1])


def spvit_(
    model: nn.Module,
    batches: Any,
    share: float,
    *,
    image_size: tuple[int, int],
    steps: int,
    lr: float,
) -> None:
    """Put selectors into a network, so that it needs a share of its MACs; they train with it."""
    del batches, steps, lr
    blocks = [m for m in model.modules() if isinstance(m, EfficientVitBlock)]
    if not blocks:
        raise ValueError("model: it has no EfficientViT blocks, which SPViT is read for here")
    budget = share * count_macs(meta_copy(model), meta_images(model, image_size))
    device = next(model.parameters()).device
    for block in blocks:
        local: Any = block.local_module
        local.main = SoftlyPruned(local.main, 1.0).to(device)
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _cost(model, middle, image_size) <= budget else (low, middle)
    if low == 0.0:
        raise ValueError(f"share is {share}: pruning tokens of local modules cannot reach it")
    _set_share_(model, low)


def _cost(model: nn.Module, share: float, image_size: tuple[int, int]) -> int:
    _set_share_(model, share)
    return count_macs(meta_copy(model), meta_images(model, image_size))


def _set_share_(model: nn.Module, share: float) -> None:
    for module in model.modules():
        if isinstance(module, SoftlyPruned):
            module.share = share

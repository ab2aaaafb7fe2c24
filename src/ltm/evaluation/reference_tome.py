"""ToMe as published, in plain torch on timm's ViT: a peer for timing and a check of our own.

Written from the paper (Bolya et al., "Token Merging: Your ViT But Faster", 2023) and separate from
`ltm.methods.tome` on purpose. In every block, between attention and MLP: tokens are dealt out in
turn to two sides; each token of the first side proposes its most similar token of the second, by
the cosine of their keys averaged over heads; the r best proposals merge, as means weighed by token
size; attention adds the log of the size to the scores of a key. To be a fair peer attention is
fused. As published it knows no LayerScale, no register tokens and no pooled heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn


class _Block(nn.Module):
    """A ViT block that removes `num_merged` tokens."""

    def __init__(self, host: Block, num_merged: int, num_prefix: int) -> None:
        super().__init__()
        self.host = host
        self.num_merged, self.num_prefix = num_merged, num_prefix

    def forward(self, x: Tensor, size: Tensor | None) -> tuple[Tensor, Tensor | None]:
        host: Any = self.host
        attended, keys = self._attention(host.norm1(x), size)
        x = x + attended
        num_merged = min(self.num_merged, (x.shape[1] - self.num_prefix) // 2)
        if num_merged > 0:
            x, size = self._merge(x, keys, size, num_merged)
        return x + host.mlp(host.norm2(x)), size

    def _attention(self, x: Tensor, size: Tensor | None) -> tuple[Tensor, Tensor]:
        """Proportional attention, `softmax(q k / sqrt(d) + log s) v`, and the mean keys."""
        attn: Any = self.host.attn
        query, key, value = (
            attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )
        bias = None if size is None else size.log()[:, None, None, :, 0].to(query.dtype)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return attn.proj(out.transpose(1, 2).flatten(2)), key.mean(1)

    def _merge(
        self, x: Tensor, metric: Tensor, size: Tensor | None, num_merged: int
    ) -> tuple[Tensor, Tensor]:
        """Bipartite soft matching: tokens that stay, then the second side."""
        unit = metric / metric.norm(dim=-1, keepdim=True)
        scores = unit[:, ::2] @ unit[:, 1::2].mT
        if self.num_prefix:
            scores[:, 0] = -torch.inf
        if self.num_prefix == 2:
            scores[:, :, 0] = -torch.inf
        best, partner = scores.max(dim=-1)
        order = best.argsort(dim=-1, descending=True)
        leaving, staying = order[:, :num_merged], order[:, num_merged:]
        if self.num_prefix:
            # Keeps the class token first.
            staying = staying.sort(dim=1).values
        target = partner.gather(1, leaving)

        def add(x: Tensor) -> Tensor:
            first, second = x[:, ::2], x[:, 1::2]
            moved = first.gather(1, _over_channels(leaving, x))
            first = first.gather(1, _over_channels(staying, x))
            second = second.scatter_add(1, _over_channels(target, x), moved)
            if self.num_prefix == 2:  # the class and distillation tokens stay in front
                return torch.cat([first[:, :1], second[:, :1], first[:, 1:], second[:, 1:]], dim=1)
            return torch.cat([first, second], dim=1)

        size = x.new_ones(*x.shape[:2], 1) if size is None else size
        total = add(size)
        return add(x * size) / total, total


def _over_channels(index: Tensor, x: Tensor) -> Tensor:
    return index[..., None].expand(-1, -1, x.shape[-1])


class ReferenceToMe(nn.Module):
    """A timm ViT that runs as ToMe was published; the weights are the host's own.

    `num_merged` is how many tokens leave in each block (the paper's r, or one number per block).
    """

    def __init__(self, host: nn.Module, num_merged: int | Sequence[int]) -> None:
        super().__init__()
        host = _check(host)
        depth = len(host.blocks)
        each = [num_merged] * depth if isinstance(num_merged, int) else list(num_merged)
        if len(each) != depth or min(each) < 0:
            raise ValueError(f"num_merged: got {num_merged}; one number from 0 per block is needed")
        self.host = host
        self.blocks = nn.ModuleList(
            _Block(cast("Block", block), count, host.num_prefix_tokens)
            for block, count in zip(host.blocks, each, strict=True)
        )

    def forward_features(self, images: Tensor) -> Tensor:
        """Tokens before the head, in ToMe's order."""
        host: Any = self.host
        x = host.norm_pre(host.patch_drop(host._pos_embed(host.patch_embed(images))))  # noqa: SLF001
        size = None
        for block in self.blocks:
            x, size = block(x, size)
        return host.norm(x)

    def forward(self, images: Tensor) -> Tensor:
        return self.host.forward_head(self.forward_features(images))


def _check(host: nn.Module) -> VisionTransformer:
    if not isinstance(host, VisionTransformer):
        raise ValueError(
            f"model: {type(host).__name__} is not a ViT, and published ToMe takes nothing else"
        )
    if host.num_prefix_tokens > 2:
        raise ValueError("model: it has register tokens, which published ToMe would merge")
    for block in host.blocks:
        known: Any = block
        if type(block) is not Block or not isinstance(known.ls1, nn.Identity):
            raise ValueError("model: its blocks are not the plain ones that ToMe was written for")
    return host

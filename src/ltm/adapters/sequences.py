"""What networks on one sequence of tokens share: pooling by size, intermediates at full size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from timm.layers.attention_pool import AttentionPoolLatent
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ltm.adapters.base import Adapter, Block, Layout, Run
from ltm.adapters.blocks import (
    Slot,
    Tokens,
    TokenState,
    become_,
    convert_block_,
    inverted,
    make_slots,
    require_sizes,
    revert_block_,
)
from ltm.adapters.conversion import Resizable, warn_of_fewer
from ltm.core.attention import size_bias
from ltm.core.merge import pool_by_size, restore_through
from ltm.core.schedule import Grid
from ltm.methods.base import MethodConfig, Site


class MergingSequenceModel(Resizable):
    """A converted network: it pools by size, and its intermediates have all patches."""

    def _last_slot(self) -> Slot:
        return cast("Any", self).blocks[-1].slot

    def _patches(self, images: Any) -> Grid | None:
        """The patch grid of the images; None if each image has its own."""
        return cast("Any", self).patch_embed.dynamic_feat_size(images.shape[-2:])

    def forward(self, x: Any, *args: Any, **options: Any) -> Any:
        """Timm's own."""
        if torch.compiler.is_compiling():
            return super().forward(x, *args, **options)
        with self._last_slot().state.within():
            return super().forward(x, *args, **options)

    def forward_features(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """Timm's own; the pool knows the sizes of these features, even after other forwards."""
        slot = self._last_slot()
        slot.state.open(self._patches(x))
        features = super().forward_features(x, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]
        tokens = slot.state.left_by(slot.index)
        slot.state.give(self._tokens_in(features), tokens)
        self._warn_of_fewer(tokens)
        return features

    def _tokens_in(self, features: Any) -> Tensor:
        """The tokens in what `forward_features` returns."""
        return features

    def _warn_of_fewer(self, tokens: Tokens) -> None:
        """Warn once if merged tokens go to the caller, not to the network's own pool."""
        host = cast("Any", self)
        pools = host.global_pool or getattr(host, "attn_pool", None) is not None
        if not pools or torch.compiler.is_compiling() or not self._last_slot().state.inside:
            warn_of_fewer(self, tokens)

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Timm's own, weighted by size."""
        pooled = self._pooled(x, pool_type)
        if pooled is None:
            return super().pool(x, pool_type)  # pyright: ignore[reportAttributeAccessIssue]
        return pooled

    def _pooled(self, x: Tensor, pool_type: str | None = None) -> Tensor | None:
        """Pool with tokens weighted by size; None if sizes make no difference.

        Max pooling ignores padding.
        """
        host, size = cast("Any", self), self._sizes(x)
        kind = host.global_pool if pool_type is None else pool_type
        by_attention = host.attn_pool is not None
        pools = by_attention or kind in ("avg", "avgmax", "max")
        if not pools or size is None:
            return None
        require_sizes(size, x)
        k = self._num_unpooled()
        x, size = x[:, k:], size[:, k:]
        if by_attention:
            return host.attn_pool(x, attn_mask=size_bias(size, x.dtype))
        return pool_by_size(x, size, kind)

    def _sizes(self, x: Tensor) -> Tensor | None:
        """The token sizes of these features, prefix included; None if nothing was merged."""
        slot = self._last_slot()
        tokens: Tokens = slot.state.known(x, slot.index)
        size = tokens.size if tokens.merges else None
        return None if size is None or size.shape[1] != x.shape[1] else size

    def _num_unpooled(self) -> int:
        """How many prefix tokens the pool leaves out."""
        host = cast("Any", self)
        return 0 if getattr(host, "pool_include_prefix", False) else host.num_prefix_tokens

    def forward_intermediates(  # noqa: PLR0917 - timm's own arguments, in its order
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        *args: Any,
        **options: Any,
    ) -> Any:
        """Timm's own, with intermediates restored to the full patch grid."""
        assert output_fmt in ("NCHW", "NLC"), "Output format must be one of NCHW or NLC."
        host, as_map = cast("Any", self), output_fmt == "NCHW"
        grid = self._patches(x)
        self._last_slot().state.open(grid)
        out = super().forward_intermediates(  # pyright: ignore[reportAttributeAccessIssue]
            x,
            indices,
            return_prefix_tokens,
            norm,
            stop_early,
            output_fmt if grid is None else "NLC",
            *args,
            **options,
        )
        taken, _ = feature_take_indices(len(host.blocks), indices)

        def restore(block: int, y: Tensor) -> Tensor:
            slot: Slot = host.blocks[block].slot
            tokens: Tokens = slot.state.left_by(block)
            k = host.num_prefix_tokens
            y = restore_through(tokens.merges, nn.functional.pad(y, (0, 0, k, 0)))[:, k:]
            if grid is None or not as_map:
                return y
            return y.reshape(len(y), *grid, -1).permute(0, 3, 1, 2).contiguous()

        def restore_all(features: list[Any]) -> list[Any]:
            return [
                (restore(block, y[0]), y[1]) if isinstance(y, tuple) else restore(block, y)
                for block, y in zip(taken, features, strict=True)
            ]

        if isinstance(out, dict):
            out["image_intermediates"] = restore_all(out["image_intermediates"])
            return out
        return restore_all(out) if isinstance(out, list) else (out[0], restore_all(out[1]))


class MergingHeadModel(MergingSequenceModel):
    """A converted network that pools inside its head."""

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Timm's own; it gets the mean weighted by size in place of the patch tokens."""
        host, size = cast("Any", self), self._sizes(x)
        if host.global_pool == "avg" and size is not None:
            require_sizes(size, x)
            k = host.num_prefix_tokens
            mean = pool_by_size(x[:, k:], size[:, k:], "avg")
            x = torch.cat([x[:, :k], mean[:, None]], dim=1)
        return super().forward_head(x, pre_logits)  # pyright: ignore[reportAttributeAccessIssue]


class SequenceAdapter(Adapter):
    """A family whose networks run `blocks` on one sequence, prefix tokens first."""

    models: ClassVar[dict[type[nn.Module], type[nn.Module]]]
    """What its networks become."""
    merging: ClassVar[dict[type[nn.Module], type[nn.Module]]]
    """What its blocks become."""
    attention: ClassVar[tuple[type[nn.Module], ...]]
    """The layers of attention that its blocks may have."""

    def network(self, model: nn.Module) -> Any:
        """The network itself, which may be inside timm's feature extractor or another module."""
        return next(module for module in model.modules() if isinstance(module, self.hosts))

    def embedding(self, host: Any) -> Any:
        """The layer that turns images into tokens."""
        return host.patch_embed

    def has_class_token(self, host: Any) -> bool:
        """Whether the first token of the sequence is a class token."""
        return host.cls_token is not None

    def attentions(self, block: Any) -> tuple[nn.Module, ...]:
        """The layers of attention in a block, if they are separate modules."""
        return (block.attn,)

    def projections(self, block: Any) -> tuple[nn.Module, ...]:
        """The layers in a block whose outputs hold queries and keys."""
        return tuple(cast("Any", attention).qkv for attention in self.attentions(block))

    def refusal(self, model: nn.Module) -> str | None:
        network = self.network(model)
        if sum(isinstance(module, self.hosts) for module in model.modules()) > 1:
            return "it holds more than one network of this family; convert each of them by itself."
        if type(network) not in (*self.models, *self.models.values()):
            return f"{type(network).__name__} is a variant that is not known here."
        for block in network.blocks:
            if type(block) not in (*self.merging, *self.merging.values()):
                known = " and ".join(kind.__name__ for kind in self.merging)
                return f"its blocks are {type(block).__name__}, and only {known} is known."
            for attention in self.attentions(block):
                if type(attention) not in self.attention:
                    kind = type(attention).__name__
                    known = " and ".join(kind.__name__ for kind in self.attention)
                    return f"its attention is {kind}, and only {known} is known."
        pool = getattr(network, "attn_pool", None)
        if pool is not None and (
            type(pool) is not AttentionPoolLatent or pool.pos_embed is not None
        ):
            return f"its head pools by {type(pool).__name__}, which takes no token sizes."
        return None

    def layout(self, model: nn.Module, image_size: tuple[int, int]) -> Layout:
        host = self.network(model)
        height, width = self.embedding(host).dynamic_feat_size(image_size)
        paths = {module: name for name, module in model.named_modules()}
        blocks = tuple(Block(paths[block], host.embed_dim, stage=0) for block in host.blocks)
        run = Run(height * width, (height, width), tuple(range(len(blocks))))
        return Layout(blocks, host.num_prefix_tokens, host.num_classes, (run,))

    def convert_(
        self, model: nn.Module, config: MethodConfig, sites: Sequence[Site], state: TokenState
    ) -> None:
        host = self.network(model)
        starts = [index == 0 for index in range(len(host.blocks))]
        for block, slot in zip(host.blocks, make_slots(config, sites, state, starts), strict=True):
            slot.counting = config.counting()
            slot.opens = False  # the network opens the forward, since it knows the patch grid
            merging = self.merging[type(block)]
            convert_block_(block, config, slot, merging, *self.projections(block))
            block.class_token = self.has_class_token(host)
        become_(host, self.models[type(host)])

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(self.network(model).blocks)

    def revert_(self, model: nn.Module) -> None:
        network, blocks, models = self.network(model), inverted(self.merging), inverted(self.models)
        for block in network.blocks:
            if type(block) in blocks:
                revert_block_(block, blocks[type(block)], *self.projections(block))
                del block.class_token
        become_(network, models.get(type(network), type(network)))

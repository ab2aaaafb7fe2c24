"""ViT, DeiT and DeiT-III: merge between attention and MLP, prefix tokens untouched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from timm.layers.attention import Attention
from timm.models._features import feature_take_indices
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block as HostBlock, VisionTransformer
from torch import Tensor, nn

from ltm.adapters.base import Adapter, Block, Layout, Run, register
from ltm.adapters.blocks import (
    MergingMixin,
    Slot,
    Tokens,
    TokenState,
    become_,
    convert_block_,
    make_slots,
    require_sizes,
    revert_block_,
)
from ltm.adapters.conversion import Resizable
from ltm.core.attention import attend, attention_hints
from ltm.core.merge import restore_through
from ltm.core.schedule import Grid
from ltm.methods.base import MethodConfig, Site


class MergingBlock(MergingMixin, HostBlock):
    """A ViT block that merges its attention output: the paper's block for regular transformers."""

    attn: Any
    class_token: bool
    """Whether the first token is one; there may be registers without it."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        tokens = self.entering(x)
        if (attn_mask is not None or is_causal) and tokens.merges:
            raise ValueError("attn_mask: masks of the original tokens do not fit merged ones.")
        size = tokens.size if self.slot.proportional else None
        attended = attend(
            self.attn, self.norm1(x), size, self.slot.counting, mask=attn_mask, is_causal=is_causal
        )
        z = x + self.drop_path1(self.ls1(attended))
        z, *_ = self.merge(z, tokens)
        return z + self.drop_path2(self.ls2(self.mlp(self.norm2(z))))

    def look(self, qkv: Tensor, size: Tensor | None, needs: frozenset[str]) -> dict[str, Tensor]:
        return attention_hints(
            self.attn, qkv, size, needs, self.slot.counting, class_token=self.class_token
        )


class MergingModel(Resizable):
    """What a converted ViT does differently as a whole: pooling, intermediates, resizing."""

    def _last_slot(self) -> Slot:
        return cast("Any", self).blocks[-1].slot

    def _patches(self, images: Tensor) -> Grid:
        return cast("Any", self).patch_embed.dynamic_feat_size(images.shape[-2:])

    def forward_features(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """Timm's own; what comes out is known to the pool, also after other forwards."""
        slot = self._last_slot()
        slot.state.open(self._patches(x))
        features = super().forward_features(x, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]
        slot.state.remember(features, slot.state.left_by(slot.index))
        return features

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Averages weigh tokens by the patches they stand for; what is not there is no largest."""
        host, slot = cast("VisionTransformer", self), self._last_slot()
        kind = host.global_pool if pool_type is None else pool_type
        tokens: Tokens = slot.state.recall(x) or slot.state.left_by(slot.index)
        size = tokens.size
        if kind not in ("avg", "avgmax", "max") or size is None or size.shape[1] != x.shape[1]:
            return super().pool(x, pool_type)  # pyright: ignore[reportAttributeAccessIssue]
        require_sizes(size, x)
        k = 0 if host.pool_include_prefix else host.num_prefix_tokens
        x, size = x[:, k:], size[:, k:, None]
        share = (size / size.sum(dim=1, keepdim=True)).to(x.dtype)
        largest = x.masked_fill(size <= 0, -torch.inf).amax(dim=1) if "max" in kind else None
        if kind == "max":
            return cast("Tensor", largest)
        mean = (x * share).sum(dim=1)
        return mean if largest is None else 0.5 * (mean + largest)

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
        """Timm's own, with every intermediate spread back to the full patch grid."""
        assert output_fmt in ("NCHW", "NLC"), "Output format must be one of NCHW or NLC."
        host, as_map = cast("VisionTransformer", self), output_fmt == "NCHW"
        grid = self._patches(x)
        self._last_slot().state.open(grid)
        out = super().forward_intermediates(  # pyright: ignore[reportAttributeAccessIssue]
            x, indices, return_prefix_tokens, norm, stop_early, "NLC", *args, **options
        )
        taken, _ = feature_take_indices(len(host.blocks), indices)

        def restore(block: int, y: Tensor) -> Tensor:
            slot: Slot = cast("Any", host.blocks[block]).slot
            tokens: Tokens = slot.state.left_by(block)
            k = host.num_prefix_tokens
            y = restore_through(tokens.merges, nn.functional.pad(y, (0, 0, k, 0)))[:, k:]
            return y.reshape(len(y), *grid, -1).permute(0, 3, 1, 2).contiguous() if as_map else y

        def restore_all(features: list[Any]) -> list[Any]:
            return [
                (restore(block, y[0]), y[1]) if isinstance(y, tuple) else restore(block, y)
                for block, y in zip(taken, features, strict=True)
            ]

        if isinstance(out, dict):
            out["image_intermediates"] = restore_all(out["image_intermediates"])
            return out
        return restore_all(out) if isinstance(out, list) else (out[0], restore_all(out[1]))


class MergingVisionTransformer(MergingModel, VisionTransformer):
    """A converted `VisionTransformer`."""


class MergingVisionTransformerDistilled(MergingModel, VisionTransformerDistilled):
    """A converted distilled DeiT."""


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    VisionTransformer: MergingVisionTransformer,
    VisionTransformerDistilled: MergingVisionTransformerDistilled,
}


def _vit_of(model: nn.Module) -> VisionTransformer:
    """The ViT itself, also inside timm's feature extractor or another module."""
    return next(m for m in model.modules() if isinstance(m, VisionTransformer))


@register
class ViTAdapter(Adapter):
    """timm's `VisionTransformer` with plain pre-norm blocks."""

    family: ClassVar[str] = "vit"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (VisionTransformer,)
    covers: ClassVar[str] = "ViT, DeiT, DeiT-III (timm VisionTransformer with plain blocks)"

    def refusal(self, model: nn.Module) -> str | None:
        vit = _vit_of(model)
        if sum(isinstance(module, VisionTransformer) for module in model.modules()) > 1:
            return "it holds more than one ViT; convert each of them by itself."
        if type(vit) not in _CLASSES and not isinstance(vit, MergingModel):
            return f"{type(vit).__name__} is a variant of ViT that is not known here."
        for block in vit.blocks:
            if type(block) not in (HostBlock, MergingBlock):
                return f"its blocks are {type(block).__name__}, and only plain Block is known."
            if type(block.attn) is not Attention:
                return f"its attention is {type(block.attn).__name__}, not plain Attention."
        if vit.attn_pool is not None:
            return "its head pools by attention, which does not know token sizes."
        return None

    def layout(self, model: nn.Module, image_size: tuple[int, int]) -> Layout:
        vit = _vit_of(model)
        height, width = vit.patch_embed.dynamic_feat_size(image_size)
        paths = {module: name for name, module in model.named_modules()}
        blocks = tuple(Block(paths[block], block, vit.embed_dim, stage=0) for block in vit.blocks)
        run = Run(height * width, (height, width), tuple(range(len(blocks))))
        return Layout(blocks, vit.num_prefix_tokens, vit.num_classes, (run,))

    def convert_(
        self, model: nn.Module, config: MethodConfig, sites: Sequence[Site], state: TokenState
    ) -> None:
        vit = _vit_of(model)
        starts = [index == 0 for index in range(len(vit.blocks))]
        for block, slot in zip(vit.blocks, make_slots(config, sites, state, starts), strict=True):
            slot.counting = config.counting()
            slot.opens = False  # The network opens the forward: it knows the shape of the image.
            convert_block_(block, config, slot, MergingBlock, cast("Any", block).attn.qkv)
            cast("Any", block).class_token = vit.cls_token is not None
        become_(vit, _CLASSES[type(vit)])

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(_vit_of(model).blocks)

    def revert_(self, model: nn.Module) -> None:
        vit = _vit_of(model)
        for block in vit.blocks:
            if isinstance(block, MergingBlock):
                revert_block_(block, HostBlock, block.attn.qkv)
                del block.class_token
        hosts = {merging: host for host, merging in _CLASSES.items()}
        become_(vit, hosts.get(type(vit), type(vit)))

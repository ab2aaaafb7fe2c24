"""BEiT and relative-position ViTs: attention adds a bias that depends on where two tokens stand.

Between merged tokens it is the bias of the tokens that stayed, gathered for each image. timm's own
function makes it; a subclass puts the tokens in their places and adds the log of their sizes, so
that timm's attention runs as it is, fused or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from timm.layers.pos_embed_rel import RelPosBias, RelPosMlp
from timm.models import beit
from timm.models.vision_transformer_relpos import (
    RelPosAttention,
    RelPosBlock,
    ResPostRelPosBlock,
    VisionTransformerRelPos,
)
from torch import Tensor, nn

from ltm.adapters.base import register
from ltm.adapters.blocks import MergingMixin, Slot, Tokens, TokenState, become_
from ltm.adapters.sequences import MergingHeadModel, SequenceAdapter
from ltm.core.attention import hints_of, queries_and_keys, size_bias
from ltm.methods.base import MethodConfig, Site


def between(bias: Tensor, tokens: Tokens) -> Tensor:
    """The bias between the tokens that there are, `b h t t`; given is that between all patches."""
    if tokens.positions is None:
        return bias
    places = tokens.positions
    whole = bias[0] if bias.ndim == 4 else bias
    return whole[:, places[:, :, None], places[:, None, :]].transpose(0, 1)


def counted(bias: Tensor | None, tokens: Tokens, slot: Slot) -> Tensor | None:
    """A bias with the sizes of the tokens, where there are any and they count."""
    if tokens.size is None or not slot.proportional:
        return bias
    sizes = size_bias(tokens.size, _dtype(bias, tokens.size), slot.counting)
    return sizes if bias is None else bias + sizes


def _dtype(bias: Tensor | None, size: Tensor) -> Any:
    return size.dtype if bias is None else bias.dtype


class Placed(nn.Module):
    """A module that makes a bias, here for the tokens that enter its block."""

    placed: Slot

    def _placed(self, bias: Tensor) -> Tensor:
        tokens = self.placed.state.frame.tokens[self.placed.index]
        return counted(between(bias, tokens), tokens, self.placed)  # pyright: ignore[reportReturnType]


class PlacedRelPosBias(Placed, RelPosBias):
    """A table of biases."""

    def get_bias(self) -> Tensor:
        return self._placed(super().get_bias())


class PlacedRelPosMlp(Placed, RelPosMlp):
    """Biases that an MLP makes of distances."""

    def get_bias(self) -> Tensor:
        return self._placed(super().get_bias())


class PlacedAttention(Placed, beit.Attention):
    """The attention of BEiT, which holds its table itself."""

    def _get_rel_pos_bias(self) -> Tensor:
        return self._placed(super()._get_rel_pos_bias())


class RelativeMixin(MergingMixin):
    """A block whose attention adds a bias of its own, or one that all blocks share, or both."""

    attn: Any
    class_token: bool
    needs_positions: ClassVar[bool] = True

    def own_bias(self) -> Tensor | None:
        """The bias of the block's own, for the tokens that there are, with their sizes."""
        raise NotImplementedError

    @property
    def has_own(self) -> bool:
        """Whether there is one."""
        raise NotImplementedError

    def shared_bias(self, shared: Tensor | None, tokens: Tokens, x: Tensor) -> Tensor | None:
        """What to hand to the attention as the bias that all blocks share."""
        shared = None if shared is None else between(shared, tokens)
        if self.has_own:
            return shared
        bias = counted(shared, tokens, self.slot)
        return None if bias is None else bias.to(x.dtype)

    def look(
        self,
        qkv: Tensor,
        size: Tensor | None,
        needs: frozenset[str],
        *,
        shared: Tensor | None = None,
    ) -> dict[str, Tensor]:
        query, key = queries_and_keys(self.attn, qkv)
        bias = None
        if needs != {"keys"}:
            own = self.own_bias()
            bias = shared if own is None else own if shared is None else own + shared
        # The sizes are in the bias.
        sized = None if bias is not None and self.slot.proportional else size
        return hints_of(
            query,
            key,
            self.attn.scale,
            sized,
            needs,
            self.slot.counting,
            class_token=self.class_token,
            bias=bias,
        )


class RelPosMixin(RelativeMixin):
    """A block of a `VisionTransformerRelPos`: it has a bias of its own, or shares one."""

    @property
    def has_own(self) -> bool:
        return self.attn.rel_pos is not None

    def own_bias(self) -> Tensor | None:
        return self.attn.rel_pos.get_bias() if self.has_own else None


class MergingRelPosBlock(RelPosMixin, RelPosBlock):
    """A `RelPosBlock` that merges its attention output."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        tokens = self.entering(x)
        shared = self.shared_bias(shared_rel_pos, tokens, x)
        attended = self.attn(self.norm1(x), shared_rel_pos=shared)
        z = x + self.drop_path1(self.ls1(attended))
        z, *_ = self.merge(z, tokens, shared=shared)
        return z + self.drop_path2(self.ls2(self.mlp(self.norm2(z))))


class MergingResPostRelPosBlock(RelPosMixin, ResPostRelPosBlock):
    """A `ResPostRelPosBlock` that merges its attention output."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        tokens = self.entering(x)
        shared = self.shared_bias(shared_rel_pos, tokens, x)
        z = x + self.drop_path1(self.norm1(self.attn(x, shared_rel_pos=shared)))
        z, *_ = self.merge(z, tokens, shared=shared)
        return z + self.drop_path2(self.norm2(self.mlp(z)))


class MergingBeitBlock(RelativeMixin, beit.Block):
    """A block of BEiT that merges its attention output."""

    @property
    def has_own(self) -> bool:
        return self.attn.relative_position_bias_table is not None

    def own_bias(self) -> Tensor | None:
        return self.attn._get_rel_pos_bias() if self.has_own else None  # noqa: SLF001

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        tokens = self.entering(x)
        shared = self.shared_bias(shared_rel_pos_bias, tokens, x)
        attended = self.attn(self.norm1(x), shared_rel_pos_bias=shared)
        z = x + self.drop_path1(_scaled(attended, self.gamma_1))
        z, *_ = self.merge(z, tokens, shared=shared)
        return z + self.drop_path2(_scaled(self.mlp(self.norm2(z)), self.gamma_2))


def _scaled(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else gamma * x


class MergingRelPosViT(MergingHeadModel, VisionTransformerRelPos):
    """A converted `VisionTransformerRelPos`."""


class MergingBeit(MergingHeadModel, beit.Beit):
    """A converted `Beit`."""


class RelativeAdapter(SequenceAdapter):
    """A family whose attention adds a bias."""

    placed: ClassVar[dict[type[nn.Module], type[nn.Module]]]
    """What the modules become that make a bias for their block."""

    def makes_bias(self, block: Any) -> nn.Module | None:
        """The module that makes the block's own bias."""
        raise NotImplementedError

    def convert_(
        self, model: nn.Module, config: MethodConfig, sites: Sequence[Site], state: TokenState
    ) -> None:
        super().convert_(model, config, sites, state)
        for block in self.network(model).blocks:
            maker = self.makes_bias(block)
            if maker is not None:
                become_(maker, self.placed[type(maker)])
                cast("Placed", maker).placed = block.slot

    def revert_(self, model: nn.Module) -> None:
        hosts = {placed: host for host, placed in self.placed.items()}
        for block in self.network(model).blocks:
            maker: Any = self.makes_bias(block)
            if type(maker) in hosts:
                become_(maker, hosts[type(maker)])
                del maker.placed
        super().revert_(model)


@register
class RelPosAdapter(RelativeAdapter):
    """timm's `VisionTransformerRelPos`."""

    family: ClassVar[str] = "vit-relpos"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (VisionTransformerRelPos,)
    covers: ClassVar[str] = "ViTs with relative positions (timm VisionTransformerRelPos)"
    models: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {
        VisionTransformerRelPos: MergingRelPosViT
    }
    merging: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {
        RelPosBlock: MergingRelPosBlock,
        ResPostRelPosBlock: MergingResPostRelPosBlock,
    }
    attention: ClassVar[tuple[type[nn.Module], ...]] = (RelPosAttention,)
    placed: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {
        RelPosBias: PlacedRelPosBias,
        RelPosMlp: PlacedRelPosMlp,
    }

    def makes_bias(self, block: Any) -> nn.Module | None:
        return block.attn.rel_pos


@register
class BeitAdapter(RelativeAdapter):
    """timm's `Beit`."""

    family: ClassVar[str] = "beit"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (beit.Beit,)
    covers: ClassVar[str] = "BEiT, BEiT v2 (timm Beit)"
    models: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {beit.Beit: MergingBeit}
    merging: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {beit.Block: MergingBeitBlock}
    attention: ClassVar[tuple[type[nn.Module], ...]] = (beit.Attention, PlacedAttention)
    placed: ClassVar[dict[type[nn.Module], type[nn.Module]]] = {beit.Attention: PlacedAttention}

    def makes_bias(self, block: Any) -> nn.Module | None:
        return block.attn

    def convert_(
        self, model: nn.Module, config: MethodConfig, sites: Sequence[Site], state: TokenState
    ) -> None:
        super().convert_(model, config, sites, state)
        for block in self.network(model).blocks:
            if block.merger is not None and block.merger.needs:
                # Otherwise timm reads the weights of the projection and never runs it. It adds the
                # bias in place, so what is recorded has it.
                block.slot.original["qkv_bias_separate"] = block.attn.qkv_bias_separate
                block.attn.qkv_bias_separate = True

    def revert_(self, model: nn.Module) -> None:
        for block in self.network(model).blocks:
            if isinstance(block, MergingBeitBlock):
                for name, value in block.slot.original.items():
                    setattr(block.attn, name, value)
        super().revert_(model)

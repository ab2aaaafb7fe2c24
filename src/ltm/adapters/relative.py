"""BEiT and relative-position ViTs: attention adds a bias that depends on two tokens' positions.

Merged tokens take the bias of the tokens that stayed, gathered for each image. A subclass of timm's
module gathers it and adds the log of the token sizes, so timm's attention runs unchanged, fused or
not.
"""

from __future__ import annotations

from abc import abstractmethod
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
from ltm.adapters.blocks import (
    GammaMixin,
    HalvesMixin,
    PostNormMixin,
    PreNormMixin,
    Slot,
    Tokens,
    TokenState,
    become_,
    inverted,
    run_projection_,
)
from ltm.adapters.sequences import MergingHeadModel, SequenceAdapter
from ltm.core.attention import hints_of, queries_and_keys, size_bias
from ltm.methods.base import MethodConfig, Site


def _between(bias: Tensor, tokens: Tokens) -> Tensor:
    """The bias between tokens at the positions they take, `b h t t`, from that of all patches."""
    if tokens.positions is None:
        return bias
    places = tokens.positions
    whole = bias[0] if bias.ndim == 4 else bias
    return whole[:, places[:, :, None], places[:, None, :]].transpose(0, 1)


def _counted(bias: Tensor | None, tokens: Tokens, slot: Slot) -> Tensor | None:
    """The bias plus that of the token sizes, if attention is proportional."""
    if tokens.size is None or not slot.proportional:
        return bias
    dtype = tokens.size.dtype if bias is None else bias.dtype
    sizes = size_bias(tokens.size, dtype, slot.counting)
    return sizes if bias is None else bias + sizes


class Placed(nn.Module):
    """A module that makes the bias of its block, here for the tokens that enter the block."""

    placed: Slot

    def _placed(self, bias: Tensor) -> Tensor:
        tokens = self.placed.state.frame.tokens[self.placed.index]
        return _counted(_between(bias, tokens), tokens, self.placed)  # pyright: ignore[reportReturnType]


class PlacedRelPosBias(Placed, RelPosBias):
    """A table of biases."""

    def get_bias(self) -> Tensor:
        return self._placed(super().get_bias())


class PlacedRelPosMlp(Placed, RelPosMlp):
    """An MLP that turns distances into biases."""

    def get_bias(self) -> Tensor:
        return self._placed(super().get_bias())


class PlacedAttention(Placed, beit.Attention):
    """The attention of BEiT, which holds its own table of biases."""

    def _get_rel_pos_bias(self) -> Tensor:
        return self._placed(super()._get_rel_pos_bias())


class RelativeMixin(HalvesMixin):
    """A block whose attention adds its own bias, one that all blocks share, or both."""

    attn: Any
    class_token: bool
    needs_positions: ClassVar[bool] = True

    def own_bias(self) -> Tensor | None:
        """The block's own bias for the tokens that enter, with their sizes; None if it has none."""
        raise NotImplementedError

    @property
    def has_own(self) -> bool:
        """Whether the block has a bias of its own."""
        raise NotImplementedError

    def run(self, x: Tensor, shared: Tensor | None) -> Tensor:
        """The forward, with the bias that all blocks share."""
        tokens = self.entering(x)
        bias = self.shared_bias(shared, tokens, x)
        z = x + self.attended(x, lambda y: self.attn(y, bias))
        z, *_ = self.merge(z, tokens, shared=bias)
        return z + self.transformed(z)

    def shared_bias(self, shared: Tensor | None, tokens: Tokens, x: Tensor) -> Tensor | None:
        """The shared bias to pass to attention; sizes go into the block's own bias, if any."""
        shared = None if shared is None else _between(shared, tokens)
        if self.has_own:
            return shared
        bias = _counted(shared, tokens, self.slot)
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
        # The bias includes the sizes.
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
    """A block of a `VisionTransformerRelPos`, with its own bias or a shared one."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        return self.run(x, shared_rel_pos)

    @property
    def has_own(self) -> bool:
        return self.attn.rel_pos is not None

    def own_bias(self) -> Tensor | None:
        return self.attn.rel_pos.get_bias() if self.has_own else None


class MergingRelPosBlock(PreNormMixin, RelPosMixin, RelPosBlock):
    """A `RelPosBlock` that merges its attention output."""


class MergingResPostRelPosBlock(PostNormMixin, RelPosMixin, ResPostRelPosBlock):
    """A `ResPostRelPosBlock` that merges its attention output."""


class MergingBeitBlock(GammaMixin, RelativeMixin, beit.Block):
    """A block of BEiT that merges its attention output."""

    @property
    def has_own(self) -> bool:
        return self.attn.relative_position_bias_table is not None

    def own_bias(self) -> Tensor | None:
        return self.attn._get_rel_pos_bias() if self.has_own else None  # noqa: SLF001

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        return self.run(x, shared_rel_pos_bias)


class MergingRelPosViT(MergingHeadModel, VisionTransformerRelPos):
    """A converted `VisionTransformerRelPos`."""


class MergingBeit(MergingHeadModel, beit.Beit):
    """A converted `Beit`."""


class RelativeAdapter(SequenceAdapter):
    """A family whose attention adds a bias."""

    placed: ClassVar[dict[type[nn.Module], type[nn.Module]]]
    """What the modules that make a block's bias become."""

    @abstractmethod
    def makes_bias(self, block: Any) -> nn.Module | None:
        """The module that makes the block's own bias, if there is one."""

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
        hosts = inverted(self.placed)
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
                run_projection_(block.slot, block.attn)

    def revert_(self, model: nn.Module) -> None:
        for block in self.network(model).blocks:
            if isinstance(block, MergingBeitBlock):
                for name, value in block.slot.original.items():
                    setattr(block.attn, name, value)
        super().revert_(model)

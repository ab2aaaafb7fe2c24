"""What the vision towers of transformers share: layers, embeddings, pooling and saving.

All layers have two halves, attention and MLP, under different names, and their attention takes a
mask, to which the token sizes are added. So a family only names its halves and its classes.

transformers identifies classes by name: in `config.json`, for device maps and for hidden states.
So a module's new class has the name of its old one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.generic import can_return_tuple

from ltm.adapters.base import Adapter, Block, Layout, Run
from ltm.adapters.blocks import (
    HalvesMixin,
    Slot,
    Tokens,
    TokenState,
    become_,
    convert_block_,
    make_slots,
    revert_block_,
)
from ltm.adapters.conversion import ATTRIBUTE, described, warn_of_fewer
from ltm.core.attention import Rotation, attend_sized, has_kernel, hints_of, size_bias
from ltm.core.merge import pool_by_size
from ltm.methods.base import MethodConfig, Site

_BIASED = ("sdpa", "eager")
"""The implementations of attention that take a floating-point mask."""


class Swapped(nn.Module):
    """The base of the classes that `swapped` combines with a host's."""

    swapped: ClassVar[tuple[type[nn.Module], ...]]
    """The classes that were combined, the host's last."""
    stays: ClassVar[bool] = False
    """Whether the class stays when the conversion is undone."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revived, type(self).swapped, self.__dict__


@functools.cache
def swapped(own: type[nn.Module], *others: type[nn.Module]) -> type[nn.Module]:
    """A subclass of all classes, with the name of the last one, the host's."""
    if not others:
        return own
    below = swapped(*others)
    kinds = (own, *(below.swapped if issubclass(below, Swapped) else (below,)))
    names = {"__module__": below.__module__, "__qualname__": below.__qualname__}
    return type(below.__name__, (own, below), {**names, "swapped": kinds})


def _revived(*kinds: type[nn.Module]) -> nn.Module:
    kind = swapped(*kinds)
    return kind.__new__(kind)


def host_of(module: nn.Module) -> type[nn.Module]:
    """The class of transformers that a module has or derives from."""
    return module.swapped[-1] if isinstance(module, Swapped) else type(module)


def _before(module: nn.Module) -> type[nn.Module]:
    """The class that a module goes back to when the conversion is undone."""
    if not isinstance(module, Swapped):
        return type(module)
    *own, host = module.swapped
    return swapped(*(kind for kind in own if cast("type[Swapped]", kind).stays), host)


def become_too_(module: nn.Module, own: type[Swapped]) -> None:
    """Make a module's class a subclass of `own`, too; classes that stay come first."""
    kinds: tuple[Any, ...] = getattr(type(module), "swapped", (type(module),))
    outer = [kind for kind in (own, *kinds[:-1]) if kind.stays]
    inner = [kind for kind in (own, *kinds[:-1]) if not kind.stays]
    become_(module, swapped(*outer, *inner, kinds[-1]))


class Classifier(Swapped):
    """A classifier that takes images and returns scores, as timm's do."""

    stays: ClassVar[bool] = True
    pretrained_cfg: dict[str, Any]
    """The preprocessing of images, as timm writes it."""

    @property
    def num_classes(self) -> int:
        return cast("Any", self).num_labels

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).logits


# --- The parts of a converted tower --------------------------------------------------------------


class MergingLayer(Swapped, HalvesMixin):
    """A layer that merges its attention output."""

    num_prefix: int
    """Tokens before the patches; the first of them is a class token."""

    def self_attention(self) -> Any:
        """The layer of attention."""
        return cast("Any", self).attention

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        x, tokens = hidden_states, self.entering(hidden_states)
        rotation = self.rotation(tokens, options)

        def attend(y: Tensor) -> Tensor:
            return self.attend(y, attention_mask, tokens, rotation, options)

        z = x + self.attended(x, attend)
        z, *_ = self.merge(z, tokens, rotation=rotation)
        return z + self.transformed(z)

    def rotation(self, tokens: Tokens, options: dict[str, Any]) -> Rotation | None:
        """The rotary positions of the tokens, if the network has such."""
        return None

    def attend(
        self,
        y: Tensor,
        mask: Tensor | None,
        tokens: Tokens,
        rotation: Rotation | None,
        options: dict[str, Any],
    ) -> Tensor:
        """The output of the attention, with tokens weighted by size."""
        layer, bias = self.self_attention(), self.mask(mask, tokens, y.dtype)
        size = tokens.size if self.slot.proportional else None
        drops = self.training and _dropout(layer) > 0
        if size is None or drops or not has_kernel(layer, y, layer.head_dim):
            if tokens.merges and rotation is not None:
                sines, cosines = rotation.gathered()
                options = {**options, "position_embeddings": (cosines, sines)}
            return layer(y, attention_mask=bias, **options)[0]
        projected = (project(y) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        query, key, value = (part.unflatten(-1, (-1, layer.head_dim)) for part in projected)
        power = self.slot.counting
        out = attend_sized(query, key, value, size, _scale(layer), power, rotation)
        return (layer.o_proj if hasattr(layer, "o_proj") else layer.out_proj)(out)

    def mask(self, given: Tensor | None, tokens: Tokens, dtype: torch.dtype) -> Tensor | None:
        """The bias on the scores: the log of the token sizes, or the given mask."""
        if tokens.merges:
            given = None  # `MergingTower` refuses masks of users; this one is transformers' own
        if tokens.size is None or not self.slot.proportional:
            return given
        chosen = self.self_attention().config._attn_implementation  # noqa: SLF001
        if chosen not in _BIASED:
            raise ValueError(_unbiased(chosen))
        return size_bias(tokens.size, dtype, self.slot.counting)

    def look(
        self,
        query: Tensor,
        key: Tensor,
        size: Tensor | None,
        needs: frozenset[str],
        *,
        rotation: Rotation | None = None,
    ) -> dict[str, Tensor]:
        layer = self.self_attention()
        heads = (-1, layer.head_dim)
        return hints_of(
            query.unflatten(-1, heads),
            key.unflatten(-1, heads),
            _scale(layer),
            size,
            needs,
            self.slot.counting,
            class_token=self.num_prefix > 0,
            rotation=rotation,
        )


def _scale(layer: Any) -> float:
    return layer.scaling if hasattr(layer, "scaling") else layer.scale


def _dropout(layer: Any) -> float:
    return layer.dropout if hasattr(layer, "dropout") else layer.attention_dropout


def _unbiased(implementation: str) -> str:
    return (
        f"its attention is {implementation!r}, which takes no token sizes; load it with "
        "attn_implementation='sdpa'."
    )


class MergingEmbeddings(Swapped):
    """Embeddings that open the forward, since they know the patch grid."""

    opened: TokenState
    patch: tuple[int, int]

    def forward(self, pixel_values: Tensor, *args: Any, **options: Any) -> Tensor:
        height, width = pixel_values.shape[-2:]
        self.opened.open((height // self.patch[0], width // self.patch[1]))
        return super().forward(pixel_values, *args, **options)


class SizedAttention(Swapped):
    """The attention of a pooling head, with tokens weighted by size."""

    sized: Slot
    """The slot of the last layer."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        tokens = self.sized.state.left_by(self.sized.index)
        if tokens.merges and tokens.size is not None:
            heads = cast("Any", self).num_heads
            bias = size_bias(tokens.size, query.dtype)[:, 0].expand(key.shape[0], -1, -1)
            options["attn_mask"] = bias.repeat_interleave(heads, dim=0)
        return super().forward(query, key, value, **options)


class GivingTower(Swapped):
    """A tower that remembers whose tokens it gives.

    If it was converted by itself, it warns once that they are merged.
    """

    opened: TokenState
    num_layers: int

    def forward(self, *args: Any, **options: Any) -> Any:
        outputs = super().forward(*args, **options)
        state, last = self.opened, self.num_layers - 1
        state.give(outputs[0], state.left_by(last))
        for index, x in enumerate(getattr(outputs, "hidden_states", None) or ()):
            if x is not None:  # Some may be left out.
                state.give(x, state.left_by(index - 1))
        warn_of_fewer(self, state.left_by(last))
        return outputs


class MergingTower(GivingTower):
    """The tower itself, which can tell whether a user gave a mask.

    Its layers cannot: in export and CUDA graphs transformers gives them a mask of ones.
    """

    def forward(self, pixel_values: Any = None, *args: Any, **options: Any) -> Any:
        if options.get("attention_mask") is not None and merges(self):
            raise ValueError("attention_mask: masks of the original tokens do not fit merged ones.")
        return super().forward(pixel_values, *args, **options)


def merges(tower: nn.Module) -> bool:
    """Whether a layer of it merges tokens now."""
    layers = [module for module in tower.modules() if isinstance(module, MergingLayer)]
    return any(layer.merger is not None and layer.slot.state.merging for layer in layers)


class MergingModel(Swapped):
    """A converted network: `ltm.load` can read what its `save_pretrained` writes."""

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """As in transformers; `config.json` also says how the network merges."""
        config = cast("Any", self).config
        options = {"save_original_format": False, **options}  # the only format `ltm.load` reads
        if hasattr(self, ATTRIBUTE):
            config.token_merging = described(self)
        try:
            super().save_pretrained(save_directory, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            vars(config).pop("token_merging", None)


class MeanPooled(MergingModel):
    """A converted classifier that reads the mean patch token, here weighted by size."""

    pooled: Slot
    """The slot of the last layer."""
    num_prefix: int
    reads_class_token: bool

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **options: Any
    ) -> ImageClassifierOutput:
        host, tower = cast("Any", self), next(_pretrained(*self.children()))
        outputs = tower(pixel_values, **options)
        x, k = outputs.last_hidden_state, self.num_prefix
        size = self.pooled.state.left_by(self.pooled.index).size
        mean = x[:, k:].mean(dim=1) if size is None else pool_by_size(x[:, k:], size[:, k:], "avg")
        logits = host.classifier(torch.cat([x[:, 0], mean], 1) if self.reads_class_token else mean)
        loss = None if labels is None else host.loss_function(labels, logits, host.config)
        return ImageClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


# --- The family ----------------------------------------------------------------------------------


def _pretrained(*modules: nn.Module) -> Iterator[Any]:
    return (module for module in modules if isinstance(module, PreTrainedModel))


class TowerAdapter(Adapter):
    """A family of towers; `hosts` are the towers themselves."""

    layers: ClassVar[tuple[type[nn.Module], ...]]
    layer: ClassVar[type[MergingLayer]]
    """What its layers become."""
    heads: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Networks that hold a tower and read its class token or its pooled output."""
    mean_pooled: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Networks that hold a tower and read its mean patch token."""
    reads_class_token: ClassVar[bool] = False
    """Whether those in `mean_pooled` also read the class token."""
    pools: ClassVar[type[MeanPooled]] = MeanPooled
    """What those in `mean_pooled` become."""

    def tower(self, model: nn.Module) -> Any:
        """The tower itself, which may be inside another module."""
        return next(module for module in model.modules() if isinstance(module, self.hosts))

    def units(self, model: nn.Module) -> list[Any]:
        return [m for m in self.tower(model).modules() if isinstance(m, self.layers)]

    def networks(self) -> tuple[type[nn.Module], ...]:
        return (*self.hosts, *self.heads, *self.mean_pooled)

    def saved_entries(self, model: nn.Module) -> dict[str, Any]:
        top = next(_pretrained(*model.modules()))
        if top is not model:
            raise ValueError(f"model: save its part that is a {host_of(top).__name__}.")
        entries = {**top.config.to_dict(), "architectures": [host_of(top).__name__]}
        known = getattr(top, "pretrained_cfg", None)
        return entries if known is None else {**entries, "pretrained_cfg": known}

    def give_scores_(self, model: nn.Module) -> None:
        """Make a classifier return scores; a network without classes stays as it is."""
        has_classes = hasattr(model, "classifier") or hasattr(model, "cls_classifier")
        if has_classes and not isinstance(model, Classifier):
            become_too_(model, Classifier)
        self.take_images_(model)

    def refusal(self, model: nn.Module) -> str | None:
        towers = [name for name, m in model.named_modules() if isinstance(m, self.hosts)]
        if len(towers) > 1:
            return f"it holds more than one tower, {', '.join(towers)}; convert each by itself."
        known = self.networks()
        top, tower = next(_pretrained(*model.modules())), self.tower(model)
        if host_of(top) not in known:
            part = f"; convert its part {towers[0]}" if towers[0] else ""
            return f"{host_of(top).__name__} is a variant that is not known here{part}."
        other = {host_of(layer).__name__ for layer in self.units(model)} - {
            layer.__name__ for layer in self.layers
        }
        if other:
            return f"its layers are {', '.join(sorted(other))}, a variant that is not known here."
        chosen = tower.config._attn_implementation  # noqa: SLF001
        return None if chosen in _BIASED else _unbiased(chosen)

    def layout(self, model: nn.Module, image_size: tuple[int, int]) -> Layout:
        tower = self.tower(model)
        patch = self.patch(tower)
        height, width = image_size[0] // patch[0], image_size[1] // patch[1]
        paths = {module: name for name, module in model.named_modules()}
        channels = tower.config.hidden_size
        blocks = tuple(Block(paths[m], channels, stage=0) for m in self.units(model))
        run = Run(height * width, (height, width), tuple(range(len(blocks))))
        return Layout(blocks, num_prefix(tower), self.num_classes(model), (run,))

    def num_classes(self, model: nn.Module) -> int:
        if hasattr(model, "num_classes"):
            return int(cast("Any", model).num_classes)
        top = next(_pretrained(*model.modules()))
        return int(getattr(top, "num_labels", 0))

    def projections(self, layer: MergingLayer | Any) -> tuple[nn.Module, ...]:
        """The layers that make queries and keys."""
        attention = self.layer.self_attention(layer)
        return attention.q_proj, attention.k_proj

    def convert_(
        self, model: nn.Module, config: MethodConfig, sites: Sequence[Site], state: TokenState
    ) -> None:
        tower, layers = self.tower(model), self.units(model)
        slots = make_slots(config, sites, state, [index == 0 for index in range(len(layers))])
        for layer, slot in zip(layers, slots, strict=True):
            slot.counting = config.counting()
            slot.opens = False  # the embeddings open the forward
            kind = swapped(self.layer, type(layer))
            convert_block_(layer, config, slot, kind, *self.projections(layer))
            layer.num_prefix = num_prefix(tower)
        self.open_(tower, state)
        tower.num_layers = len(layers)
        if hasattr(tower, "head"):
            self.pool_(tower.head, slots[-1])
        top = next(_pretrained(*model.modules()))
        if host_of(top) in self.mean_pooled:
            top.pooled, top.num_prefix = slots[-1], num_prefix(tower)
            top.reads_class_token = self.reads_class_token
            become_too_(top, self.pools)
        else:
            become_too_(top, MergingModel)

    def image_size(self, model: nn.Module) -> int | tuple[int, int] | None:
        return self.tower(model).config.image_size

    def patch(self, tower: Any) -> tuple[int, int]:
        """The sides of a patch."""
        convolutions = (m for m in tower.embeddings.modules() if isinstance(m, nn.Conv2d))
        height, width = next(convolutions).kernel_size
        return height, width

    def open_(self, tower: Any, state: TokenState) -> None:
        """Have the tower open the state at the start of a forward."""
        tower.opened = tower.embeddings.opened = state
        tower.embeddings.patch = self.patch(tower)
        become_too_(tower.embeddings, MergingEmbeddings)
        become_too_(tower, MergingTower)

    def pool_(self, head: Any, slot: Slot) -> None:
        """Have a pooling head count tokens by the sizes that a slot leaves."""
        head.attention.sized = slot
        become_too_(head.attention, SizedAttention)

    def revert_(self, model: nn.Module) -> None:
        for layer in self.units(model):
            revert_block_(layer, host_of(layer), *self.projections(layer))
            del layer.num_prefix
        for module in model.modules():
            for name in (
                "opened",
                "num_layers",
                "patch",
                "sized",
                "pooled",
                "num_prefix",
                "reads_class_token",
            ):
                if isinstance(module, Swapped):
                    vars(module).pop(name, None)
            become_(module, _before(module))


def num_prefix(tower: Any) -> int:
    """How many tokens stand before the patches."""
    names = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
    tokens = [getattr(tower.embeddings, name, None) for name in names]
    return sum(1 if token.ndim == 1 else token.shape[1] for token in tokens if token is not None)

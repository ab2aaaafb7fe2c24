"""Plan and convert a model, and undo it."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from ltm.adapters.base import Conversion, adapter_of, find_adapter, select_adapter
from ltm.adapters.blocks import Tokens, TokenState, become_
from ltm.adapters.planning import OutOfReachError, Planner, require_macs
from ltm.core.cost import count_macs, meta_copy, meta_images
from ltm.core.patches import embed_by_convolution_
from ltm.methods.base import Merger, MethodConfig

ATTRIBUTE = "token_merging"
"""Where a converted model keeps its `Conversion`."""


def convert_(
    model: nn.Module,
    config: MethodConfig,
    image_size: tuple[int, int],
    schedule: MethodConfig | None = None,
) -> Conversion:
    """Convert a model, or raise a ValueError and leave it as it was.

    `schedule` replaces the amounts and sites of the config if they are known, as from a file.
    """
    adapter = select_adapter(model)
    planner = Planner(model, adapter, schedule or config, image_size)
    try:
        plan = planner.plan()
    except OutOfReachError as error:
        if schedule is not None or not config.by_default:
            raise
        config = config.with_amount(ratio=math.ceil(50 * (1 + error.floor)) / 100)
        warnings.warn(
            f"ratio: {config.name} on this network cannot go below {error.floor:.3f} of its MACs, "
            f"so that the default of 0.7 is out of reach; it is {config.ratio} here.",
            stacklevel=3,
        )
        plan = planner.with_config(config).plan()
    left_out = config.left_out(plan.sites)
    if left_out:
        warnings.warn(left_out, stacklevel=3)
    state = TokenState()
    adapter.convert_(model, config, plan.sites, state)
    conversion = Conversion(
        adapter.family, config, image_size, plan.sites, state, plan.macs_before, plan.macs_after
    )
    setattr(model, ATTRIBUTE, conversion)
    return conversion


def revert_(model: nn.Module) -> None:
    """Undo `convert_`."""
    adapter_of(getattr(model, ATTRIBUTE).family).revert_(model)
    embed_by_convolution_(model)
    delattr(model, ATTRIBUTE)


def mergers_of(model: nn.Module) -> dict[str, Merger]:
    """The mergers of a converted model, by module path."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Merger)}


def macs_of(model: nn.Module, image_size: tuple[int, int]) -> int:
    """MACs of one image, with the informative step counted even before it has statistics."""
    shadow, adapter = meta_copy(model), find_adapter(model)
    if adapter is not None:
        adapter.take_images_(shadow)
    for merger in mergers_of(shadow).values():
        merger.activate_()
    return require_macs(shadow, meta_images(shadow, image_size))


def _macs_without(model: nn.Module, image_size: tuple[int, int]) -> int:
    """MACs of one image in a converted model before its conversion."""
    shadow = meta_copy(model)
    adapter_of(getattr(model, ATTRIBUTE).family).take_images_(shadow)
    revert_(shadow)
    return count_macs(shadow, meta_images(shadow, image_size))


def described(model: nn.Module) -> dict[str, Any]:
    """How a converted model merges, as plain values: the entry `token_merging` in files."""
    done: Conversion = getattr(model, ATTRIBUTE)
    return {
        **done.config.to_dict(),
        "image_size": done.image_size,
        "blocks": [site.block for site in done.sites],
        "token_counts": [site.grid_out or site.num_out for site in done.sites],
        "active": [merger.active for merger in mergers_of(model).values()],
        "frozen": done.frozen,
        "macs_before": done.macs_before,
        "macs_after": done.macs_after,
    }


def warn_of_fewer(model: nn.Module, tokens: Tokens) -> None:
    """Say once that a converted network gives fewer tokens than before."""
    done: Conversion | None = getattr(model, ATTRIBUTE, None)
    if done is None or not tokens.merges or torch.compiler.is_compiling():
        return
    if tokens.size is not None and tokens.size.is_meta:
        return  # ltm counts multiply-adds
    if done.config.num_tokens is None and not done.state.has_warned:
        done.state.has_warned = True
        warnings.warn(
            "This network gives merged tokens, which stand for different numbers of patches: "
            "ltm.pool_tokens(model, features) is their mean, ltm.restore_tokens(model, "
            "features) has all patches, and model.token_merging.sizes says how many each is.",
            stacklevel=4,
        )


@torch.no_grad()
def adopt_(model: nn.Module, learned: dict[str, Merger]) -> None:
    """Copy what earlier mergers have learned to the new ones in their places."""
    for name, merger in mergers_of(model).items():
        if name in learned:
            merger.adopt_(learned[name])


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """If anything inside fails, restore the class and the attributes of every module.

    Tensors are not copied, so the code inside may replace them but not write into them.
    """
    before = [(module, type(module), _held(module)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, kind, held in before:
            become_(module, kind)
            vars(module).clear()
            vars(module).update(held)
        raise


def _held(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, with copies of its dicts of parameters, buffers and children."""
    return {n: v.copy() if isinstance(v, dict) else v for n, v in vars(module).items()}


class Resizable(nn.Module):
    """The parts of timm's interface that change the size or the classes of a network."""

    def set_input_size(self, *args: Any, **options: Any) -> None:
        """Timm's own; the conversion is planned anew. On an error nothing is changed."""
        if not hasattr(super(), "set_input_size"):
            raise ValueError(
                "set_input_size: this network takes any size and timm gives it none; convert it "
                "anew for another, merge_tokens_(model, config, image_size)."
            )
        conversion = getattr(self, ATTRIBUTE, None)
        if not isinstance(conversion, Conversion):
            raise ValueError("set_input_size: convert after resizing, not inside another module.")
        if conversion.frozen or conversion.config.counts is not None:
            kind = "a frozen model" if conversion.frozen else "a model with explicit counts"
            raise ValueError(f"set_input_size: {kind} is made for one size; resize before that.")
        learned = mergers_of(self)
        with all_or_nothing(self):
            revert_(self)
            host = cast("Any", self)
            host.set_input_size(*args, **options)
            convert_(self, conversion.config, tuple(host.patch_embed.img_size))
            adopt_(self, learned)

    def reset_classifier(self, num_classes: int, *args: Any, **options: Any) -> None:
        """Timm's own; class statistics are dropped, and MACs counted anew.

        A frozen model that needs its statistics is refused.
        """
        done: Conversion | None = getattr(self, ATTRIBUTE, None)
        if done is not None and done.frozen and any(m.active for m in mergers_of(self).values()):
            raise ValueError(
                "reset_classifier: a frozen model keeps the statistics of its classes; give it its "
                "new classes before freeze_."
            )
        super().reset_classifier(num_classes, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]
        device = next(self.parameters()).device
        for merger in mergers_of(self).values():
            merger.reset_classes_(num_classes)
            merger.to(device).train(merger.training)  # its new modules, too
        conversion = getattr(self, ATTRIBUTE, None)
        if isinstance(conversion, Conversion):
            sites = tuple(
                dataclasses.replace(site, num_classes=num_classes) for site in conversion.sites
            )
            size = conversion.image_size
            counted = {"macs_before": _macs_without(self, size), "macs_after": macs_of(self, size)}
            setattr(self, ATTRIBUTE, dataclasses.replace(conversion, sites=sites, **counted))

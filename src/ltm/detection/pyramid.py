"""Any network as a pyramid: feature maps of known channels and strides, for images of any size.

Also what all detectors share: their config, clean targets, and heads in full precision.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import timm
import torch
import torch.nn.functional as F
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import LayerNorm2d
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchvision.ops import clip_boxes_to_image

from ltm.adapters import select_adapter, shrunk_maps
from ltm.api import image_size_of, load, merge_tokens_
from ltm.api.saving import host_arguments
from ltm.core.cost import meta_copy, meta_images, running_on_meta
from ltm.detection.settings import Task
from ltm.methods import MethodConfig
from ltm.models import Say, check_name, read_weights, saved_config, silent

Size = tuple[int, int]
"""Height and width."""


class Pyramid(nn.Module):
    """A network's feature maps, from fine to coarse.

    Images are padded to a size that the network accepts, and the maps are cut back: a map of stride
    s has `ceil(side / s)` cells a side. A map that merging has shrunk is resampled to that size, or
    left as it is (`restore=False`). A network with one resolution (a ViT) becomes a simple pyramid,
    as in ViTDet.
    """

    def __init__(
        self,
        network: nn.Module,
        strides: Sequence[int] | None = None,
        *,
        restore: bool = True,
        canvas: Size | None = None,
        width: int = 256,
        host: dict[str, Any] | None = None,
    ) -> None:
        """Wrap a network.

        Args:
            network: A timm model, converted or not, with or without `features_only=True`. Its head
                is dropped.
            strides: The strides of the maps; by default all that the network has.
            restore: Resample maps that merging has shrunk.
            canvas: The input size of a network that accepts no other.
            width: Channels of a simple pyramid.
            host: What timm needs to make a whole model again (`architecture`, `model_args`).
        """
        super().__init__()
        self.network = _feature_network(network)
        self.restore = restore
        self.canvas = canvas
        self.host = host
        self.multiple = _patch_size(self.network)
        known = cast("Any", self.network).feature_info
        reductions, channels = known.reduction(), known.channels()
        self.necks: nn.ModuleList | None = None
        if _is_isotropic(known.info):
            base = reductions[-1]
            offered = tuple(base * 2**step // 4 for step in range(4) if base * 2**step % 4 == 0)
            self.strides = _chosen(strides, offered)
            self.channels = (width,) * len(self.strides)
            self.places = (len(reductions) - 1,)
            self.necks = nn.ModuleList(
                _simple_neck(channels[-1], width, base, stride) for stride in self.strides
            )
        else:
            self.strides = _chosen(strides, tuple(reductions))
            self.places = tuple(reductions.index(stride) for stride in self.strides)
            self.channels = tuple(channels[place] for place in self.places)

    @property
    def normalisation(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of the images that the network expects."""
        inner = getattr(self.network, "model", self.network)
        known = getattr(self.network, "pretrained_cfg", None) or getattr(
            inner, "pretrained_cfg", None
        )
        known = known or {}
        mean = known.get("mean", IMAGENET_DEFAULT_MEAN)
        return list(mean), list(known.get("std", IMAGENET_DEFAULT_STD))

    def forward(self, x: Tensor) -> list[Tensor]:
        size = (x.shape[-2], x.shape[-1])
        padded = self._padded(size)
        x = F.pad(x, (0, padded[1] - size[1], 0, padded[0] - size[0]))
        maps = self.network(x) if self.restore else shrunk_maps(self.network, x)
        maps = [_channels_first(self.network, maps[place]) for place in self.places]
        if self.necks is not None:
            maps = [neck(maps[-1]) for neck in self.necks]
        pairs = zip(maps, self.strides, strict=True)
        return [_cut(feature, stride, size, padded) for feature, stride in pairs]

    def _padded(self, size: Size) -> Size:
        if self.canvas is None:
            return cast("Size", tuple(-(-side // self.multiple) * self.multiple for side in size))
        if size[0] > self.canvas[0] or size[1] > self.canvas[1]:
            raise ValueError(
                f"images: got {size[0]} x {size[1]} pixels; this network takes at most "
                f"{self.canvas[0]} x {self.canvas[1]}."
            )
        return self.canvas


@dataclass(frozen=True, kw_only=True)
class DetectorConfig(ABC):
    """The settings that detectors of all kinds have."""

    task: ClassVar[Task]

    backbone: str
    """The timm name of a network, or the folder of a converted one that `ltm.save` wrote."""
    num_classes: int = 80
    """Classes, the background not counted."""
    merging: MethodConfig | None = None
    """How the network merges tokens; None for not at all."""
    image_size: Size
    pretrained: bool = False
    """Start from timm's weights."""
    weights: str | None = None
    """Start from a file of weights with timm's keys."""

    @property
    def padded_size(self) -> Size:
        """The size of the images that the network gets."""
        return self.image_size

    def maps(self) -> dict[str, Any]:
        """Arguments of the `Pyramid`."""
        return {}

    @abstractmethod
    def on(self, pyramid: Pyramid) -> Any:
        """Make the detector on an existing pyramid."""

    def build(self, say: Say = silent) -> Any:
        """Make the detector; `say` is told which entry of a weights file is used."""
        pyramid = build_pyramid(
            self.backbone,
            image_size=self.padded_size,
            merging=self.merging,
            pretrained=self.pretrained,
            weights=self.weights,
            say=say,
            **self.maps(),
        )
        return self.on(pyramid)


M = TypeVar("M", bound=nn.Module)


def in_full_precision(head: M) -> M:
    """Make a head return float32, also under autocast."""
    head.register_forward_hook(_to_float)
    return head


def _to_float(_: nn.Module, __: Any, outputs: Any) -> Any:
    return tree_map(Tensor.float, outputs)


_SMALLEST_SIDE = 0.1
"""Pixels; a thinner box can vanish when the image is resized."""


def clean_batch(
    images: Sequence[Tensor], targets: Sequence[Mapping[str, Any]] | None
) -> tuple[list[Tensor], list[dict[str, Tensor]] | None]:
    """Images with values from 0 to 1, and their targets, if there are any, cleaned."""
    images = [float_image(image) for image in images]
    if targets is None:
        return images, None
    pairs = zip(images, targets, strict=True)
    return images, [clean_target(t, (i.shape[-2], i.shape[-1])) for i, t in pairs]


def clean_target(target: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Tensor]:
    """Clip boxes to an image of size (height, width); drop crowds and boxes without area.

    The target keeps boxes, labels, and masks if there are any.
    """
    boxes = torch.as_tensor(target["boxes"]).as_subclass(Tensor).float().reshape(-1, 4)
    boxes = clip_boxes_to_image(boxes, size)
    kept = (boxes[:, 2:] - boxes[:, :2] >= _SMALLEST_SIDE).all(dim=1)
    if "iscrowd" in target:
        kept &= ~target["iscrowd"].bool()
    cleaned = {"boxes": boxes[kept], "labels": target["labels"].long()[kept]}
    if "masks" in target:
        cleaned["masks"] = target["masks"].as_subclass(Tensor)[kept]
    return cleaned


def float_image(image: Tensor) -> Tensor:
    """An image with values from 0 to 1, from 8 bit or from floats."""
    image = image.as_subclass(Tensor)
    return image if image.is_floating_point() else image.float() / 255


def build_pyramid(
    backbone: str,
    strides: Sequence[int] | None = None,
    *,
    image_size: Size,
    merging: MethodConfig | None = None,
    pretrained: bool = False,
    weights: str | None = None,
    restore: bool = True,
    say: Say = silent,
) -> Pyramid:
    """Make a network, converted if `merging` says how, and wrap it as a pyramid.

    Args:
        backbone: The timm name of a network, or the folder of a converted model (`ltm.save`).
        strides: The strides of the maps; by default all that the network has.
        image_size: The size at which `merging` keeps to its budget; other sizes work as well.
        merging: How the network merges tokens; a saved one keeps its own merging.
        pretrained: Load timm's weights.
        weights: Load this file of weights, with timm's keys, instead.
        restore: Resample maps that merging has shrunk to their nominal size.
        say: Called with a line that says which entry of `weights` is used.
    """
    if Path(backbone).is_dir():
        if merging is not None or pretrained or weights is not None:
            raise ValueError(
                f"backbone: {backbone} has its own merging and weights; give no others."
            )
        network, saved = load(backbone), saved_config(Path(backbone)) or {}
        host = {"architecture": saved["architecture"], "model_args": host_arguments(saved)}
        known = saved.get("pretrained_cfg") or {}
        host["normalisation"] = {name: known[name] for name in ("mean", "std") if name in known}
        return Pyramid(network, strides, restore=restore, host=host)
    check_name(backbone)
    arguments, canvas = size_arguments(backbone, image_size)
    looked_at: Any = timm.create_model(backbone, features_only=True, **arguments)
    levels = looked_at.feature_info.reduction()
    if _is_isotropic(looked_at.feature_info.info):
        places = [-1]
    else:
        places = [levels.index(stride) for stride in _chosen(strides, tuple(levels))]
    if weights is not None:
        state = read_weights(Path(weights), say)
        arguments["pretrained_cfg_overlay"] = {"state_dict": state, "custom_load": False}
    network = timm.create_model(
        backbone,
        features_only=True,
        pretrained=pretrained or weights is not None,
        out_indices=places,
        **arguments,
    )
    if merging is not None:
        _merge_for_maps_(network, merging, canvas or image_size)
    return Pyramid(network, strides, restore=restore, canvas=canvas)


def _merge_for_maps_(network: nn.Module, merging: MethodConfig, image_size: Size) -> None:
    """Convert with the support that suits feature maps, unless the config chooses one.

    On MobileViT, tokens merged by matching are put back at the end of a block, while a learned
    support shrinks its maps, and boxes get much less precise. So the learned one is used only for
    budgets that matching cannot meet.
    """
    restoring = merging.for_feature_maps()
    if restoring != merging and select_adapter(network).shrinks_maps:
        with suppress(ValueError):
            merge_tokens_(network, restoring, image_size)
            return
    merge_tokens_(network, merging, image_size)


def size_arguments(name: str, image_size: Size) -> tuple[dict[str, Any], Size | None]:
    """Arguments of a timm network for images of any size; and its only size if it has just one."""
    host = type(timm.create_model(name))
    accepted = {p for c in host.__mro__ for p in inspect.signature(c.__init__).parameters}
    arguments = {k: v for k, v in _ANY_SIZE.items() if k in accepted}
    fixed = bool(timm.get_pretrained_cfg_value(name, "fixed_input_size"))
    if not fixed or "img_size" not in accepted:
        return arguments, None
    if arguments:
        return {**arguments, "img_size": image_size}, None
    side = -(-max(image_size) // 32) * 32
    return {"img_size": side}, (side, side)


_ANY_SIZE = {"dynamic_img_size": True, "dynamic_img_pad": True, "strict_img_size": False}


def _feature_network(network: nn.Module) -> nn.Module:
    """The network as one of timm's feature extractors, with `feature_info`."""
    if hasattr(getattr(network, "feature_info", None), "reduction"):
        return network
    if not hasattr(network, "forward_intermediates"):
        raise ValueError(
            f"network: {type(network).__name__} has no feature maps; give a timm model, with or "
            "without features_only=True."
        )
    levels: list[dict[str, Any]] = cast("Any", network).feature_info
    places: Any = [-1] if _is_isotropic(levels) else list(range(len(levels)))
    # timm's own pruning resets the classifier, and with it a converted model's class statistics.
    _drop_unused_(network)
    return FeatureGetterNet(network, out_indices=places, prune=False)


def _is_isotropic(levels: Sequence[dict[str, Any]]) -> bool:
    return len(levels) > 1 and len({level["reduction"] for level in levels}) == 1


def _drop_unused_(network: nn.Module) -> None:
    """Remove the parts that the feature maps do not need: the head, the last normalisation."""
    shadow = meta_copy(network)
    called: set[str] = set()
    for name, child in shadow.named_children():
        for module in child.modules():
            module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    with running_on_meta(shadow):
        images = meta_images(network, image_size_of(network))
        cast("Any", shadow).forward_intermediates(images, intermediates_only=True)
    for name, child in list(network.named_children()):
        if name not in called and any(True for _ in child.parameters()):
            setattr(network, name, nn.Identity())


def _chosen(strides: Sequence[int] | None, offered: tuple[int, ...]) -> tuple[int, ...]:
    if strides is None:
        return offered
    for stride in strides:
        if stride not in offered:
            has = ", ".join(map(str, offered))
            raise ValueError(f"strides: got {stride}; this network has {has}.")
    return tuple(sorted(strides))


def _patch_size(network: nn.Module) -> int:
    """The sides of images must be multiples of this."""
    for module in network.modules():
        size = getattr(getattr(module, "patch_embed", None), "patch_size", None)
        if size is not None:
            sides = size if isinstance(size, tuple) else (size, size)
            return math.lcm(*sides)
    return 1


def _channels_first(network: nn.Module, feature: Tensor) -> Tensor:
    last = str(getattr(network, "output_fmt", "")).endswith("NHWC")
    return feature.permute(0, 3, 1, 2).contiguous() if last else feature


def _cut(feature: Tensor, stride: int, size: Size, padded: Size) -> Tensor:
    """The part of a map that belongs to the image, without its padding."""
    if size == padded:
        return feature
    cells: list[int] = []
    for have, side, whole in zip(feature.shape[-2:], size, padded, strict=True):
        nominal = have == -(-whole // stride)
        cells.append(-(-side // stride) if nominal else -(-have * side // whole))
    return feature[..., : cells[0], : cells[1]]


def _simple_neck(channels: int, width: int, base: int, stride: int) -> nn.Sequential:
    """One level of ViTDet's simple pyramid: up or down to the stride, then two convolutions."""
    layers: list[nn.Module] = []
    steps = round(math.log2(base / stride))
    for step in range(steps):
        narrower = max(channels // 2, 32)
        layers.append(nn.ConvTranspose2d(channels, narrower, kernel_size=2, stride=2))
        channels = narrower
        if step < steps - 1:
            layers += [LayerNorm2d(channels), nn.GELU()]
    if steps < 0:
        layers.append(nn.MaxPool2d(kernel_size=2**-steps, ceil_mode=True))
    return nn.Sequential(
        *layers,
        nn.Conv2d(channels, width, kernel_size=1, bias=False),
        LayerNorm2d(width),
        nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
        LayerNorm2d(width),
    )

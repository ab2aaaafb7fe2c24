"""What is wrong with a network's name or image size: said before any weights are read."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class SizeError(ValueError):
    """A network that does not run on images of the size asked for."""


def check_host(
    name: str, arguments: Mapping[str, Any], image_size: int | None = None, *, merges: bool = False
) -> None:
    """Refuse a name that timm does not know, a size that does not fit and what cannot merge."""
    check_name(name)
    outline = _outline(name, arguments)
    if outline is None:
        return
    if merges:
        from ltm.adapters.base import select_adapter

        select_adapter(outline)
    check_patches(outline, image_size)


def check_name(name: str) -> None:
    """Refuse a name that timm does not know, and say which it may have meant."""
    import timm

    if name.startswith("ltm_"):
        import ltm.zoo  # noqa: F401 - registers its names
    architecture = name.partition(".")[0]
    if ":" in name or timm.is_model(architecture):
        return
    close = closest(architecture, timm.list_models())
    hint = f"; did you mean {', '.join(close)}?" if close else "; timm.list_models() names them"
    raise ValueError(f"model {name} is not known to timm{hint}")


def closest(wrong: str, known: Iterable[str], most: int = 3, cutoff: float = 0.5) -> list[str]:
    """The names most like a wrong one: of its family if there is one, by how they begin first."""
    known = list(known)
    family = [name for name in known if name.partition("_")[0] == wrong.partition("_")[0]]
    matcher = difflib.SequenceMatcher(b=wrong)

    def likeness(text: str) -> float:
        matcher.set_seq1(text)
        return matcher.ratio()

    for names in (family, known):
        rated = sorted((-likeness(name[: len(wrong)]), -likeness(name), name) for name in names)
        close = [name for start, _, name in rated if -start >= cutoff]
        if close:
            return close[:most]
    return []


def _outline(name: str, arguments: Mapping[str, Any]) -> nn.Module | None:
    """The network without any values, which takes no time; None if that cannot be had."""
    import timm
    import torch

    if ":" in name or name.startswith("ltm_"):  # the one is on a hub, the other converted already
        return None
    try:
        with torch.device("meta"):
            return timm.create_model(name, **arguments)
    except Exception:  # noqa: BLE001 - making it in earnest says what is wrong
        return None


def check_positive(image_size: int | None) -> None:
    """Refuse a size of which there are no images."""
    if image_size is not None and image_size < 1:
        raise ValueError(f"--image-size is {image_size}: it must be at least 1")


def check_patches(model: nn.Module, image_size: int | None) -> None:
    """Refuse a size of which patches would be cut off; what a network was made for is fine."""
    embedding: Any = getattr(model, "patch_embed", None)
    sides = getattr(embedding, "patch_size", None)
    if image_size is None or not isinstance(sides, tuple):
        return
    built = tuple(getattr(embedding, "img_size", None) or ())
    if built == (image_size, image_size) or getattr(embedding, "dynamic_img_pad", False):
        return
    multiple = math.lcm(*sides)
    if image_size % multiple:
        raise SizeError(
            f"--image-size is {image_size}: it must be a multiple of {multiple}, the side of this "
            "network's patches"
        )


def check_forward(model: nn.Module, image_size: int | None) -> None:
    """Refuse a size at which the network fails, for one whose shapes can be told in advance."""
    from ltm.adapters.base import select_adapter
    from ltm.core.cost import meta_copy, meta_images, run_on_meta

    if image_size is None:
        return
    try:
        select_adapter(model)
    except ValueError:
        return
    try:
        run_on_meta(meta_copy(model), meta_images(model, (image_size, image_size)))
    except (RuntimeError, AssertionError, ValueError, ZeroDivisionError) as error:
        raise size_refused(image_size) from error


def size_refused(image_size: int) -> SizeError:
    """The sentence about a size at which a network fails."""
    return SizeError(
        f"--image-size is {image_size}: this network cannot take it; leave it out, or give a "
        "multiple of 32"
    )

"""Checks for NaN and infinity; the errors say where they are."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class NonFiniteError(ValueError):
    """NaN or infinity where only finite values are allowed."""


def is_finite(x: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity; on `meta` it is taken for granted."""
    return not x.is_floating_point() or x.is_meta or bool(x.isfinite().all())


def require_finite(tensors: Mapping[str, Tensor], owner: str = "") -> None:
    """Raise an error if there is NaN or infinity; it names the first such tensor.

    `owner` is how the error message begins, such as "model: ".
    """
    for name, x in tensors.items():
        if not is_finite(x):
            count = int((~x.isfinite()).sum())
            raise NonFiniteError(
                f"{owner}{name} has {count} values that are NaN or infinite: only finite ones fit"
            )


def require_finite_images(images: Tensor, owner: str) -> None:
    """Raise an error if a batch has NaN or infinity; it lists the images by index."""
    if is_finite(images):
        return
    bad = [index for index, image in enumerate(images) if not is_finite(image)]
    few = ", ".join(map(str, bad[:5])) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    raise NonFiniteError(
        f"{owner}: got NaN or infinite values in image {few} of {len(images)} (counted from 0); "
        "leave it out."
    )

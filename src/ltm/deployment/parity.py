"""Does an exported model say what the original says?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ltm.deployment.settings import BATCH_SIZES, TOLERANCE

Classify = Callable[[Tensor], Tensor]
"""From images, `b c h w`, to one score per class, `b a`."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How far an exported model is from the original at one batch size."""

    batch_size: int
    num_images: int
    max_relative_difference: float
    """The largest difference of any score, relative to the image's largest score."""
    agreement: float
    """Share of the images with the same prediction."""


class ParityError(ValueError):
    """An exported model does not say what the original says."""


@torch.no_grad()
def compare(
    original: Classify,
    exported: Classify,
    images: Tensor,
    batch_sizes: Sequence[int] = BATCH_SIZES,
) -> list[Parity]:
    """Show images to both in batches of each size; a small set is gone through again."""
    rows = []
    for size in batch_sizes:
        differences, agreements = [], []
        for batch in _batches(images, size):
            expected, found = original(batch).double(), exported(batch).double()
            if expected.shape != found.shape:
                raise ParityError(
                    f"at batch {size} the exported model gives {tuple(found.shape)} instead of "
                    f"{tuple(expected.shape)}"
                )
            scale = expected.abs().amax(dim=1).clamp_min(1e-12)
            difference = (expected - found).abs().amax(dim=1) / scale
            # NaN would pass every comparison.
            differences.append(difference.nan_to_num(torch.inf))
            agreements.append(expected.argmax(1) == found.argmax(1))
        worst, agreement = torch.cat(differences), torch.cat(agreements)
        rows.append(
            Parity(
                batch_size=size,
                num_images=len(worst),
                max_relative_difference=float(worst.max()),
                agreement=float(agreement.double().mean()),
            )
        )
    return rows


def require_parity(rows: Sequence[Parity], what: str, tolerance: float = TOLERANCE) -> None:
    """Raise where a difference is larger than the tolerance."""
    for row in rows:
        if not row.max_relative_difference <= tolerance:
            raise ParityError(
                f"{what} differs from the original by {row.max_relative_difference:.2e} at batch "
                f"{row.batch_size}: at most {tolerance:.0e} is allowed"
            )


def _batches(images: Tensor, size: int) -> Iterator[Tensor]:
    """Whole batches that cover all images at least once."""
    if len(images) == 0:
        raise ValueError("images: there are none to compare on")
    places = torch.arange(-(-len(images) // size) * size) % len(images)
    for start in range(0, len(places), size):
        yield images[places[start : start + size]]

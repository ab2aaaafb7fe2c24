"""Settings of `ltm.visualize`. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ltm.core.validation import require_least


@dataclass(frozen=True, kw_only=True)
class VisualizeSettings:
    """What to draw."""

    method: str | None = None
    """How to merge, such as ltm:support=learned,weights=uniform; by default ltm."""
    against: str = "tome"
    """A method to compare with, at the same ratio, or none."""
    ratio: float = 0.7
    """Share of the multiply-adds to keep."""
    targets: tuple[str, ...] = ()
    """Patches whose token to draw, as row,column: one for all images, or one for each. Chosen by
    default."""
    sites: str = "last"
    """Blocks to draw: all, numbers such as 3,8, or last: the last merging block whose tokens a
    later block attends to."""
    gif: bool = False
    """Also write an animation through the blocks for every image."""
    limit: int = 12
    """Draw at most so many images."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        require_least("limit", self.limit)

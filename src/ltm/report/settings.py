"""Settings of `ltm.visualize`. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ltm.core.validation import require_least


@dataclass(frozen=True, kw_only=True)
class VisualizeSettings:
    """What is drawn."""

    method: str | None = None
    """How to merge, such as ltm:support=learned,weights=uniform; by default ltm."""
    against: str = "tome"
    """Another method to draw next to it, at the same ratio; none leaves it out."""
    ratio: float = 0.7
    """Share of the multiply-adds to keep."""
    targets: tuple[str, ...] = ()
    """Patches to follow, as row,column: one for all images or one per image. Chosen by default."""
    sites: str = "last"
    """Blocks to draw: last (the last whose tokens are still read), all, or numbers such as 3,8."""
    gif: bool = False
    """Also write an animation through the blocks for every image."""
    limit: int = 12
    """Images to draw at most."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        require_least("limit", self.limit)

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
    """Another method to draw beside it, at the same ratio; none for none."""
    ratio: float = 0.7
    """Share of the multiply-adds that may remain."""
    targets: tuple[str, ...] = ()
    """Patches as row,column, one for all images or one for each; by default telling ones."""
    sites: str = "last"
    """Blocks to draw: last (whose tokens are still attended to), all, or numbers: 3,8."""
    gif: bool = False
    """Also make a film through the blocks for every image."""
    limit: int = 12
    """Draw at most so many images."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        require_least("limit", self.limit)

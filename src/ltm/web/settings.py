"""Settings of `ltm serve`. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What the page offers, and where it listens."""

    class_names: Path | None = None
    """Text file, one name a line, or JSON; by default what is known."""
    crop_ratio: float | None = None
    """Evaluation crop as a share of the resized side; by default the model's."""
    embedded: tuple[Literal["ViT", "Swin"], ...] = ("ViT", "Swin")
    """Embedded networks to offer beside it."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines see the page."""
    port: int = 7860
    """Port to listen on."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError(f"port is {self.port}: it must be between 1 and 65535")

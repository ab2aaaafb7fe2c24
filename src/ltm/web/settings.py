"""Settings of `ltm serve`. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ltm.core.validation import require
from ltm.deployment.settings import InputSettings


@dataclass(frozen=True, kw_only=True)
class ServeSettings(InputSettings):
    """What the page offers, and where it listens."""

    embedded: tuple[Literal["demo_vit"], ...] = ("demo_vit",)
    """Networks of the package to show as well."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines see the page."""
    port: int = 7860
    """Port to listen on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.port < 65536, "port", self.port, "from 1 to 65535")

"""The model card: README.md in the layout of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ltm.visual.comparison import Comparison
from ltm.visual.curves import display_name
from ltm.visual.report import templates
from ltm.visual.verdicts import verdicts

CARD = "README.md"


def write_card(
    comparison: Comparison, folder: Path, *, origin: Mapping[str, str] | None = None
) -> Path:
    """Write the card of a compressed model; `origin` may name a `base_model` and a `license`."""
    text = templates().get_template("card.md").render(
        comparison=comparison,
        origin=origin or {},
        compressed=comparison.compressed,
        base=comparison.base,
        verdicts=verdicts(comparison),
        name=display_name,
        method=display_name(comparison.method),
    )  # fmt: skip
    path = folder / CARD
    path.write_text(text.strip() + "\n", encoding="utf-8")
    return path

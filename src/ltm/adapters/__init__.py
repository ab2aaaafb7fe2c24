"""The families. Importing one registers it; a family that contains another's blocks comes first."""

# isort: off
from ltm.adapters import mobilevit as mobilevit
from ltm.adapters import swin as swin
from ltm.adapters import swinv2 as swinv2
from ltm.adapters import efficientvit as efficientvit
from ltm.adapters import vit as vit
from ltm.adapters import eva as eva
from ltm.adapters import relative as relative
from ltm.adapters import naflex as naflex

# isort: on
from ltm.adapters.base import (
    Adapter,
    Conversion,
    adapter_of,
    adapters,
    find_adapter,
    select_adapter,
)
from ltm.adapters.grids import shrunk_maps

__all__ = [
    "Adapter",
    "Conversion",
    "adapter_of",
    "adapters",
    "find_adapter",
    "select_adapter",
    "shrunk_maps",
]
